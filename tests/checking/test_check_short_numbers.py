"""The steps of a pre-flight are as quick with 16-bit numbers as without, and no less strict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from check_jobs import situation
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.checking.model import follow
from memfit.checking.repeated_weights import ProductsByFp32


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
