"""What a check says in bytes, to the byte: on the disk, in host memory and in /dev/shm; with 16-bit numbers, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from check_jobs import only, situation
from packaging.requirements import Requirement
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.checking import machine
from memfit.checking.machine import is_met, look
from memfit.checking.model import checkpoint_bytes, follow, loading_bytes, state_bytes
from memfit.checking.repeated_weights import ProductsByFp32
from memfit.recording.machine import GpuState
from memfit.units import GiB

WEIGHTS = 2 * 300 * 16 + 3 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 2 * 16) + 16
"""Of the Llama of these jobs: embedding and head, three blocks, the last norm."""


def test_weights_while_they_load_are_those_of_every_process(tmp_path: Path) -> None:
    for processes in (1, 2):
        finding = only(machine.check_host_memory, situation(tmp_path, world_size=processes))
        assert finding.details["needed_bytes"] == {"weights while they load": processes * WEIGHTS * 4}


def test_what_lies_on_the_host_is_that_of_every_process(tmp_path: Path) -> None:
    where = situation(tmp_path, world_size=2, offload=["optimizer"], optimizer="adamw", gpu="24GB")
    assert only(machine.check_host_memory, where).details["needed_bytes"] == {
        "weights while they load": 2 * WEIGHTS * 4,
        "weights and gradients for the optimizer": 2 * 2 * WEIGHTS * 4,
        "the optimizer's state": 2 * 2 * WEIGHTS * 4,
    }


def test_workers_hold_two_batches_each_in_every_process(tmp_path: Path) -> None:
    if not machine.SHM.is_dir():
        pytest.skip("no /dev/shm on this system")
    rows = {1: 4, 2: 2}  # of the global batch of 4, those of a process
    for processes in (1, 2):
        finding = only(machine.check_shared_memory, situation(tmp_path, world_size=processes, num_workers=3))
        assert finding.details["needed_bytes"] == processes * 3 * 2 * rows[processes] * 32 * 16


def test_one_checkpoint_more_than_are_kept_is_on_the_disk_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = situation(tmp_path, save_total_limit=3, optimizer="adamw")
    each = 3 * WEIGHTS * 4  # the weights, and two moments of each
    finding = only(machine.check_room_for_checkpoints, where)
    assert (finding.details["checkpoints"], finding.details["checkpoint_bytes"]) == (4, each)
    for free, status in ((4 * each, "ok"), (4 * each - 1, "failed")):
        monkeypatch.setattr(machine, "free_on_disk", lambda _, free=free: free)
        finding = only(machine.check_room_for_checkpoints, where)
        assert finding.status == status
    assert finding.next == "save_total_limit: 2, or room on that disk"
    monkeypatch.setattr(machine, "free_on_disk", lambda _: 2 * each - 1)
    assert str(only(machine.check_room_for_checkpoints, where).next).startswith("another --output_dir")


@pytest.mark.parametrize(("optimizer", "each"), [("sgd", 0), ("adamw", 2 * 4), ("adamw-fused", 2 * 4),
                                                 ("adamw-8bit", 2)])  # fmt: skip
def test_what_an_optimizer_keeps_of_a_weight(tmp_path: Path, optimizer: Any, each: int) -> None:
    model = situation(tmp_path).shapes.get()
    assert state_bytes(model, optimizer) == each * WEIGHTS


def test_adafactor_keeps_a_row_and_a_column_of_a_matrix_and_the_whole_of_a_vector() -> None:
    import torch
    from torch import nn

    layer = nn.Linear(10, 6, dtype=torch.float32)
    assert state_bytes(layer, "adafactor") == 4 * (6 + 10 + 6)


def test_a_checkpoint_of_lora_has_its_adapters_and_their_moments_alone(tmp_path: Path) -> None:
    where = situation(tmp_path, method="lora", rank=4, target_modules=["q_proj", "v_proj"], optimizer="adamw")
    adapters = 3 * (4 * (16 + 16) + 4 * (16 + 8))
    assert checkpoint_bytes(where.shapes.get(), where.config) == 3 * adapters * 4
    assert loading_bytes(where.shapes.get()) == (WEIGHTS + adapters) * 4


@pytest.mark.parametrize(("line", "have", "unmet"), [
    ("a>=1.2", "1.2", False), ("a>=1.2", "1.2.0", False), ("a>=1.2", "1.1.9", True), ("a>1.2", "1.2.0", True),
    ("a<=1.2", "1.2", False), ("a~=1.4.2", "1.4.1", True), ("a~=1.4.2", "1.4.2", False), ("a!=1.2", "1.2.0", True),
    ("a<1.2", "1.2", True), ("a==1.2", "1.2.0", False),
])  # fmt: skip
def test_a_version_at_the_very_bound(line: str, have: str, unmet: bool) -> None:
    assert is_met(Requirement(line), have) is not unmet


# -- cards -------------------------------------------------------------------------------------------------------------


def card(used: int, index: int = 0) -> GpuState:
    return GpuState(index=index, uuid=f"GPU-{index}", name="NVIDIA H200", total_bytes=140 * GiB, used_bytes=used,
                    busy_percent=None, processes=())  # fmt: skip


@pytest.mark.parametrize(("used", "status"), [(0, "ok"), (GiB, "ok"), (GiB + 1, "warning")])
def test_up_to_1_gib_of_a_card_that_nobody_holds_is_the_driver_s_own(used: int, status: str) -> None:
    assert machine.of_gpu(card(used)).status == status


@pytest.mark.parametrize(("processes", "status"), [(1, "ok"), (2, "ok"), (3, "failed")])
def test_as_many_processes_as_gpus_may_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, status: str
) -> None:
    monkeypatch.setattr("memfit.checking.situation.read_gpus", lambda: (card(0, 0), card(0, 1)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = only(machine.check_gpus, situation(tmp_path, world_size=processes))
    assert (finding.status, finding.details["gpus"]) == (status, 2)


def test_expandable_segments_beside_max_split_size_cancel() -> None:
    (finding,) = look({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64"}, "2.11.0")
    assert (finding.status, "the two cancel" in finding.found) == ("warning", True)
    (alone,) = look({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "2.11.0")
    assert alone.status == "ok"


@pytest.mark.parametrize(("line", "have"), [
    ("torch==2.13.0", "2.13.0+cpu"), ("torch<=2.13.0", "2.13.0+cu130"), ("torch>=2.13", "2.13.0.dev20260101"),
    ("torch~=2.13.0", "2.13.0rc1"),
])  # fmt: skip
def test_what_follows_the_numbers_of_a_version_does_not_count(line: str, have: str) -> None:
    assert is_met(Requirement(line), have)


class SlowProducts(TorchDispatchMode):
    """What a CPU without units for 16-bit numbers multiplies one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::bmm"):
            self.products += 1
            if args[1].dtype in (torch.float16, torch.bfloat16) and args[1].stride(-1) == 1:
                self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp16", "method": "lora"},
        {"precision": "bf16"},
        {"precision": "amp-bf16", "grad_checkpointing": True},
    ],
)
def test_no_product_of_16_bit_numbers_is_left_to_the_slow_way(tmp_path: Path, changes: dict[str, Any]) -> None:
    with SlowProducts() as slow:
        flow = follow(situation(tmp_path, **changes))
    assert slow.products and not slow.seen
    assert not flow.without and not flow.not_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b, c = (torch.randn(2, 8, 8).to(dtype) for _ in range(3))
    with ProductsByFp32():
        made: list[Tensor] = [a[0] @ b[0], a @ b, torch.addmm(c[0], a[0], b[0]), torch.baddbmm(c, a, b)]
    wanted = [a[0] @ b[0], a @ b, torch.addmm(c[0], a[0], b[0]), torch.baddbmm(c, a, b)]
    for one, other in zip(made, wanted, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other)


def test_what_is_too_large_for_fp16_is_infinite_and_types_that_do_not_match_are_refused() -> None:
    large = torch.full((4, 4), 1000.0, dtype=torch.float16)
    with ProductsByFp32():
        assert (large @ large).isinf().all()
        with pytest.raises(RuntimeError, match="same dtype"):
            large @ torch.ones(4, 4)
