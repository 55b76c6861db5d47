"""Programs as people write them, run unmodified on the pretended GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memfit
from memfit.cli.main import main
from memfit.environment import CUDA_VARIABLE as ALLOCATOR
from memfit.errors import MemfitError, TraceError, UsageError

HEAD = """
import argparse, math, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=4)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000)).to(device)
data = TensorDataset(torch.arange(4096).reshape(256, 16) % 1000)
loader = DataLoader(data, args.batch_size, num_workers=2, pin_memory=True)
def step(ids):
    logits = model(ids)
    return nn.functional.cross_entropy(logits.view(-1, 1000), ids.view(-1))
"""
LOOP = """
optimizer = torch.optim.AdamW(model.parameters())
best, total = math.inf, 0.0
for epoch in range(1000):
    for ids, in loader:
        loss = step(ids.to(device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        print(f"loss {loss.item():.3f} peak {torch.cuda.max_memory_allocated()}")
    if total < best:
        torch.save(model.state_dict(), "best.pt")
"""
BY_HAND = """
for ids, in loader:
    model.zero_grad()
    step(ids.to(device)).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.grad, alpha=-0.1)
open("ended", "w").close()
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)

    def put(text: str) -> str:
        (tmp_path / "train.py").write_text(HEAD + text)
        return "train.py"

    return put


def peak(plan: memfit.Plan) -> int:
    found: int = plan.to_json()["peak"]["allocated_bytes"]
    return found


