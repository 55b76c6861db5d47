"""Products with 4-bit weights, and which kernel bitsandbytes takes: one that reads them packed, or 16-bit copies.

bitsandbytes 0.50 (backends/cuda/ops.py, `_gemm_4bit_use_custom_cuda`): the thresholds are its own, timed on each
architecture. The copy of the weight, and of its scales, is memory; the packed kernel takes none. It is an op of torch's
here, with a rule as other kernels have, so that what it takes is known for other batch sizes and lengths too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import Library
from torch.utils.flop_counter import register_flop_formula

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer

MOST_ROWS = 1536
BLOCK = 64
SMALL_WEIGHT = 4 * 1024 * 1024
HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

_library = Library("memfit", "FRAGMENT")
_library.define(
    "four_bit_product(Tensor self, Tensor packed, Tensor? scales, Tensor? offset, Tensor? bias, int out) -> Tensor"
)  # `scales` and `offset` where those are quantised too
aten: Any = torch.ops.aten
PRODUCT: Any = torch.ops.memfit.four_bit_product.default


def _without_trace(x: Tensor, packed: Tensor, scales: Any, offset: Any, bias: Any, out: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out))


_library.impl("four_bit_product", _without_trace, "Meta")


def _product(
    tracer: Tracer,
    x: Tensor,
    packed: Tensor,
    scales: Tensor | None,
    offset: Tensor | None,
    bias: Tensor | None,
    out: int,
) -> Tensor:
    """`gemm_4bit`: a kernel that reads packed weights, or `_dequant_linear_fallback`."""
    platform, inner = tracer.platform, x.shape[-1]
    rows = x.numel() // inner
    if reads_packed(platform.arch, platform.sm_count, half=HALVES[x.dtype], rows=rows, out=out, inner=inner):
        x = x.contiguous()
        return torch.empty((*x.shape[:-1], out), dtype=x.dtype, device=x.device)
    if scales is not None and offset is not None:
        whole = torch.empty_like(scales, dtype=torch.float32)
        shifted = whole + offset  # noqa: F841  both live until the product is done
    unpacked = torch.empty((out, inner), dtype=x.dtype, device=x.device)
    return _linear(x, unpacked.t(), bias).view(*x.shape[:-1], out)


def _linear(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """native/Linear.cpp: the bias is added by the product itself where the rows lie one after the other."""
    flat = x.reshape(-1, x.shape[-1])
    made: Tensor = aten.mm(flat, matrix) if bias is None or not x.is_contiguous() else aten.addmm(bias, flat, matrix)
    return made.add_(bias) if bias is not None and not x.is_contiguous() else made


REPLACED: dict[Any, Any] = {PRODUCT: _product}


@register_flop_formula(torch.ops.memfit.four_bit_product)
def _flops(x: Any, packed: Any, scales: Any, offset: Any, bias: Any, out: int, **_: Any) -> int:
    return 2 * int(torch.Size(x).numel()) * out


def reads_packed(arch: tuple[int, int], sms: int, *, half: str, rows: int, out: int, inner: int) -> bool:
    """`half` is the type of the activations: bf16, fp16 or fp32; the weight has `out` rows of `inner`."""
    if rows > MOST_ROWS or inner % BLOCK:
        return False
    if rows <= 4:
        return True
    major = arch[0]
    if half == "fp32" or arch < (7, 5) or (major == 7 and half != "fp16"):
        return rows < 8  # no tensor-core kernel
    if arch == (8, 7) or major == 11:
        return False
    waves = (out + 63) // 64
    if major == 10:
        return rows <= (32 if waves >= 3 * sms else 8 if waves >= sms and inner < out else 0)
    if out * inner < SMALL_WEIGHT:
        return rows <= _most_of_small(arch, sms, waves, rows, out, inner)
    if rows > 512:
        return False
    if rows < 8:
        return not _few_rows_lose(arch, sms, waves, rows, out, inner)
    ladder = {(7, 5): _turing, (8, 0): _a100, (8, 6): _ampere, (9, 0): _hopper, (12, 0): _blackwell}.get(arch, _others)
    if arch == (12, 1) and waves >= sms:
        return rows <= 256
    return rows <= ladder(sms, waves, out, inner)


def _most_of_small(arch: tuple[int, int], sms: int, waves: int, rows: int, out: int, inner: int) -> int:
    fast_memory = arch[0] == 9 or arch == (8, 0)
    if inner * 2 < out:
        if fast_memory:
            low = waves * 3 < sms
            return (1536 if low else 512) if arch == (8, 0) else (512 if low else 320)
        if arch == (7, 5):
            return 320 if waves >= 3 * sms or inner < 704 else 64 if inner >= 1024 else 96
        return 192 if waves < sms and waves * inner > sms * 320 else 320
    quarter = waves * 4 <= sms
    if arch == (8, 0) and quarter:
        return 384 if inner < out else 32 if waves * 8 <= sms else 128
    if arch == (7, 5) and waves < sms and rows > 8:
        return 64
    if quarter:
        return 32 if inner < out or fast_memory else 23
    return 16 if waves * 2 <= sms else 0


def _few_rows_lose(arch: tuple[int, int], sms: int, waves: int, rows: int, out: int, inner: int) -> bool:
    """Of five to seven rows."""
    fast_memory = arch[0] == 9 or arch == (8, 0)
    if not fast_memory or rows < 6 or waves < (36 if arch[0] == 9 else 48):
        return False
    below_75, below_60 = waves * 4 < sms * 3, waves * 5 < sms * 3
    if inner > out:
        return below_75
    return inner == out and (below_60 if arch == (8, 0) else below_75 and not below_60)


def _turing(sms: int, waves: int, out: int, inner: int) -> int:
    if waves >= 3 * sms:
        return 128 if inner < out else 64
    return 64 if waves >= sms // 2 else 32


def _a100(sms: int, waves: int, out: int, inner: int) -> int:
    if waves >= 3 * sms:
        return 128
    if waves >= sms:
        return 64 if inner < out else 32
    if inner >= 3 * out and waves * 4 > sms:
        return 0
    if inner == out and waves >= 48 and waves * 5 < sms * 3:
        return 0
    if waves * 2 < sms:
        if inner <= out:
            return 128
        if waves * 3 >= sms:
            return 0
    return 128 if waves >= sms // 2 and inner < out else 16


def _ampere(sms: int, waves: int, out: int, inner: int) -> int:
    return 128 if waves >= sms else 64 if waves >= sms // 2 else 16


def _hopper(sms: int, waves: int, out: int, inner: int) -> int:
    if waves >= sms:
        return 64 if waves >= 3 * sms else 48 if waves >= 2 * sms else 32
    if waves >= sms // 2:
        return 0 if inner >= out and waves * 4 < sms * 3 else 16
    return 0


def _blackwell(sms: int, waves: int, out: int, inner: int) -> int:
    """RTX 50."""
    if waves >= 2 * sms:
        return 256 if waves >= 3 * sms else 128
    if waves * 5 >= sms * 4:
        return 96 if inner >= out else 64
    if waves >= sms // 2:
        return 64 if inner * 2 >= out and waves >= 128 else 8
    return 16 if inner > 2 * out and waves > 64 else 8


def _others(sms: int, waves: int, out: int, inner: int) -> int:
    """RTX 40, L4, L40S, and what is not known."""
    tall = inner > 2 * out
    if waves >= 2 * sms:
        return 256 if waves >= 3 * sms else 128
    if waves * 5 >= sms * 4:
        if tall or waves >= 200:
            return 128
        return (128 if sms >= 60 else 32) if inner >= out else 64
    if waves >= sms // 2:
        return 64 if tall else 8 if waves >= 64 else 32
    if inner > out and waves <= 48:
        return 12 if inner >= 3 * out else 10
    return 16 if tall or waves < 48 else 8
