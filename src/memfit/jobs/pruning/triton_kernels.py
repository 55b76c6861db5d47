"""Two element-wise kernels for GPUs, computed in fp32. The compiler may leave out the roundings in between."""

# mypy: ignore-errors
# Triton gives its functions' names a meaning of its own, which no type checker knows.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HEADS = 8
ELEMENTS = 2048


@triton.jit
def _rotate(
    x,
    cos,
    sin,
    length,
    heads,
    stride_batch,
    stride_head,
    stride_token,
    stride_table,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0)
    batch, at = token // length, token % length
    half = tl.arange(0, HALF)
    table = batch.to(tl.int64) * stride_table + at * 2 * HALF
    cos_1, cos_2 = tl.load(cos + table + half), tl.load(cos + table + HALF + half)
    sin_1, sin_2 = tl.load(sin + table + half), tl.load(sin + table + HALF + half)
    kind = x.dtype.element_ty
    start = x + batch.to(tl.int64) * stride_batch + at.to(tl.int64) * stride_token
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        there = (head < heads)[:, None]
        place = start + head[:, None].to(tl.int64) * stride_head + half[None, :]
        x_1 = tl.load(place, mask=there).to(tl.float32)
        x_2 = tl.load(place + HALF, mask=there).to(tl.float32)
        a_1 = (x_1 * cos_1[None, :].to(tl.float32)).to(kind).to(tl.float32)
        b_1 = (-x_2 * sin_1[None, :].to(tl.float32)).to(kind).to(tl.float32)
        a_2 = (x_2 * cos_2[None, :].to(tl.float32)).to(kind).to(tl.float32)
        b_2 = (x_1 * sin_2[None, :].to(tl.float32)).to(kind).to(tl.float32)
        tl.store(place, (a_1 + b_1).to(kind), mask=there)
        tl.store(place + HALF, (a_2 + b_2).to(kind), mask=there)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, heads, length, size = x.shape
    table = cos.stride(0) if cos.shape[0] > 1 else 0
    strides = x.stride()[:3]
    _rotate[(batch * length,)](x, cos, sin, length, heads, *strides, table, HALF=size // 2, HEADS=HEADS, num_warps=4)
    return x


@triton.jit
def _silu_times(gate, up, count, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    there = at < count
    kind = gate.dtype.element_ty
    x = tl.load(gate + at, mask=there).to(tl.float32)
    y = tl.load(up + at, mask=there).to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(kind).to(tl.float32)
    tl.store(gate + at, (silu * y).to(kind), mask=there)


def silu_times_(gate: Tensor, up: Tensor) -> Tensor:
    count = gate.numel()
    _silu_times[(triton.cdiv(count, ELEMENTS),)](gate, up, count, ELEMENTS=ELEMENTS, num_warps=4)
    return gate
