"""Selective checkpointing computes again what is cheap, and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import llama_folder
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.errors import UsageError
from memfit.jobs.build import prepare
from memfit.jobs.training.offload import is_kept
from memfit.jobs.workload import Workload

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[func] += 1
        return func(*args, **(kwargs or {}))


def in_backward(folder: Path, **settings: Any) -> Counter[Any]:
    job = prepare(Workload(model=llama_folder(folder), batch_size=1, seq_len=16, precision="fp32", **settings))
    ids = torch.arange(16)[None]
    model: Any = job.model
    model.enable_input_require_grads()  # as checkpointing does with a frozen embedding
    loss = model(input_ids=ids, labels=ids).loss
    counted = Counted()
    with counted:
        loss.backward()
    return counted.ops


def test_no_product_and_no_attention_is_computed_again(tmp_path: Path) -> None:
    plain = in_backward(tmp_path, kind="train")
    selective = in_backward(tmp_path, kind="train", selective_checkpointing=True)
    full = in_backward(tmp_path, kind="train", grad_checkpointing=True)
    assert selective[aten.mm.default] == plain[aten.mm.default] < full[aten.mm.default]
    assert selective[ATTENTION] == 0 < full[ATTENTION]
    assert selective[aten.silu.default] == full[aten.silu.default] > plain[aten.silu.default]


def test_of_an_adapter_s_products_the_cheap_one_is_computed_again(tmp_path: Path) -> None:
    plain = in_backward(tmp_path, kind="lora", rank=2)
    selective = in_backward(tmp_path, kind="lora", rank=2, selective_checkpointing=True)
    again = selective[aten.mm.default] - plain[aten.mm.default]
    assert again == 2 * 7 - 2  # lora_B of seven layers in each block; what only the last of a block needs is left out


@pytest.mark.parametrize(("op", "shapes", "kept"), [
    (aten.mm.default, [(64, 32), (32, 48)], True),
    (aten.mm.default, [(64, 8), (8, 48)], False),  # over no more terms than the rank
    (aten.addmm.default, [(48,), (64, 32), (32, 48)], True),
    (aten.bmm.default, [(4, 64, 16), (4, 16, 64)], False),  # scores: larger than what they are made of
    (aten.bmm.default, [(4, 64, 64), (4, 64, 16)], True),
    (aten.mul.Tensor, [(64, 32), (64, 32)], False),
])  # fmt: skip
def test_what_is_dear_is_kept(op: Any, shapes: list[tuple[int, ...]], kept: bool) -> None:
    assert is_kept(op, tuple(torch.empty(shape) for shape in shapes), rank=8) == kept


def test_a_model_of_one_s_own_has_no_blocks_to_checkpoint() -> None:
    with pytest.raises(UsageError, match="--selective-checkpointing needs a transformers model"):
        prepare(Workload(kind="train", model="torch.nn:Identity", selective_checkpointing=True))
