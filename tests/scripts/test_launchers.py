"""Programs of several processes: the first of them runs, and is planned as it would be among the others."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import memfit
from memfit.errors import MemfitError
from memfit.scripts.command import read_command

HEAD = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
def net():
    return nn.Sequential(nn.Embedding(1000, 256), nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1000))
def step(model, optimizer, device="cuda"):
    ids = torch.randint(0, 1000, (8, 16), device=device)
    loss = nn.functional.cross_entropy(model(ids).float().view(-1, 1000), ids.view(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()
"""
DDP = """
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "nccl")
local, world = int(os.environ["LOCAL_RANK"]), dist.get_world_size()
torch.cuda.set_device(local)
assert torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) and os.environ["RANK"] == "0"
model = DistributedDataParallel(net().to(local), device_ids=[local])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10):
    loss = step(model, optimizer)
    dist.all_reduce(loss)
    rows = torch.tensor(8, device="cuda")
    dist.all_reduce(rows)
    assert rows.item() == 8 * world
    told = [None] * world
    dist.all_gather_object(told, {"rank": dist.get_rank()})
    dist.barrier()
    print(f"loss {loss.item() / world:.2f} {dist.get_backend()} told {len(told)} holds {torch.cuda.memory_allocated()}")
"""
ALONE = """
model = net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10):
    step(model, optimizer)
    print("loss ? alone told 1 holds", torch.cuda.memory_allocated())
"""
SHARDED = """
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
with torch.device(sys.argv[1]):
    model = net()
fully_shard(model)
if sys.argv[1] == "meta":
    model.to_empty(device="cuda")
    for module in model.children():
        getattr(module, "reset_parameters", lambda: None)()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10):
    step(model, optimizer)
    print("loss ? fsdp told 1 holds", torch.cuda.memory_allocated())
"""
ACCELERATED = """
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2)
model = net()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
print("prepared", accelerator.num_processes, accelerator.mixed_precision, accelerator.distributed_type.value)
for _ in range(40):
    with accelerator.accumulate(model):
        ids = torch.randint(0, 1000, (8, 16), device=accelerator.device)
        loss = nn.functional.cross_entropy(model(ids).view(-1, 1000), ids.view(-1))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    seen = accelerator.gather(torch.ones(4, device=accelerator.device)).sum().item()
    assert seen == 4 * accelerator.num_processes
"""
WEIGHTS = 4 * (1000 * 256 + 256 * 1024 + 1024 + 1024 * 1000 + 1000)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    def put(text: str) -> str:
        (tmp_path / "train.py").write_text(HEAD + text)
        return "train.py"

    return put


def holds(printed: str) -> int:
    return int(next(line for line in reversed(printed.splitlines()) if " holds " in line).split()[-1])


def test_a_process_of_ddp_holds_the_buckets_of_its_gradients_beside_the_weights(write, capfd) -> None:  # type: ignore[no-untyped-def]
    memfit.trace_script(write(ALONE), gpu="RTX 4090")  # torch sets a variable when some of it is first imported
    alone = holds(capfd.readouterr().err)
    before = (sys.excepthook, dict(os.environ))
    plan = memfit.trace_script(f"torchrun --standalone --nproc_per_node=4 {write(DDP)}", gpu="RTX 4090")
    among = capfd.readouterr().err
    assert "loss ? nccl told 4" in among
    assert WEIGHTS <= holds(among) - alone < WEIGHTS + 64 * 512
    assert any(note.startswith("process 0 of 4") and "NCCL" in note for note in plan.notes)
    assert plan.to_json()["workload"]["processes"] == 4
    assert (sys.excepthook, dict(os.environ)) == before


@pytest.mark.parametrize(
    "line",
    ["python -m torch.distributed.run --nproc_per_node 2 train.py gloo", "RANK=0 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1"
     " WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=29500 python train.py"],
)  # fmt: skip
def test_other_ways_to_start_the_same_program(write, line: str) -> None:  # type: ignore[no-untyped-def]
    write(DDP)
    assert memfit.trace_script(line).to_json()["peak"]["allocated_bytes"] > 4 * WEIGHTS


