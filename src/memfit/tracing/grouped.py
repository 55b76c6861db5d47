"""Grouped matrix products, as mixtures of experts use them: each group of rows with a matrix of its own.

In bf16, on Hopper and on the first Blackwell, one CUTLASS kernel does all groups; every other dtype and card goes
through a loop of ordinary products, one for each group (native/cuda/GroupedBlas.cpp, `_grouped_mm_cuda`). Which rows
belong to which group depends on data, but neither way allocates by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer

aten = torch.ops.aten
Tensor = torch.Tensor

POINTER, STRIDE, SHAPE, TENSOR_MAP = 8, 8, 12, 128
TENSOR_MAPS = 4
"""Descriptors that CUTLASS keeps for each multiprocessor: of two inputs, of the addend and of the output."""


def grouped_mm(
    tracer: Tracer, a: Tensor, b: Tensor, offsets: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    out = _output(a, b, offsets, out_dtype or a.dtype)
    if a.dtype == b.dtype == out.dtype == torch.bfloat16 and tracer.platform.arch[0] in (9, 10):
        with tracer.temporaries() as hold:
            hold(_argument_bytes(_groups(a, b, offsets)), "grouped product arguments")
            hold(tracer.platform.sm_count * TENSOR_MAPS * TENSOR_MAP, "grouped product workspace")
    else:
        tracer.workspaces.hold_for_product(tracer)
    return out


def _output(a: Tensor, b: Tensor, offsets: Tensor | None, dtype: torch.dtype) -> Tensor:
    """native/GroupedMMUtils.h: rows start at multiples of 16 bytes."""
    if a.dim() == b.dim() == 2:
        assert offsets is not None
        shape = [offsets.shape[0], a.shape[0], b.shape[1]]
    elif a.dim() == b.dim():
        shape = [a.shape[0], a.shape[1], b.shape[2]]
    else:
        shape = [a.shape[-2], b.shape[-1]]
    step = 16 // dtype.itemsize
    row = -(-shape[-1] // step) * step
    strides = [row, 1] if len(shape) == 2 else [shape[1] * row, row, 1]
    return torch.empty_strided(shape, strides, dtype=dtype, device=a.device)


def _groups(a: Tensor, b: Tensor, offsets: Tensor | None) -> int:
    if offsets is not None:
        return offsets.shape[0]
    return (a if a.dim() == 3 else b).shape[0]


def _argument_bytes(groups: int) -> int:
    """native/cuda/GroupMM.cu: three pointers (an even number of groups), three strides and a shape for each group."""
    return 3 * POINTER * (groups + groups % 2) + 3 * STRIDE * groups + SHAPE * groups


RULES: dict[Any, Any] = {aten._grouped_mm.default: grouped_mm}
