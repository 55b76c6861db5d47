"""Everything that programs ask of a card, in one program, and programs that ask for what one process has not."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.warm_python import warm_python

import memfit
from memfit.cli.main import main
from memfit.errors import MemfitError

PROGRAM = """
import pathlib
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
start.record()
card = torch.cuda.get_device_properties(0)
kind = torch.accelerator.current_accelerator()
assert torch.cuda.mem_get_info("cuda:0")[1] == card.total_memory and torch.get_device_module("cuda") is torch.cuda
assert (torch.accelerator.device_count(), torch.accelerator.current_device_index(), str(kind)) == (1, 0, "cuda")
torch.accelerator.set_device_index(0)
torch.accelerator.synchronize()
generator = torch.Generator("cuda").manual_seed(3)
assert torch.randn(4, generator=generator, device="cuda").shape == (4,)
assert torch.Generator(device=kind).device.index == 0
pooled = nn.AdaptiveAvgPool2d(4), nn.Flatten()
net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), *pooled, nn.Linear(256, 10))
net.to("cuda", memory_format=torch.channels_last)
data = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,)))
loader = DataLoader(data, 8, shuffle=True, num_workers=4, pin_memory=True, persistent_workers=True, prefetch_factor=4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler, side = torch.amp.GradScaler("cuda"), torch.cuda.Stream()
frozen = {name: each.detach() for name, each in net.named_parameters()}
def loss_of(weights, x, y):
    return nn.functional.cross_entropy(functional_call(net, weights, (x,)), y)
for x, y in loader:
    with torch.cuda.stream(side):
        x = x.to("cuda", non_blocking=True, memory_format=torch.channels_last)
        y = y.to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    x.record_stream(torch.cuda.current_stream())
    with torch.autograd.graph.save_on_cpu(pin_memory=True), torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    with torch.inference_mode():
        right = (net(x).argmax(1) == y).float().mean()
    assert set(grad(loss_of)(frozen, x, y)) == set(frozen)
    each = vmap(grad(loss_of), in_dims=(None, 0, 0))(frozen, x.unsqueeze(1), y.unsqueeze(1))
    assert each["4.bias"].shape == (8, 10)
    del each
    before = torch.cuda.memory_reserved()
    torch.empty(1 << 28, device="cuda")
    held = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before < held
    end.record()
    took = start.elapsed_time(end)
    print(f"right {right.item():.2f}, {took:.1f} ms, {8000 / took:.0f} a second, {torch.cuda.utilization()} % busy")
    pathlib.Path("told.txt").write_text(torch.cuda.memory_summary(abbreviated=True))
    torch.cuda.random.set_rng_state(torch.cuda.random.get_rng_state())
    assert torch.accelerator.max_memory_allocated() == torch.cuda.memory_stats()["allocated_bytes.all.peak"]
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
SPAWNED = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
def work(rank, world, width):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="12355")
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.set_device(rank)
    model = DistributedDataParallel(nn.Linear(width, width).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        model(torch.randn(4, width, device=rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
if __name__ == "__main__":
    world = int(sys.argv[1]) if len(sys.argv) > 1 else torch.cuda.device_count()
    mp.spawn(work, args=(world, 256), nprocs=world, join=True)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)

    def put(text: str) -> str:
        (tmp_path / "train.py").write_text(text)
        return "train.py"

    return put


def test_a_program_may_ask_a_card_for_everything(write, capfd, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    plan = memfit.trace_script(write(PROGRAM), gpu="RTX 4090")
    assert "right ?, ? ms, ? a second, ? % busy" in capfd.readouterr().err
    assert (tmp_path / "told.txt").read_text().startswith("NVIDIA RTX 4090, predicted\nallocated")
    assert any(note.startswith("stopped after 3") for note in plan.notes)


@pytest.mark.parametrize("world", ["", " 4"])
def test_processes_that_a_program_spawns_are_shown_by_the_first(write, world: str) -> None:  # type: ignore[no-untyped-def]
    plan = memfit.trace_script(f"{write(SPAWNED)}{world}")
    assert any(note.startswith("stopped after 3") for note in plan.notes)
    assert any("of 4" in note for note in plan.notes) == bool(world)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import multiprocessing\ndef work(): pass\np = multiprocessing.Process(target=work)\np.start()\n",
         r"train.py:4, in <module>: the code starts a process of its own"),
        ("import os\nif os.fork() == 0: os._exit(0)\n", r"train.py:2, in <module>: the code forks"),
        ("import torch\ntorch.zeros(1, device='cuda:1')\n", "the code uses cuda:1, and memfit traces one GPU"),
        ("import torch\ntorch.zeros(1).cuda(1)\n", "the code uses cuda:1, and memfit traces one GPU"),
        ("import torch\ntorch.cuda.set_device(1)\n", "the code uses cuda:1, and memfit traces one GPU"),
        ("import nowhere_to_be_found\n", "needs the package nowhere_to_be_found"),
        ("import sys, torch\ntorch.zeros(1).cuda()\nsys.exit('bad data')\n", "sys.exit"),
        ("def f(:\n", "train.py:1 is no Python"),
        ("import os\nos._exit(3)\n", r"train.py:2, in <module>: the code ends the whole process"),
    ],
)  # fmt: skip
def test_what_memfit_does_not_cover_is_one_clear_message_and_leaves_nothing(  # type: ignore[no-untyped-def]
    write, text, said, capfd, tmp_path, monkeypatch
) -> None:
    import torch

    (own := tmp_path / "temporary").mkdir()  # other tests leave and sweep folders of theirs in the usual one
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    name = write(text)
    with pytest.raises(MemfitError):
        memfit.trace_script(name)  # what is imported for the first time sets variables of its own
    before = _state()
    with pytest.raises(MemfitError, match=said) as caught:
        memfit.trace_script(name)
    assert caught.value.hint and _state() == before and not torch.distributed.is_initialized()
    assert main(["plan", "script", "--", name]) == 2
    out, err = capfd.readouterr()
    assert not out and "error: " in err and "Traceback" not in err


