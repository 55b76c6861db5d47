"""Cholesky factorisations and what is solved with them, as cuSOLVER and torch run them.

A matrix is copied by columns and factorised in place, in a workspace whose size only cuSOLVER knows; then the host asks
whether that went well. The sizes of workspaces were read off an H200 for every n from 1 to 28,672 that models have
(`tests/data/h200-ops.json`): they follow the formulas below without exception.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer

aten = torch.ops.aten
Tensor = torch.Tensor

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
        workspace = 128 + _rounded(4 * (-(-n // TILE)) ** 2)
    tracer.temporary(workspace, "Cholesky workspace")
    if check_errors:
        _ask_for_errors(tracer, None, out[1])


def _rounded(n: int) -> int:
    return -(-n // 32) * 32


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
    aten.cholesky_inverse.default: _inverse,
    aten.cholesky_solve.default: _solve,
}
