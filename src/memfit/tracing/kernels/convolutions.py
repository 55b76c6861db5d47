"""Convolutions: which kernel torch takes, and the workspaces that cuDNN asks for.

A depthwise convolution runs in torch's own kernel (native/cuda/DepthwiseConv2d.cu) unless it lies channels-last; all
others run in cuDNN (native/Convolution.cpp, native/cudnn/Conv_v8.cpp, 2.11), by the first of the plans that its
heuristics name. Which one that is, only cuDNN knows. What a plan needs has a mechanism, read off 9,300 plans on an
H200: its kernels read channels last, so tensors that lie otherwise are copied so, with channels rounded up to 16 bytes;
and a weight's gradient is summed in parts, one for each thread block that would else be idle. Kernels that read tensors
as they lie exist for kernels of one pixel and for few channels. In fp32 cuDNN may also transform whole images for the
gradient of a weight (Winograd, Fourier), once so and once not for the same shapes: that is not modelled, and told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.platform import Platform

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer

aten = torch.ops.aten
Tensor = torch.Tensor

FEW_CHANNELS = 4
TILE = 64 * 64
TRIED = "convolution (cudnn.benchmark tries all of them at each new shape, with workspaces of up to gigabytes)"


@dataclass(frozen=True)
class Convolution:
    """As cuDNN sees it: for a transposed one, what goes in is what comes out."""

    wide: Tensor
    """The image that a plain convolution reads."""
    weight: Tensor
    narrow: Tensor
    groups: int
    channels_last: bool
    strided: bool

    @property
    def pixel(self) -> bool:
        return math.prod(self.weight.shape[2:]) == 1

    @property
    def is_half(self) -> bool:
        return self.wide.element_size() == 2

    @property
    def may_be_transformed(self) -> bool:
        return not (self.is_half or self.channels_last or self.strided or self.pixel) and self.wide.dim() > 3

    def forward_bytes(self) -> int:
        channels = self.wide.shape[1]
        if self.is_half and self.channels_last and channels < FEW_CHANNELS:
            return (self.wide.numel() + self.weight.numel()) // channels * FEW_CHANNELS * 2 + 16
        if channels <= FEW_CHANNELS and max(self.weight.shape[2:]) < 7:
            return 0
        return self._copies() if self._reads_channels_last() else 0

    def input_gradient_bytes(self) -> int:
        if self.is_half and self.narrow.shape[1] <= FEW_CHANNELS:
            return 0
        return self._copies() if self._reads_channels_last() else self._copies_to_rows()

    def weight_gradient_bytes(self, platform: Platform) -> int:
        if self.pixel and not self.strided and not self.channels_last:
            images = (self.wide.numel() + self.narrow.numel()) * self.wide.element_size() + 16
            return min(images, self.wide.shape[0] * self.weight.numel() * 4)
        if not self._reads_channels_last():
            large = max(self.weight.shape[2:]) >= 7 and not self.channels_last
            return self._copies() if large else self._copies_to_rows()
        return self._copies() + self._parts(platform)

    def _reads_channels_last(self) -> bool:
        """In fp32 only with channels enough on both sides."""
        return self.is_half or min(self.wide.shape[1], self.narrow.shape[1]) >= 8

    def _copies_to_rows(self) -> int:
        """The other way round: the kernel for few channels reads rows."""
        if not self.channels_last:
            return 0
        return (self.wide.numel() + self.weight.numel() + self.narrow.numel()) * self.wide.element_size() + 16

    def _copies(self) -> int:
        """Beside them 16 bytes. A kernel of one pixel lies the same in both orders."""
        if self.channels_last or (self.pixel and not self.strided):
            return 0
        images = self._rounded(self.wide) + self._rounded(self.narrow)
        weight = 0 if self.pixel else self._rounded(self.weight, both=self.groups == 1)
        return (images + weight) * self.wide.element_size() + 16

    def _rounded(self, tensor: Tensor, both: bool = False) -> int:
        step = 16 // tensor.element_size()
        up = [-(-n // step) * step if at == 1 or (both and at == 0) else n for at, n in enumerate(tensor.shape)]
        return math.prod(up) if self.groups == 1 else tensor.numel()

    def _parts(self, platform: Platform) -> int:
        """Tiles of 64 x 64 sums in fp32, twice as wide where there are more channels: as many as fill the card."""
        positions = self.narrow.numel() // self.narrow.shape[1]
        sides = [2 if channels > 64 else 1 for channels in (self.wide.shape[1], self.narrow.shape[1])]
        tile = TILE * math.prod(sides)
        tiles = -(-self.weight.numel() // tile)
        if positions < (12_000 if self.is_half else 6_000) or tiles > platform.sm_count:
            return 0
        splits = platform.sm_count // tiles
        if self.is_half:
            splits = splits // 2 if min(sides) == 2 else splits - 1
        return splits * tiles * tile * 4 if splits > 1 else 0


def _is_depthwise(x: Tensor, weight: Tensor, transposed: bool, groups: int) -> bool:
    return not transposed and groups == x.shape[1] and weight.shape[1] == 1 and weight.shape[0] % groups == 0


def _lies_channels_last(*tensors: Tensor) -> bool:
    """ConvUtils.h, `cudnn_conv_suggest_memory_format`: as either of them does."""
    return any(_is_last(t) for t in tensors)


def _is_last(tensor: Tensor) -> bool:
    kinds = {4: torch.channels_last, 5: torch.channels_last_3d}
    kind = kinds.get(tensor.dim())
    return kind is not None and tensor.is_contiguous(memory_format=kind) and not tensor.is_contiguous()


def _format(last: bool, dim: int) -> torch.memory_format:
    return (torch.channels_last_3d if dim == 5 else torch.channels_last) if last else torch.contiguous_format


def _copy_bytes(tensor: Tensor, kind: torch.memory_format) -> int:
    return 0 if tensor.is_contiguous(memory_format=kind) else tensor.numel() * tensor.element_size()


def _convolve(
    tracer: Tracer, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Any:  # fmt: skip
    if x.numel() == 0 or x.dim() not in (3, 4, 5) or not x.is_floating_point():
        return NotImplemented
    last = _lies_channels_last(x, weight)
    own_kernel = _is_depthwise(x, weight, transposed, groups) and not last
    kind = _format(last, x.dim())
    if torch.backends.cudnn.benchmark and not own_kernel:
        tracer.unmodelled[TRIED] = None
    with tracer.temporaries() as hold:
        hold(_copy_bytes(x, kind), "convolution input, as the kernel reads it")
        hold(0 if own_kernel else _copy_bytes(weight, kind), "convolution weight, as the kernel reads it")
        with _disable_current_modes():
            result = aten.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
            result = torch.empty_like(result, memory_format=kind)
        tracer.track(result, "aten.convolution.default", x)
        if not own_kernel:
            of = _as_cudnn(x, weight, result, transposed, groups, last, stride)
            hold(of.input_gradient_bytes() if transposed else of.forward_bytes(), "convolution workspace of cuDNN")
    return result


def _as_cudnn(
    x: Tensor, weight: Tensor, result: Tensor, transposed: bool, groups: int, last: bool, stride: Sequence[int]
) -> Convolution:
    wide, narrow = (result, x) if transposed else (x, result)
    return Convolution(wide, weight, narrow, groups, last, max(stride) > 1)


def _convolve_backward(
    tracer: Tracer, grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    wanted: Sequence[bool],
) -> Any:  # fmt: skip
    """cuDNN computes the input's gradient first, torch's depthwise kernel the weight's; a bias's is summed last."""
    if x.numel() == 0 or x.dim() not in (3, 4, 5) or not x.is_floating_point():
        return NotImplemented
    last = _lies_channels_last(x, weight)
    own_kernel = _is_depthwise(x, weight, transposed, groups) and not last
    kind = _format(last, x.dim())
    made: dict[int, Tensor] = {}
    with tracer.temporaries() as hold:
        hold(_copy_bytes(x, kind), "convolution input, as the kernel reads it")
        hold(_copy_bytes(grad, kind), "convolution gradient, as the kernel reads it")
        if own_kernel:
            order = (0, 1) if grad.dtype == torch.float16 else (1, 0)
            made = {at: torch.empty_like((x, weight)[at], memory_format=kind) for at in order if wanted[at]}
        else:
            of = _as_cudnn(x, weight, grad, transposed, groups, last, stride)
            if wanted[1] and of.may_be_transformed:
                tracer.unmodelled["convolution_backward"] = None
            sizes = (
                of.forward_bytes() if transposed else of.input_gradient_bytes(),
                of.weight_gradient_bytes(tracer.platform),
            )
            for at, tensor in enumerate((x, weight)):
                if wanted[at]:
                    made[at] = torch.empty_like(tensor, memory_format=kind)
                    with tracer.temporaries() as inner:
                        inner(sizes[at], "convolution workspace of cuDNN")
        grad_bias = grad.sum([0, *range(2, grad.dim())]) if wanted[2] else None
    return made.get(0), made.get(1), grad_bias


REPLACED: dict[Any, Any] = {
    aten.convolution.default: _convolve,
    aten.convolution_backward.default: _convolve_backward,
}
