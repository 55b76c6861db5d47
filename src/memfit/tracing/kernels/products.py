"""Matrix products: buffers that cuBLAS keeps, grouped products, Cholesky factorisations and what is solved with them.

cuBLAS takes its buffers at the first product of a thread on a stream, and never gives them back. A handle belongs to a
thread, and autograd runs backward in a thread of its own, so training holds two. A trace runs backward in the thread
that asks for it: which one a product belongs to is told by whether autograd is running it. Source:
ATen/cuda/CublasHandlePool.cpp, 2.11; measured on an H200 (`tests/data/h200-ops.json`, `ws_*`).

Grouped products, as mixtures of experts use them, have a matrix for each group of rows. In bf16, on Hopper and on the
first Blackwell, one CUTLASS kernel does all groups; every other dtype and card goes through a loop of ordinary
products, one for each group (native/cuda/GroupedBlas.cpp, `_grouped_mm_cuda`). Which rows belong to which group depends
on data, but neither way allocates by it.

A Cholesky factorisation is run by cuSOLVER: a matrix is copied by columns and factorised in place, in a workspace whose
size only cuSOLVER knows; then the host asks whether that went well. The sizes of workspaces were read off an H200 for
every n from 1 to 28,672 that models have (`tests/data/h200-ops.json`): they follow the formulas below without
exception.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from memfit.platform import Platform
from memfit.tracing.kernels.layouts import aligned, is_dense
from memfit.units import KiB, MiB

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer


aten = torch.ops.aten

PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default, aten.mv.default,
    aten.dot.default, aten.vdot.default, aten.addbmm.default,
    aten.mm.out, aten.addmm.out, aten.bmm.out, aten.baddbmm.out, aten.addmv.out, aten.mv.out, aten.dot.out,
    aten.addmm_.default, aten.baddbmm_.default, aten.addmv_.default, aten.addbmm_.default,
    aten.mm.dtype, aten.addmm.dtype, aten.bmm.dtype, aten.baddbmm.dtype, aten._scaled_mm.default, aten._scaled_mm.out,
}  # fmt: skip
DEFAULT_STREAM = 0
SCALED = (aten._scaled_mm.default, aten._scaled_mm.out)
"""Of 8-bit floats: cuBLASLt's, measured with torchao's float8 training on an H200."""


WORKSPACE, WORKSPACE_LT = "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"


def cublas_bytes(platform: Platform, said: str = "") -> int:
    """Hopper: 32 MiB. Blackwell: the same from pytorch#175344 (2.12). Others: `:4096:2:16:8`. `said`: what the variable
    CUBLAS_WORKSPACE_CONFIG says, in KiB and pieces (CublasHandlePool.cpp)."""
    if pieces := re.findall(r":([0-9]+):([0-9]+)", said):
        return sum(int(size) * int(count) for size, count in pieces) * KiB
    major = platform.arch[0]
    if major == 9 or (major in (10, 12) and platform.torch >= (2, 12)):
        return 32 * MiB
    return (4096 * 2 + 16 * 8) * KiB


def cublaslt_bytes(platform: Platform, said: str = "") -> int:
    """A separate buffer for products with a fused bias, 2.9 to 2.11 (pytorch#156495); later they share cuBLAS's.
    `said`: what the variable CUBLASLT_WORKSPACE_SIZE says, in KiB."""
    if not (2, 9) <= platform.torch < (2, 12):
        return 0
    return int(said) * KiB if said.isdigit() else 1 * MiB


class Workspaces:
    def __init__(self, platform: Platform, variables: Mapping[str, str] | None = None) -> None:
        """`variables`: of the process that is traced, read when the first product asks, as torch does."""
        self._platform = platform
        self._variables = {} if variables is None else variables
        self._held: set[tuple[str, str, int]] = set()
        self._main = threading.current_thread()
        self._handles: list[threading.Thread | None] = []
        """Who has each; None: autograd's own thread, which lives on."""
        self._names: list[str] = []
        """Who had each first."""

    @cached_property
    def _cublas(self) -> int:
        return cublas_bytes(self._platform, self._variables.get(WORKSPACE, ""))

    @cached_property
    def _cublaslt(self) -> int:
        return cublaslt_bytes(self._platform, self._variables.get(WORKSPACE_LT, ""))

    def after_product(self, tracer: Tracer, op: object, args: tuple[object, ...]) -> None:
        with tracer.temporaries() as hold:
            for size in _copied_operands(args):
                hold(size, "operand that cuBLAS cannot read as it lies")
            self.hold_for_product(tracer)
            if op in SCALED or (op in (aten.addmm.default, aten.addmm.out) and _bias_is_fused(args)):
                self._hold(tracer, "cublaslt", self._thread(tracer), self._cublaslt)

    def hold_for_product(self, tracer: Tracer) -> None:
        self._hold(tracer, "cublas", self._thread(tracer), self._cublas)

    def hold_dropout_state(self, tracer: Tracer, size: int) -> None:
        """cuDNN's random numbers, made once for all recurrent layers; the seed is drawn before (cudnn/RNN.cpp)."""
        if ("cudnn dropout", "main", DEFAULT_STREAM) not in self._held:
            tracer.temporary(8, "seed of cuDNN's dropout")
        self._hold(tracer, "cudnn dropout", "main", size, stream=DEFAULT_STREAM)

    def _thread(self, tracer: Tracer) -> str:
        return self._names[self._handle(None if tracer.in_backward else threading.current_thread())]

    def _handle(self, thread: threading.Thread | None) -> int:
        """Its own, or that of a thread that has ended: CublasHandlePool.cpp, which gives them on to whoever asks next,
        the main thread and autograd's too."""
        if thread in self._handles:
            return self._handles.index(thread)
        free = next((n for n, each in enumerate(self._handles) if each is not None and not each.is_alive()), None)
        if free is not None:
            self._handles[free] = thread
            return free
        other = f"{sum(name not in ('main', 'autograd') for name in self._names) + 1}."
        self._names.append("autograd" if thread is None else "main" if thread is self._main else other)
        self._handles.append(thread)
        return len(self._handles) - 1

    def _hold(self, tracer: Tracer, kind: str, thread: str, size: int, stream: int | None = None) -> None:
        """One for each handle and stream."""
        stream = tracer.streams.current.stream_id if stream is None else stream
        if size and (kind, thread, stream) not in self._held:
            self._held.add((kind, thread, stream))
            tracer.rule_calls.as_traced()  # a rule that makes a product will not find it missing again
            where = f"{thread} thread" if stream == DEFAULT_STREAM else f"{thread} thread, stream {stream}"
            tracer.trace.alloc(size, stream=stream, category="workspaces", op=f"{kind} workspace ({where})")


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


Tensor = torch.Tensor

POINTER, STRIDE, SHAPE, TENSOR_MAP = 8, 8, 12, 128
TENSOR_MAPS = 4
"""Descriptors that CUTLASS keeps for each multiprocessor: of two inputs, of the addend and of the output."""


def grouped_mm(
    tracer: Tracer,
    a: Tensor,
    b: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
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


TILE = 32


def _batch(matrices: Tensor) -> int:
    return math.prod(matrices.shape[:-2])


def _factorise(tracer: Tracer, out: Any, x: Tensor, *, upper: bool = False, check_errors: bool = False) -> None:
    """linalg/BatchLinearAlgebraLib.cpp: `xpotrf`, or for several matrices at once a pointer to each of them."""
    n = x.shape[-1]
    if _batch(x) > 1:
        workspace = 8 * _batch(x)
    elif upper:
        workspace = 128 + TILE * x.element_size()
    else:
        workspace = 128 + aligned(4 * (-(-n // TILE)) ** 2, 32)
    tracer.temporary(workspace, "Cholesky workspace")
    if check_errors:
        _ask_for_errors(tracer, None, out[1])


def _ask_for_errors(tracer: Tracer, out: Any, info: Tensor, *_: Any, **__: Any) -> None:
    """native/BatchLinearAlgebra.cpp, `_linalg_check_errors`: `info.any()`, which turns a single number into a bool
    first."""
    with tracer.temporaries() as hold:
        hold(1, "did the factorisation fail?")
        hold(1 if info.numel() == 1 else 0, "did the factorisation fail, as a bool")


def _inverse(tracer: Tracer, x: Tensor, upper: bool = False) -> Tensor:
    """`_cholesky_inverse_cusolver_potrs_based`: the identity is solved for, beside a copy of the factor."""
    result = _by_columns(x)
    with tracer.temporaries() as hold:
        hold(x.numel() * x.element_size(), "Cholesky inverse factor")
        hold(4 if _batch(x) == 1 else 0, "Cholesky inverse status")
    return result


def _solve(tracer: Tracer, b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    with tracer.temporaries() as hold:
        hold(4, "Cholesky solve status")
        result = _by_columns(b)
        hold(factor.numel() * factor.element_size(), "Cholesky solve factor")
    return result


def _solve_triangular(tracer: Tracer, out: Tensor, factor: Tensor, *_: Any, **__: Any) -> None:
    """linalg/BatchLinearAlgebra.cpp, `triangular_solve_kernel`: many systems, or small ones, are solved at once, by a
    pointer to each matrix on either side."""
    at_once = _batch(out) > 8 or factor.shape[-1] < 64
    with tracer.temporaries() as hold:
        for side in ("factors", "right sides") if at_once else ():
            hold(8 * _batch(out), f"pointers to {side}")


def _by_columns(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-2], x.shape[-1], x.shape[-2])).mT


HIDDEN: dict[Any, Any] = {
    aten.linalg_cholesky_ex.default: _factorise,
    aten._linalg_check_errors.default: _ask_for_errors,
    aten.linalg_solve_triangular.default: _solve_triangular,
}

REPLACED: dict[Any, Any] = {
    aten._grouped_mm.default: grouped_mm,
    aten.cholesky_inverse.default: _inverse,
    aten.cholesky_solve.default: _solve,
}
