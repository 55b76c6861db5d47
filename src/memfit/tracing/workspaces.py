"""Buffers that cuBLAS keeps: taken from the caching allocator at the first product of a thread, never given back.

A handle belongs to a thread, and autograd runs backward in a thread of its own, so training holds two. A trace runs
everything in one thread: which one a product belongs to is told by whether autograd is running it.
Source: ATen/cuda/CublasHandlePool.cpp, 2.11; measured on an H200 (`tests/data/h200-ops.json`, `ws_*`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memfit.tracing.layouts import is_dense
from memfit.tracing.platform import Platform
from memfit.units import KiB, MiB

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer

aten = torch.ops.aten

PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default, aten.mv.default,
    aten.dot.default, aten.vdot.default, aten.addbmm.default,
    aten.mm.out, aten.addmm.out, aten.bmm.out, aten.baddbmm.out, aten.addmv.out, aten.mv.out, aten.dot.out,
    aten.addmm_.default, aten.baddbmm_.default, aten.addmv_.default, aten.addbmm_.default,
    aten.mm.dtype, aten.addmm.dtype, aten.bmm.dtype, aten.baddbmm.dtype,
}  # fmt: skip


def cublas_bytes(platform: Platform) -> int:
    """Hopper: 32 MiB. Blackwell: the same from pytorch#175344 (2.12). Others: `:4096:2:16:8`."""
    major = platform.arch[0]
    if major == 9 or (major in (10, 12) and platform.torch >= (2, 12)):
        return 32 * MiB
    return (4096 * 2 + 16 * 8) * KiB


def cublaslt_bytes(platform: Platform) -> int:
    """A separate buffer for products with a fused bias, 2.9 to 2.11 (pytorch#156495); later they share cuBLAS's."""
    return 1 * MiB if (2, 9) <= platform.torch < (2, 12) else 0


class Workspaces:
    def __init__(self, platform: Platform) -> None:
        self._cublas = cublas_bytes(platform)
        self._cublaslt = cublaslt_bytes(platform)
        self._held: set[tuple[str, str]] = set()

    def after_product(self, tracer: Tracer, op: object, args: tuple[object, ...]) -> None:
        with tracer.temporaries() as hold:
            for size in _copied_operands(args):
                hold(size, "operand that cuBLAS cannot read as it lies")
            self.hold_for_product(tracer)
            if op is aten.addmm.default and _bias_is_fused(args):
                self._hold(tracer, "cublaslt", self._thread(tracer), self._cublaslt)

    def hold_for_product(self, tracer: Tracer) -> None:
        self._hold(tracer, "cublas", self._thread(tracer), self._cublas)

    @staticmethod
    def _thread(tracer: Tracer) -> str:
        return "autograd" if tracer.in_backward else "main"

    def _hold(self, tracer: Tracer, kind: str, thread: str, size: int) -> None:
        if size and (kind, thread) not in self._held:
            self._held.add((kind, thread))
            tracer.rule_calls.as_traced()  # a rule that makes a product will not find it missing again
            tracer.trace.alloc(size, category="workspaces", op=f"{kind} workspace ({thread} thread)")


def _copied_operands(args: tuple[object, ...]) -> list[int]:
    """Blas.cpp and cuBlasCommonArgs.h, `prepare_matrix_for_cublas`: a matrix must lie by rows or by columns, with steps
    between them; an expanded scalar, or every second column, is copied. The result lies by rows, so the right one comes
    first."""
    operands = [a for a in args if isinstance(a, torch.Tensor)][-2:]
    return [o.numel() * o.element_size() for o in reversed(operands) if not _lies_in_steps(o)]


def _lies_in_steps(matrix: torch.Tensor) -> bool:
    if matrix.dim() < 2:
        return matrix.dim() == 0 or matrix.stride(0) > 0 or matrix.shape[0] == 1
    rows, columns = matrix.shape[-2:]
    row_step, column_step = matrix.stride()[-2:]
    if matrix.dim() == 2 and is_dense(matrix):
        return True
    return (row_step == 1 and column_step >= max(1, rows)) or (column_step == 1 and row_step >= max(1, columns))


def _bias_is_fused(args: tuple[object, ...]) -> bool:
    """`addmm` with a contiguous 1-D bias goes to cuBLASLt unless a matrix has a side of 1 (Blas.cpp, addmm_out)."""
    bias, left, right = args[:3]
    assert isinstance(bias, torch.Tensor) and isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
    columns = right.shape[1]
    fits = bias.dim() == 1 and bias.shape[0] == columns and bias.is_contiguous()
    return fits and right.shape[0] > 1 and columns > 1
