"""Convolutions: which kernel torch takes, and the workspaces that cuDNN asks for.

A depthwise convolution runs in torch's own kernel (native/cuda/DepthwiseConv2d.cu) unless it lies channels-last; all
others run in cuDNN (native/Convolution.cpp, native/cudnn/Conv_v8.cpp, 2.11), by the first of the plans that its
heuristics name: it is asked for them where it is installed (`cudnn.py`). With `cudnn.benchmark` all of them are tried
when a convolution is met first, in a workspace as large as the largest needs, and the cache is emptied.

Where nobody can be asked there are rules. What a plan needs has a mechanism, read off 9,300 plans on an H200: its
kernels read channels last, so tensors that lie otherwise are copied so, with channels rounded up to 16 bytes; and a
weight's gradient is summed in parts, one for each thread block that would else be idle. Kernels that read tensors as
they lie exist for kernels of one pixel and for few channels. In fp32 cuDNN may also transform whole images for the
gradient of a weight (Winograd, Fourier): no rule says when, which is told. That there were rules is told always.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.extrapolation.reused import WORKSPACE_BY_RULE, say
from memfit.platform import Platform
from memfit.tracing.kernels import cudnn
from memfit.tracing.kernels.layouts import contiguous_copy

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer

aten = torch.ops.aten
Tensor = torch.Tensor

FEW_CHANNELS = 4
TILE = 64 * 64
ALIGNED = 32
"""Bytes; torch looks no further."""
TRIED = "convolution (cudnn.benchmark tries all of them at each new shape, with workspaces of up to gigabytes)"
TIMED = (
    "cudnn.benchmark: the fastest plan is only known on the card, and taken to be the one that cuDNN names first; where"
    " the largest workspace does not fit, torch tries fewer plans"
)


Kind = Literal["forward", "input", "weight"]
"""What is computed: the result, or the gradient of one of both that it is made of."""


@dataclass(frozen=True)
class Convolution:
    """As cuDNN sees it: for a transposed one, what goes in is what comes out."""

    wide: Tensor
    """The image that a plain convolution reads."""
    weight: Tensor
    narrow: Tensor
    groups: int
    channels_last: bool
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @property
    def strided(self) -> bool:
        return max(self.stride) > 1

    @property
    def pixel(self) -> bool:
        return math.prod(self.weight.shape[2:]) == 1

    @property
    def is_half(self) -> bool:
        return self.wide.element_size() == 2

    @property
    def may_be_transformed(self) -> bool:
        return not (self.is_half or self.channels_last or self.strided or self.pixel) and self.wide.dim() > 3

    def question(self, kind: Kind) -> dict[str, Any]:
        """For cuDNN. One with a single side has another of one pixel."""
        tensors, flags = (self.wide, self.weight, self.narrow), torch.backends.cudnn
        lone = self.wide.dim() == 3
        shapes = [[*t.shape[:2], *[1] * lone, *t.shape[2:]] for t in tensors]
        sides = [
            [fill] * lone + [int(n) for n in given]
            for fill, given in ((1, self.stride), (0, self.padding), (1, self.dilation))
        ]
        return {
            "kind": kind, **dict(zip(("image", "weight", "result"), shapes, strict=True)),
            **dict(zip(("stride", "padding", "dilation"), sides, strict=True)),
            "dtype": str(self.wide.dtype).removeprefix("torch."), "channels_last": self.channels_last,
            "alignments": [_alignment(t) for t in tensors],
            "deterministic": flags.deterministic or torch.are_deterministic_algorithms_enabled(),
            "tf32": flags.allow_tf32, "every": flags.benchmark,
        }  # fmt: skip

    def bytes_of(self, plan: cudnn.PlanBytes, kind: Kind, platform: Platform) -> int:
        """A product of cuBLAS sums the gradient of a weight in parts of its own."""
        sums = plan.multiplies and kind == "weight" and self.pixel and self.channels_last
        return plan + (self._parts(platform) if sums else 0)

    @property
    def compiles_gradient(self) -> bool:
        """cuDNN compiles a depthwise kernel on the spot, which it cannot without a driver, so it does not name it."""
        depthwise = self.groups == self.wide.shape[1] == self.narrow.shape[1]
        size = max(self.weight.shape[2:])
        first = size > 3 or self.wide.dtype == torch.bfloat16
        return depthwise and first and self.is_half and self.channels_last and min(self.wide.shape[2:]) > size > 1

    def compiled_gradient_bytes(self) -> int:
        """Sums in fp32, eight for each image, of channels rounded up to 32."""
        channels = -(-self.groups // 32) * 32
        return 8 * self.wide.shape[0] * channels * math.prod(self.weight.shape[2:]) * 4

    def bytes_by_rule(self, kind: Kind, platform: Platform) -> int:
        if kind == "weight":
            return self.weight_gradient_bytes(platform)
        return self.forward_bytes() if kind == "forward" else self.input_gradient_bytes()

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


def _convolve(
    tracer: Tracer,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    if x.numel() == 0 or x.dim() not in (3, 4, 5) or not x.is_floating_point():
        return NotImplemented
    last = _lies_channels_last(x, weight)
    own_kernel = _is_depthwise(x, weight, transposed, groups) and not last
    kind = _format(last, x.dim())
    with tracer.temporaries() as hold:
        hold(contiguous_copy(x, kind), "convolution input, as the kernel reads it")
        hold(0 if own_kernel else contiguous_copy(weight, kind), "convolution weight, as the kernel reads it")
        with _disable_current_modes():
            result = aten.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
            result = torch.empty_like(result, memory_format=kind)
        tracer.track(result, "aten.convolution.default", x)
        if not own_kernel:
            wide, narrow = (result, x) if transposed else (x, result)
            of = Convolution(wide, weight, narrow, groups, last, stride, padding, dilation)
            _run_plan(tracer, of, "input" if transposed else "forward")
    return result


def _run_plan(tracer: Tracer, of: Convolution, kind: Kind) -> None:
    question, flags = of.question(kind), torch.backends.cudnn
    plans = [of.bytes_of(plan, kind, tracer.platform) for plan in cudnn.plans(question, tracer.platform)]
    say(tracer.trace, cudnn.said(tracer.platform))
    if not plans:
        if flags.benchmark or (kind == "weight" and of.may_be_transformed):
            tracer.unmodelled[TRIED if flags.benchmark else "convolution_backward"] = None
        with tracer.temporaries() as hold:
            hold(of.bytes_by_rule(kind, tracer.platform), WORKSPACE_BY_RULE)
        return
    if kind == "weight" and of.compiles_gradient:
        plans.insert(0, of.compiled_gradient_bytes())
    met = (str(question), tracer.in_backward)  # torch's thread for backward remembers by itself
    if flags.benchmark and met not in tracer.tuned:
        tracer.tuned.add(met)
        tracer.temporary(max(plans), "workspace for all plans that cuDNN tries")
        tracer.trace.empty_cache()
        say(tracer.trace, TIMED)
    with tracer.temporaries() as hold:
        hold(plans[0], "convolution workspace of cuDNN")


def _alignment(tensor: Tensor) -> int:
    """Blocks are aligned; a view may begin anywhere in one."""
    begins = int(tensor.storage_offset()) * tensor.element_size()
    return min(begins & -begins or ALIGNED, ALIGNED)


def _convolve_backward(
    tracer: Tracer,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> Any:
    """cuDNN computes the input's gradient first, torch's depthwise kernel the weight's; a bias's is summed last."""
    if x.numel() == 0 or x.dim() not in (3, 4, 5) or not x.is_floating_point():
        return NotImplemented
    last = _lies_channels_last(x, weight)
    own_kernel = _is_depthwise(x, weight, transposed, groups) and not last
    kind = _format(last, x.dim())
    made: dict[int, Tensor] = {}
    with tracer.temporaries() as hold:
        hold(contiguous_copy(x, kind), "convolution input, as the kernel reads it")
        hold(contiguous_copy(grad, kind), "convolution gradient, as the kernel reads it")
        if own_kernel:
            order = (0, 1) if grad.dtype == torch.float16 else (1, 0)
            made = {at: torch.empty_like((x, weight)[at], memory_format=kind) for at in order if wanted[at]}
        else:
            wide, narrow = (grad, x) if transposed else (x, grad)
            of = Convolution(wide, weight, narrow, groups, last, stride, padding, dilation)
            kinds: tuple[Kind, Kind] = ("forward" if transposed else "input", "weight")
            for at, tensor in enumerate((x, weight)):
                if wanted[at]:
                    made[at] = torch.empty_like(tensor, memory_format=kind)
                    _run_plan(tracer, of, kinds[at])
        grad_bias = grad.sum([0, *range(2, grad.dim())]) if wanted[2] else None
    return made.get(0), made.get(1), grad_bias


REPLACED: dict[Any, Any] = {
    aten.convolution.default: _convolve,
    aten.convolution_backward.default: _convolve_backward,
}
