"""Batch and group norm: cuDNN's kernels or torch's own, and what they hold beside their results.

cuDNN runs a batch norm of three dimensions and more in fp32 and fp16 with weights in fp32 (native/Normalization.cpp,
`_select_batch_norm_backend`, 2.11); everything else, bf16 and weights in half precision above all, runs in
native/cuda/Normalization.cu, whose kernels for channels-last and for plain rows meet in a staging buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from memfit.tracing.kernels.layouts import contiguous_copy, power_of_two_below

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer

aten = torch.ops.aten
Tensor = torch.Tensor

THREADS, TILE_WIDTH, PER_THREAD, MOST_BLOCKS, FEWEST_BLOCKS = 512, 32, 16, 128, 8


def _last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _in_rows(x: Tensor) -> bool:
    """The kernels for channels-last also read rows of a matrix."""
    return _last(x) or (x.is_contiguous() and x.stride(1) == 1)


def _format(x: Tensor) -> torch.memory_format:
    return torch.channels_last if _last(x) else torch.contiguous_format


def _uses_cudnn(x: Tensor, weight: Tensor | None, running: Tensor | None, training: bool) -> bool:
    return (
        x.dim() > 2
        and x.dtype in (torch.float16, torch.float32, torch.float64)
        and weight is not None
        and weight.dtype != torch.float16
        and (running is not None or training)
    )


def _batch_norm(
    tracer: Tracer,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    channels = x.shape[1]
    cudnn = _uses_cudnn(x, weight, mean, training)
    with tracer.temporaries() as hold:
        if cudnn:
            hold(contiguous_copy(x, _format(x)), "norm input, as the kernel reads it")
        out = torch.empty_like(x, memory_format=_format(x) if cudnn else torch.preserve_format)
        kept = channels if training or not cudnn else 0
        stats = [x.new_empty(kept, dtype=torch.float32) for _ in range(2)]
        if cudnn and training and _last(x):
            hold(_cudnn_workspace(x, forward=True), "norm workspace of cuDNN")
        elif training and not cudnn and _in_rows(x):
            _staged(tracer, x, 4)
    return out, *stats


def _batch_norm_backward(
    tracer: Tracer,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    saved_mean: Tensor | None,
    saved_var: Tensor | None,
    training: bool,
    eps: float,
    wanted: Sequence[bool],
) -> Any:
    channels = x.shape[1]
    kind = x.dtype if weight is None else weight.dtype
    cudnn = _uses_cudnn(x, weight, mean, training)

    def of_weights() -> list[Tensor | None]:
        asked = [wanted[1] and weight is not None, wanted[2] and weight is not None]
        return [x.new_empty(channels, dtype=kind) if each else None for each in asked]

    if not (cudnn and training) and _in_rows(x):
        with tracer.temporaries() as hold:
            for name in ("inverse deviation",) * (cudnn and not training) + ("sum", "sum of products"):
                hold(channels * 4, f"batch norm backward {name}")
            dw, db = of_weights()
            _staged(tracer, x, 2)
            plain = torch.contiguous_format if not training else torch.preserve_format
            dx = torch.empty_like(x, memory_format=plain) if wanted[0] else None
        return dx, dw, db
    with tracer.temporaries() as hold:
        if cudnn:
            hold(contiguous_copy(x, _format(x)), "norm input, as the kernel reads it")
            hold(contiguous_copy(grad, _format(x)), "norm gradient, as the kernel reads it")
        dx = torch.empty_like(x) if wanted[0] else None
        dw, db = of_weights()
        if cudnn and training and _last(x):
            hold(_cudnn_workspace(x, forward=False), "norm workspace of cuDNN")
    return dx, dw, db


def _cudnn_workspace(x: Tensor, forward: bool) -> int:
    """As measured, without its last few KiB: parts of sums, eight bytes for each row of 64 channels."""
    whole = x.numel() // x.shape[1] * max(8, x.shape[1] // 8)
    if not forward:
        return whole * 2 // 3
    return whole if x.element_size() == 4 else whole * 2 // 5


def _staged(tracer: Tracer, x: Tensor, values: int) -> None:
    """Normalization.cuh, `flexible_launch_configs`: blocks that share a channel, if there are enough of them."""
    channels, rows = x.shape[1], x.numel() // max(x.shape[1], 1)
    width = min(power_of_two_below(channels), TILE_WIDTH)
    height = min(power_of_two_below(-(-rows // PER_THREAD)), THREADS // width)
    if width * height < THREADS:
        width = min(power_of_two_below(channels), THREADS // height)
    blocks = min(-(-rows // (height * PER_THREAD)), MOST_BLOCKS)
    if blocks >= FEWEST_BLOCKS:
        with tracer.temporaries() as hold:
            hold(values * 4 * channels * blocks, "batch norm staging")
            hold(4 * -(-channels // width), "batch norm semaphores")


def _of_channels(x: Tensor, count: int) -> list[Tensor]:
    """In the type that sums are made in."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    return [x.new_empty(x.shape[1], dtype=kind) for _ in range(count)]


def _statistics(tracer: Tracer, x: Tensor, eps: float) -> tuple[Tensor, ...]:
    """Of one process: SyncBatchNorm (torch/nn/modules/_functions.py) does in pieces what batch norm does whole."""
    made = _of_channels(x, 2)
    if _in_rows(x):
        _staged(tracer, x, 4)
    return tuple(made)


def _statistics_of_all(tracer: Tracer, x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(_of_channels(x, 2))


def _normalised(tracer: Tracer, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _sums_backward(
    tracer: Tracer,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[Tensor | None, ...]:
    sums: Sequence[Tensor | None] = _of_channels(x, 2) if input_wanted else (None, None)
    asked = [wanted and weight is not None for wanted in (weight_wanted, bias_wanted)]
    kind = x.dtype if weight is None else weight.dtype
    of_weights = [x.new_empty(x.shape[1], dtype=kind) if each else None for each in asked]
    if _in_rows(x):
        _staged(tracer, x, 2)
    return *sums, *of_weights


def _input_backward(tracer: Tracer, grad: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _group_norm(
    tracer: Tracer,
    out: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    c: int,
    positions: int,
    groups: int,
    eps: float,
) -> None:
    """group_norm_kernel.cu: weight and moments are made one factor and one addend for each channel."""
    if positions > 1 and (weight is not None or bias is not None):
        with tracer.temporaries() as hold:
            for name in ("factors", "addends"):
                hold(n * c * 4, f"group norm {name}")


def _group_norm_backward(
    tracer: Tracer,
    out: Any,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    positions: int,
    groups: int,
    wanted: Sequence[bool],
) -> None:
    with tracer.temporaries() as hold:
        hold(contiguous_copy(grad) if x.is_contiguous() else 0, "norm gradient, contiguous")
        for name in ("sums of products", "sums"):
            hold(n * c * 4, f"group norm backward {name}")
        for name in ("second factors", "addends"):
            hold(n * groups * 4, f"group norm backward {name}")
        if weight is not None and positions > 1:
            hold(n * c * 4, "group norm backward first factors")


HIDDEN: dict[Any, Any] = {
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
}
REPLACED: dict[Any, Any] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.batch_norm_stats.default: _statistics,
    aten.batch_norm_gather_stats_with_counts.default: _statistics_of_all,
    aten.batch_norm_elemt.default: _normalised,
    aten.batch_norm_backward_reduce.default: _sums_backward,
    aten.batch_norm_backward_elemt.default: _input_backward,
}