def test_a_script_that_would_train_for_days_is_planned_after_a_few_steps(write, capfd, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    plan = memfit.trace_script(f"python {write(LOOP)} --batch_size 8", gpu="RTX 4090")
    printed = capfd.readouterr().err
    assert any(note.startswith("stopped after 3 optimizer steps") for note in plan.notes)
    assert "loss ? peak" in printed
    assert plan.verdict == "safe" and plan.to_json()["workload"]["command"] == ["train.py", "--batch_size", "8"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]
    # what the script says of its own peak is the plan's, as far as it had come
    told = [int(line.split()[-1]) for line in printed.splitlines() if line.startswith("loss")]
    assert told[-1] == peak(plan)


def test_its_own_arguments_reach_it_and_change_the_plan(write) -> None:  # type: ignore[no-untyped-def]
    name = write(LOOP)
    rows = 4 * 64 * 16 * 1000  # of fp32 logits, at the least once
    assert peak(memfit.trace_script([name, "--batch_size", "64"])) > peak(memfit.trace_script([name])) + rows


def test_a_script_is_planned_as_the_same_loop_handed_over_as_a_function(write) -> None:  # type: ignore[no-untyped-def]
    import torch
    from torch import arange, nn, optim

    def loop() -> None:
        model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000)).to("cuda")
        optimizer = optim.AdamW(model.parameters())

        def step(ids: torch.Tensor) -> torch.Tensor:
            logits = model(ids)
            return nn.functional.cross_entropy(logits.view(-1, 1000), ids.view(-1))

        for _ in range(4):
            loss = step((arange(64).reshape(4, 16) % 1000).to("cuda"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert peak(memfit.trace_script(write(LOOP))) == peak(memfit.trace(loop))
    assert not torch.cuda.is_available()


def test_weights_changed_by_hand_count_as_steps(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    plan = memfit.trace_script(write(BY_HAND))
    assert any(note.startswith("stopped after") for note in plan.notes) and not (tmp_path / "ended").exists()


def test_a_script_without_a_step_runs_to_its_end(write) -> None:  # type: ignore[no-untyped-def]
    plan = memfit.trace_script(
        write("with torch.no_grad():\n    step(next(iter(loader))[0].to(device))\nsys.exit(0)\n")
    )
    assert "the script ran to its end without a step of an optimizer" in plan.notes


def test_afterwards_everything_is_as_it_was(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "helper_of_mine.py").write_text("x = 1\n")
    before = (sys.argv[:], sys.path[:], dict(os.environ), os.getcwd())
    memfit.trace_script(write("import helper_of_mine\nos.environ['MINE'] = '1'\nos.chdir('/')\n" + LOOP))
    assert (sys.argv, sys.path, dict(os.environ), os.getcwd()) == before
    assert "helper_of_mine" not in sys.modules


@pytest.mark.parametrize("command", ["python train.py", "python -m train"])
@pytest.mark.parametrize("folder", ["lib", "{here}/lib"])
def test_pythonpath_before_a_command_is_where_it_imports_from(
    write, tmp_path: Path, monkeypatch, command, folder
) -> None:  # type: ignore[no-untyped-def]
    for name in ("lib", "installed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part_of_mine.py").write_text(f"where = {name!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    before = sys.path[:]
    write("import part_of_mine\nassert part_of_mine.where == 'lib'\n"
          "assert [os.path.basename(p) for p in sys.path[1:3]] == ['lib', 'installed']\n" + LOOP)  # fmt: skip
    memfit.trace_script(f"PYTHONPATH={folder.format(here=tmp_path)} {command}")
    assert sys.path == before and "part_of_mine" not in sys.modules


def test_what_lies_beside_a_script_goes_before_pythonpath(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "part_of_mine.py").write_text("raise AssertionError\n")
    (tmp_path / "part_of_mine.py").write_text("")
    memfit.trace_script(f"PYTHONPATH=lib python {write('import part_of_mine' + LOOP)}")


def test_variables_before_a_command_are_there_before_torch_is_imported(write) -> None:  # type: ignore[no-untyped-def]
    given = {"TORCH_COMPILE_DISABLE": "1", "TORCHINDUCTOR_SHAPE_PADDING": "0", ALLOCATOR: "expandable_segments:True"}
    write("import torch._inductor.config\nassert not torch._inductor.config.shape_padding\n"
          "torch.compile(torch.sin)(torch.ones(1024, device='cuda'))\n")  # fmt: skip
    words = [sys.executable, "-m", "memfit", "plan", "script", "--json", "--"]
    words += [*(f"{name}={value}" for name, value in given.items()), "python", "train.py"]
    made = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    plan = json.loads(made.stdout)
    assert any(note.startswith("torch.compile was asked for, and compiled nothing") for note in plan["notes"])
    assert plan["workload"]["alloc_conf"] == "expandable_segments:True"


def test_the_allocator_of_a_script_is_set_by_its_variable_and_by_what_is_asked_for_before(write, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    path = write(LOOP)

    def settings(command: str, **asked: str) -> object:
        return memfit.trace_script(command, **asked).workload["alloc_conf"]  # type: ignore[arg-type]

    monkeypatch.setenv(ALLOCATOR, "max_split_size_mb:64")
    assert settings(path) == "max_split_size_mb:64"
    assert settings(f"{ALLOCATOR}=expandable_segments:True python {path}") == "expandable_segments:True"
    assert settings(path, alloc_conf="max_split_size_mb:128") == "max_split_size_mb:128"


def test_a_script_that_sets_the_allocator_itself_is_planned_with_that(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    by_variable = f"import os\nos.environ['{ALLOCATOR}'] = 'expandable_segments:True'\n"
    by_call = "import torch\ntorch.cuda.memory._set_allocator_settings('expandable_segments:True')\n"
    given = memfit.trace_script(write(LOOP), alloc_conf="expandable_segments:True").to_json()["peak"]
    assert given != memfit.trace_script(write(LOOP)).to_json()["peak"]
    for said in (by_variable, by_call):
        (tmp_path / "train.py").write_text(said + HEAD + LOOP)
        plan = memfit.trace_script("train.py")
        assert plan.to_json()["peak"] == given and plan.workload["alloc_conf"] == "expandable_segments:True"
        assert any(note.startswith("the allocator's settings are those that") for note in plan.notes)
    assert ALLOCATOR not in os.environ


def test_what_a_user_says_of_the_allocator_stands_above_what_the_script_sets(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "train.py").write_text(
        f"import os\nos.environ['{ALLOCATOR}'] = 'expandable_segments:True'\n{HEAD}{LOOP}"
    )
    plan = memfit.trace_script("train.py", alloc_conf="max_split_size_mb:128")
    assert plan.workload["alloc_conf"] == "max_split_size_mb:128"
    assert any(note.startswith(f"the script itself sets {ALLOCATOR}=expandable") for note in plan.notes)


def test_settings_of_the_allocator_that_come_after_the_first_tensor_are_named(write) -> None:  # type: ignore[no-untyped-def]
    plan = memfit.trace_script(write(f"os.environ['{ALLOCATOR}'] = 'expandable_segments:True'\n" + LOOP))
    assert plan.workload["alloc_conf"] == ""
    assert any(note.startswith("not modelled: the script itself") and "after memory was taken" in note
               for note in plan.notes)  # fmt: skip


def test_settings_that_torch_would_not_read_are_refused_by_the_name_of_who_set_them(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "train.py").write_text(f"import os\nos.environ['{ALLOCATOR}'] = 'no_such_option:1'\n" + HEAD + LOOP)
    with pytest.raises(TraceError, match=r"the script itself.*no_such_option"):
        memfit.trace_script("train.py")


def test_workspaces_of_cublas_are_as_large_as_the_script_says(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    usual = memfit.trace_script(write(LOOP), gpu="A100 40GB")
    (tmp_path / "train.py").write_text("import os\nos.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'\n" + HEAD + LOOP)
    larger = memfit.trace_script("train.py", gpu="A100 40GB")
    assert peak(larger) - peak(usual) == 2 * ((4096 * 8) - (4096 * 2 + 16 * 8)) * 1024


@pytest.mark.parametrize("variable", ["PYTORCH_NO_CUDA_MEMORY_CACHING=1", "CUDA_MODULE_LOADING=EAGER"])
def test_a_variable_that_is_not_modelled_is_named_in_the_first_lines(write, variable: str) -> None:  # type: ignore[no-untyped-def]
    plan = memfit.trace_script(f"{variable} python {write(LOOP)}")
    assert any(note.startswith(f"not modelled: {variable}, ") for note in plan.notes)


@pytest.mark.parametrize("of_a_package", [True, False])
def test_a_file_beside_the_script_may_build_the_model_when_it_is_imported(
    write,  # type: ignore[no-untyped-def]
    tmp_path: Path,
    of_a_package: bool,
) -> None:
    path = write(LOOP)
    whole = peak(memfit.trace_script(path))
    (tmp_path / "parts").mkdir()
    if of_a_package:
        (tmp_path / "parts" / "__init__.py").write_text("")
    (tmp_path / "parts" / "model.py").write_text(HEAD)
    (tmp_path / "train.py").write_text("from parts.model import *\n" + LOOP)
    assert peak(memfit.trace_script(path)) == whole


ASKS_FOR_ITS_NAMES = """
def train():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = locals()
    for ids, in loader:
        exec("made = 3")
        loss = step(ids.to(device))
        loss.backward()
        optimizer.step()
        assert mine["optimizer"] is optimizer and eval("made") == 3
train()
"""


def test_variables_that_a_function_asks_for_by_name_are_there_after_memfit_has_looked(write) -> None:  # type: ignore[no-untyped-def]
    assert peak(memfit.trace_script(write(ASKS_FOR_ITS_NAMES))) > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_is_named_in_the_first_lines(write) -> None:  # type: ignore[no-untyped-def]
    fails = "import threading\nthread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()\n"
    plan = memfit.trace_script(write(fails + LOOP))
    assert "not modelled: what a thread would have done further, which failed by ZeroDivisionError" in plan.notes


ODD = "class Odd(BaseException):\n    def __str__(self): raise {}\n    __repr__ = __str__\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ODD.format("ValueError") + "raise Odd", "the job itself fails: Odd"),
        (ODD.format("GeneratorExit") + "raise Odd", "the job itself fails: Odd"),
        ("class Odd(BaseException): pass\nraise Odd('words')", "the job itself fails: Odd: words"),
        ("raise GeneratorExit", "the job itself fails: GeneratorExit"),
        (ODD.format("GeneratorExit") + "sys.exit(Odd())", "the job ends itself: sys.exit()"),
    ],
)
def test_an_error_of_any_kind_is_told_by_its_name_and_line(write, text: str, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TraceError) as failed:
        memfit.trace_script(write(text))
    assert failed.value.message == said and "train.py:" in str(failed.value.hint)


RAGGED = """
optimizer = torch.optim.AdamW(model.parameters())
for length in LENGTHS:
    step(torch.ones(4, length, dtype=torch.int64, device=device)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("lengths", "alike"),
    [("[64] * 9", True), ("[64, 512, 64, 2048]", False), ("[8, 64, 512, 512]", True)],  # cut to a longest one
)
def test_steps_that_are_not_alike_are_told_as_what_later_ones_may_exceed(write, lengths: str, alike: bool) -> None:  # type: ignore[no-untyped-def]
    plan = memfit.trace_script(write(RAGGED.replace("LENGTHS", lengths)))
    assert alike is not any(note.startswith("not modelled: batches larger than the 3 that") for note in plan.notes)


def test_optimizers_that_take_turns_make_no_steps_that_are_not_alike(write) -> None:  # type: ignore[no-untyped-def]
    rarely = """
large, small = (torch.optim.AdamW(model.parameters()) for _ in range(2))
for each in range(1, 99):
    for optimizer, length in ((small, 64), (large, 512))[: 1 + (each % 2 == 0)]:
        step(torch.ones(4, length, dtype=torch.int64, device=device)).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    assert not any("not alike" in note for note in memfit.trace_script(write(rarely)).notes)


@pytest.mark.parametrize("own", ["lambda *a, **k: None", "lambda *a, **k: said('[12:00]', *a, **k)"])
def test_a_script_that_prints_in_its_own_way_does_not_print_memfit_s_answer(write, capfd, own: str) -> None:  # type: ignore[no-untyped-def]
    path = write(f"import builtins\nsaid = builtins.print\nbuiltins.print = {own}\n" + LOOP)
    assert main(["plan", "script", "--json", "--", path]) == 0
    assert json.loads(capfd.readouterr().out)["schema"] == "memfit.plan/1"


def test_weights_by_an_address_have_the_shapes_of_the_model_that_they_are_loaded_into(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    fetch = """
from torch.hub import load_state_dict_from_url
found = load_state_dict_from_url("http://127.0.0.1:9/weights.pth", model_dir="none")
found = found["model"] if "model" in found else found
found.pop("head.weight", None)
assert model.load_state_dict(found).missing_keys == []
"""
    plan = memfit.trace_script(write(fetch + LOOP))
    assert plan.peak == memfit.trace_script(write(LOOP)).peak
    assert any("weights that are not on this machine" in note for note in plan.notes)


def test_an_error_out_of_a_library_is_told_with_the_script_s_own_line_too(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TraceError, match="JSONDecodeError") as failed:
        memfit.trace_script(write("import json\n\njson.loads('{')\n"))
    assert re.search(r"train.py:\d+; that is .*decoder.py:", str(failed.value.hint))


def test_a_package_that_is_here_without_a_part_of_it_is_not_said_to_be_missing(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TraceError, match=r"torch\._six, which the installed torch does not have"):
        memfit.trace_script(write("from torch._six import inf\n"))


def test_a_script_may_remove_the_folder_that_it_works_in(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "gone").mkdir()
    plan = memfit.trace_script(write("import os\nos.chdir('gone')\nos.rmdir('../gone')\nimport this\n" + LOOP))
    assert plan.report.phases


@pytest.mark.parametrize(("gpu", "told"), [("T4", False), ("1GB", True)])
def test_a_script_that_catches_running_out_of_memory_is_told_of_it_where_it_would(write, gpu: str, told: bool) -> None:  # type: ignore[no-untyped-def]
    grown = LOOP.replace("step(ids", "step(ids.repeat(64, 16)").replace(
        "for epoch", "catches = torch.OutOfMemoryError\nfor epoch"
    )
    plan = memfit.trace_script(write(grown), gpu=gpu)
    assert told == (plan.verdict == "fails")
    assert told is any("OutOfMemoryError stands in it" in note for note in plan.notes)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, when it is imported
def test_a_script_that_sets_the_compiler_itself_is_refused_where_it_compiles(write) -> None:  # type: ignore[no-untyped-def]
    sets = "os.environ['TORCH_COMPILE_DISABLE'] = '1'\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = '/tmp/x'\n"
    memfit.trace_script(write(sets + LOOP))
    with pytest.raises(TraceError, match="the script itself sets TORCH_COMPILE_DISABLE=1") as refusal:
        memfit.trace_script(write(sets + "torch.compile(torch.sin)(torch.ones(1024, device='cuda'))\n" + LOOP))
    assert "TORCH_COMPILE_DISABLE=1 python" in str(refusal.value.hint)


@pytest.mark.parametrize("variable", ["TORCH_COMPILE_DISABLE=1", f"{ALLOCATOR}=expandable_segments=True"])
def test_a_variable_that_comes_too_late_or_that_torch_dies_of_is_told(write, variable: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError) as refusal:
        memfit.trace_script(f"{variable} python {write(LOOP)}")
    assert f"export {variable.partition('=')[0]}=" in str(refusal.value.hint)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ValueError('my own')\n", "the job itself fails: ValueError: my own"),
        ("model.cuda(); sys.exit(3)\n", r"the job ends itself: sys.exit\(3\)"),
        ("import no_such_package_of_mine\n", "needs the package no_such_package_of_mine"),
        ("torch.zeros(1, device='cuda:1')\n", "cuda:1"),
        ("model.cuda(); open('mine.txt')\n", "the job itself fails: FileNotFoundError"),
        ("torch.save(model, 'm.pt'); open('m.pt', 'rb')\n", "does not cover code that reads back what it has saved"),
        ("print(1)\n", "put nothing on the GPU"),
        (
            "if step(next(iter(loader))[0].to(device)).item() > 3: pass\n",
            r"train.py:\d+, in <module>: the code decides",
        ),
    ],
)
def test_what_goes_wrong_is_told_with_the_script_s_own_line(write, text: str, said: str) -> None:  # type: ignore[no-untyped-def]
    source = write(text)
    if "nothing" in said:
        Path(source).write_text(text)  # without the model
    with pytest.raises(MemfitError, match=said):
        memfit.trace_script(source)


def test_a_script_that_never_steps_is_stopped_by_the_clock(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(MemfitError, match="within 2 s"):
        memfit.trace_script(write("while True: pass\n"), seconds=2)


def test_a_person_s_answer_decides(write) -> None:  # type: ignore[no-untyped-def]
    text = "if step(next(iter(loader))[0].to(device)).item() > 3:\n    torch.empty(1 << 28, device='cuda')\n"
    name = write(text)
    line = HEAD.count("\n") + 1
    small, large = (peak(memfit.trace_script(name, answers={f"train.py:{line}": said})) for said in (False, True))
    assert large - small > 1 << 28


def test_the_command_prints_the_plan_and_the_script_speaks_on_stderr(write, capfd) -> None:  # type: ignore[no-untyped-def]
    assert main(["plan", "script", "--gpu", "24GB", "--json", "--", "python", write(LOOP), "--batch_size", "2"]) == 0
    out, err = capfd.readouterr()
    document = json.loads(out)
    assert document["workload"]["kind"] == "script" and document["verdict"] == "safe" and "loss ?" in err
    assert main(["plan", "script", "--steps", "0", "--", "train.py"]) == 2
    assert main(["plan", "script", "--answer", "train.py:3", "--", "train.py"]) == 2


def test_a_number_is_a_gpu_and_data_parallel_with_one_card_copies_on_a_stream_of_its_own(write) -> None:  # type: ignore[no-untyped-def]
    """What comes from the host lies in that stream's segment, as on a GPU: the same job without it reserves less."""
    body = (
        "wide = {}(nn.Linear(256, 256)).to(0)\nfor _ in range(3):\n    wide(torch.ones(8192, 256{})).sum().backward()\n"
    )
    parallel = memfit.trace_script(write(body.format("nn.DataParallel", "")))
    plain = memfit.trace_script(write(body.format("", ", device=0")))
    assert len(set(parallel.trace.streams)) == 2 and set(plain.trace.streams) == {0}
    assert peak(parallel) == peak(plain)