def _state() -> tuple[object, ...]:
    import torch

    left = sorted(name for name in os.listdir(tempfile.gettempdir()) if name.startswith("memfit-"))
    patched = torch.cuda.is_available, torch.load, torch.save, torch.multiprocessing.spawn, os.fork, sys.excepthook
    return (dict(os.environ), os.getcwd(), list(sys.path), sys.argv[:], left, *patched)


def test_a_pool_that_prepares_data_may_run_beside(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    name = write(
        "import json, multiprocessing, pathlib, torch\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n    found = pool.map(abs, [-1, 2])\n"
        "pathlib.Path('told.json').write_text(json.dumps(found))\ntorch.zeros(1, device='cuda')\n"
    )
    memfit.trace_script(name)
    assert json.loads((tmp_path / "told.json").read_text()) == [1, 2]


OLD_NAMES = """
import numpy, torch
Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor
made = [Tensor(4, 5), Tensor(numpy.ones((4, 5))), Tensor([[1.0] * 5] * 4), torch.ones(4, 5).type(Tensor)]
made += [Tensor(made[0].size())]
assert all(each.is_cuda and each.shape == (4, 5) and each.dtype == torch.float32 for each in made)
assert isinstance(made[0], Tensor) and not isinstance(torch.ones(1), Tensor) and Tensor().shape == (0,)
assert torch.ones(2).type("torch.cuda.LongTensor").type() == "torch.cuda.LongTensor"
assert made[0].type(torch.FloatTensor).device.type == "cpu" and made[0].type(torch.half).is_cuda
on_meta = torch.ones(3, device="meta")
assert all(torch.empty_like(on_meta, device=gpu).is_cuda for gpu in (0, "cuda", "cuda:0"))
assert torch.ones(3).to(0).is_cuda
"""


def test_tensors_by_their_old_names_and_cards_by_their_numbers_are_on_the_gpu(write) -> None:  # type: ignore[no-untyped-def]
    assert memfit.trace_script(str(write(OLD_NAMES)), gpu="24GB").peak.allocated_bytes > 0


def test_several_cards_in_one_process_are_told_as_not_covered(write) -> None:  # type: ignore[no-untyped-def]
    model = "model = torch.nn.DataParallel(torch.nn.Linear(8, 8).cuda(), device_ids=[0, 1])"
    with pytest.raises(MemfitError, match="the code uses cuda:1, and memfit traces one GPU"):
        memfit.trace_script(write(f"import torch\n{model}\nmodel(torch.ones(4, 8).cuda())\n"), gpu="24GB")


def test_an_answer_that_no_line_asks_for_is_said_to_have_no_effect(write) -> None:  # type: ignore[no-untyped-def]
    script = write("import torch\nx = torch.ones(4, device='cuda')\n")
    plan = memfit.trace_script(script, gpu="24GB", answers={"train.py:99": True})
    assert any("--answer train.py:99 had no effect" in note for note in plan.notes)
    assert str(plan).index("--answer train.py:99 had no effect") < str(plan).index("at the peak")


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [("train.py:0", True, "lines are counted from 1"), ("train.py:2", math.nan, "nan is no value to decide by")],
)
def test_line_0_and_nan_are_no_answers(write, place: str, value: object, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(MemfitError, match=said):
        memfit.trace_script(write("import torch\n"), answers={place: value})  # type: ignore[dict-item]


def test_nan_is_no_answer_of_a_function_either() -> None:
    with pytest.raises(MemfitError, match="has another form"):
        memfit.trace(lambda: None, answers={("train.py", "step"): math.nan})


EMPTIED = """
import memfit
try:
    memfit.trace_script("emptied.py")
except memfit.MemfitError as error:
    print(error)
print(memfit.trace_script("trained.py").peak.allocated_bytes > 0)
"""
"""In a process of its own: Python's modules that are imported anew have other classes than those that others know."""


def test_a_program_that_empties_sys_modules_is_told_so_and_the_next_one_is_planned(tmp_path: Path) -> None:
    trained = "import sys, torch\nm = torch.nn.Linear(8, 8).cuda()\n{}\nm(torch.ones(4, 8).cuda()).sum().backward()\n"
    (tmp_path / "emptied.py").write_text(trained.format("sys.modules.clear()"))
    (tmp_path / "trained.py").write_text(trained.format(""))
    ended = subprocess.run([warm_python(), "-c", EMPTIED], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "takes modules that are in use out of sys.modules: sys, torch" in ended.stdout
    assert ended.stdout.endswith("\nTrue\n"), ended.stderr


def test_a_program_that_ends_with_a_text_without_end_is_told_in_a_few_lines(write) -> None:  # type: ignore[no-untyped-def]
    for ends in ("raise ValueError('x ' * 100_000)", "import sys\nsys.exit('x' * 100_000)"):
        with pytest.raises(MemfitError) as caught:
            memfit.trace_script(write(ends))
        assert len(str(caught.value)) < 400


def test_ops_on_the_host_take_one_thread_unless_the_environment_says_otherwise(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import torch

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script, before = tmp_path / "train.py", torch.get_num_threads()
    script.write_text("import torch\ntorch.zeros(1).cuda()\nassert torch.get_num_threads() == 1\n")
    memfit.trace_script(str(script))
    assert torch.get_num_threads() == before
    script.write_text(f"import torch\ntorch.zeros(1).cuda()\nassert torch.get_num_threads() == {before}\n")
    memfit.trace_script(f"OMP_NUM_THREADS={before} {script}")
