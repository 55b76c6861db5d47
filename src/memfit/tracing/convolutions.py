"""Depthwise convolutions, as Mamba and other models with short convolutions use them.

torch's own kernel runs them (native/cuda/DepthwiseConv2d.cu), or cuDNN in fp16. Both want their input contiguous; in
backward torch's computes the weight's gradient first. Workspaces of cuDNN are not modelled, nor other convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.tracing.layouts import contiguous_copy

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer

aten = torch.ops.aten
Tensor = torch.Tensor
DENSE = torch.contiguous_format


def _is_depthwise(x: Tensor, weight: Tensor, transposed: bool, groups: int) -> bool:
    return not transposed and groups == x.shape[1] and weight.shape[1] == 1 and weight.shape[0] % groups == 0


def _forward(
    tracer: Tracer, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Any:  # fmt: skip
    if not _is_depthwise(x, weight, transposed, groups) or x.is_contiguous():
        return NotImplemented
    with tracer.temporaries() as hold:
        hold(contiguous_copy(x), "convolution input, contiguous")
        with _disable_current_modes():
            result = aten.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
        tracer.track(result, "aten.convolution.default", x)
    return result


def _backward(
    tracer: Tracer, grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    wanted: Sequence[bool],
) -> Any:  # fmt: skip
    if not _is_depthwise(x, weight, transposed, groups):
        return NotImplemented
    with tracer.temporaries() as hold:
        hold(contiguous_copy(grad), "convolution gradient, contiguous")
        hold(contiguous_copy(x), "convolution input, contiguous")
        order = (0, 1) if grad.dtype == torch.float16 else (1, 0)
        made = {at: torch.empty_like((x, weight)[at], memory_format=DENSE) for at in order if wanted[at]}
        grad_bias = grad.sum([0, *range(2, grad.dim())]) if wanted[2] else None
    return made.get(0), made.get(1), grad_bias


REPLACED: dict[Any, Any] = {aten.convolution.default: _forward, aten.convolution_backward.default: _backward}