@pytest.mark.parametrize("where", ["meta", "cpu", "cuda"])
def test_fsdp2_shards_a_model_wherever_it_was_made(write, capfd, where: str) -> None:  # type: ignore[no-untyped-def]
    held = []
    for machines in (1, 2):
        memfit.trace_script(f"torchrun --nproc_per_node=4 --nnodes={machines} {write(SHARDED)} {where}")
        held.append(holds(capfd.readouterr().err))
    assert held[0] - held[1] == pytest.approx(3 * WEIGHTS / 8, abs=16 * 512)  # weights and what AdamW keeps of them


def test_accelerate_says_what_its_config_file_says(write, capfd, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("accelerate")
    name = write(ACCELERATED)
    (tmp_path / "two.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_machines: 1\n"
        "num_processes: 2\nmachine_rank: 0\ngpu_ids: all\nuse_cpu: false\n"
    )
    plan = memfit.trace_script(f"accelerate launch --config_file two.yaml {name}")
    assert "prepared 2 bf16 MULTI_GPU" in capfd.readouterr().err and plan.to_json()["workload"]["processes"] == 2
    plan = memfit.trace_script(f"accelerate launch --mixed_precision fp16 {name}")
    assert "prepared 1 fp16 NO" in capfd.readouterr().err
    assert any("one GPU" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("deepspeed train.py", "does not cover deepspeed"),
        ("torchrun --nproc_per_node=two train.py", "torchrun: invalid literal"),
        ("torchrun --nproc_per_node=2", "torchrun: the following arguments are required"),
        ("torchrun --nproc_per_node=2 trian.py", "there is no script 'trian.py'"),
        ("accelerate test", "accelerate test starts no script"),
        ("accelerate launch --use_deepspeed train.py", "with deepspeed"),
        ("accelerate launch --use_fsdp train.py", "with fsdp_version 1"),
        ("accelerate launch --config_file no.yaml train.py", "no file 'no.yaml'"),
    ],
)
def test_launchers_that_memfit_does_not_cover_are_refused(write, line: str, said: str) -> None:  # type: ignore[no-untyped-def]
    write("")
    with pytest.raises(MemfitError, match=said) as caught:
        read_command(line)
    assert caught.value.hint


def test_the_first_kind_of_fsdp_is_refused_with_the_line(write) -> None:  # type: ignore[no-untyped-def]
    name = write(
        "from torch.distributed.fsdp import FullyShardedDataParallel\ndist.init_process_group('nccl')\n"
        "FullyShardedDataParallel(net().cuda())\n"
    )
    with pytest.raises(MemfitError, match=r"train.py:\d+, in <module>: the code uses FSDP of the first kind"):
        memfit.trace_script(f"torchrun --nproc_per_node=2 {name}")


def test_a_script_that_was_started_alone_but_wants_others_is_told_what_is_missing(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(MemfitError, match="environment variable MASTER_ADDR expected"):
        memfit.trace_script(write("dist.init_process_group('nccl')\n"))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_job_of_several_processes_that_compiles_is_planned_with_the_compiler_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("""
import torch
from torch.nn.parallel import DistributedDataParallel
torch._dynamo.config.disable = True  # as TORCH_COMPILE_DISABLE=1 does in a process of its own
torch.distributed.init_process_group("nccl")
model = DistributedDataParallel(torch.compile(torch.nn.Linear(256, 256, device="cuda")))
model(torch.ones(4, 256, device="cuda")).sum().backward()
""")
    plan = memfit.trace_script("torchrun --nproc_per_node=2 train.py")
    weights = 4 * (256 * 256 + 256)
    assert plan.peak.allocated_bytes >= 2 * weights  # and the bucket of their gradients
