"""The work of an op, counted."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from memfit.tracing.costs import _formula

aten = torch.ops.aten


@pytest.mark.parametrize("value_width", [64, 32])
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_is_counted_as_torch_counts_it(kernel: str, value_width: int) -> None:
    name = f"_scaled_dot_product_{kernel}_attention"
    q, k = (torch.empty(2, 8, length, 64, device="meta") for length in (16, 24))
    v, grad = torch.empty(2, 8, 24, value_width, device="meta"), torch.empty(2, 8, 16, value_width, device="meta")
    forward, backward = getattr(aten, name), getattr(aten, f"{name}_backward")
    assert _formula(name, forward.default)(q, k, v, out_val=grad) == flop_registry[forward](q, k, v, out_val=grad)
    ours = _formula(f"{name}_backward", backward.default)(grad, q, k, v, out_val=grad)
    assert ours == flop_registry[backward](grad, q, k, v, out_val=grad)


def test_fewer_heads_of_keys_do_not_make_attention_cheaper() -> None:
    """Each head of queries meets its keys, whoever shares them."""
    q, few, many = (torch.empty(2, heads, 16, 64, device="meta") for heads in (8, 2, 8))
    count = _formula("_scaled_dot_product_flash_attention", None)
    assert count(q, few, few) == count(q, many, many) == 2 * (2 * 8 * 16 * 16) * (64 + 64)
