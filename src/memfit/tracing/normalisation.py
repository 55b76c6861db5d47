"""Layer norm, RMS norm and softmax: kernels that read rows one after the other, and copy what does not lie so.

Heads that are cut out of one fused projection, as Persimmon's, or turned around, as in many attentions, do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.tracing.layouts import contiguous_copy

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer

aten = torch.ops.aten
Tensor = torch.Tensor
ROWS = torch.contiguous_format


# -- norms -----------------------------------------------------------------------------------------------------------


def _layer_norm(tracer: Tracer, x: Tensor, *others: Any) -> Any:
    """layer_norm_kernel.cu, layer_norm_cuda: the copy is there before the results."""
    if x.is_contiguous():
        return NotImplemented
    with tracer.temporaries() as hold:
        hold(contiguous_copy(x), "norm input, contiguous")
        with _disable_current_modes():
            results = aten.native_layer_norm(x, *others)
        for result in results:
            tracer.track(result, "aten.native_layer_norm.default", x)
    return results


def _layer_norm_backward(
    tracer: Tracer, grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, weight: Tensor | None,
    bias: Tensor | None, wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return _norm_backward(tracer, grad, x, shape, (weight, bias), wanted)


def _rms_norm_backward(
    tracer: Tracer, grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return _norm_backward(tracer, grad, x, shape, (weight,), wanted)


def _norm_backward(
    tracer: Tracer, grad: Tensor, x: Tensor, shape: Sequence[int], weights: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """layer_norm_kernel.cu: the input is copied before the results are made, its gradient when the kernel begins."""
    with tracer.temporaries() as hold:
        hold(contiguous_copy(x), "norm input, contiguous")
        dx = torch.empty_like(x, memory_format=ROWS) if wanted[0] else None
        gradients = [
            torch.empty_like(weight) if asked and weight is not None else None
            for weight, asked in zip(weights, wanted[1:], strict=True)
        ]
        hold(contiguous_copy(grad), "norm gradient, contiguous")
        return dx, *_summed_in_parts(tracer, x, math.prod(shape), gradients)


def _summed_in_parts(tracer: Tracer, x: Tensor, width: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """layer_norm_kernel.cu: beyond 64 Ki rows a weight's gradient is summed over partial blocks, into a new tensor."""
    rows, columns = x.numel() // width, -(-width // 32)
    if rows <= 64 * 1024 or columns >= tracer.platform.sm_count // 2:
        return gradients
    parts = min(32 * 1024 // columns, -(-rows // 32))
    partial = [torch.empty(parts, width, dtype=x.dtype, device=x.device) if g is not None else None for g in gradients]
    for i, part in enumerate(partial):
        if part is not None:
            gradients[i] = part.sum(0)
    return gradients


# -- softmax ---------------------------------------------------------------------------------------------------------


def _softmax(tracer: Tracer, out: Tensor, x: Tensor, *_: Any, **__: Any) -> None:
    """SoftMax.cu, host_softmax."""
    with tracer.temporaries() as hold:
        hold(contiguous_copy(x), "softmax input, contiguous")


def _softmax_backward(tracer: Tracer, out: Tensor, grad: Tensor, result: Tensor, *_: Any, **__: Any) -> None:
    """SoftMax.cu: `grad * output` is made as a whole before the kernel, and laid out as the two are."""
    with _disable_current_modes():
        product = grad * result
    with tracer.temporaries() as hold:
        hold(product.numel() * product.element_size(), "softmax backward grad x output")
        hold(contiguous_copy(product), "softmax backward grad x output, contiguous")
        hold(contiguous_copy(result), "softmax backward output, contiguous")


def _log_softmax_backward(tracer: Tracer, out: Tensor, grad: Tensor, result: Tensor, *_: Any, **__: Any) -> None:
    with tracer.temporaries() as hold:
        hold(contiguous_copy(grad), "softmax backward gradient, contiguous")
        hold(contiguous_copy(result), "softmax backward output, contiguous")


def _safe_softmax(tracer: Tracer, out: Tensor, x: Tensor, *_: Any, **__: Any) -> None:
    """native/transformers/attention.cpp: rows that are masked entirely are looked for and set to zero."""
    with tracer.temporaries() as hold:
        hold(x.numel(), "masked positions")
        hold(x.numel() // x.shape[-1], "masked rows")
        hold(x.element_size(), "zero")


HIDDEN: dict[Any, Any] = {
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), _softmax),
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten._safe_softmax.default: _safe_softmax,
}
REPLACED: dict[Any, Any] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
}
