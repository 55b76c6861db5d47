"""Losses: some compute every element before they sum, and some of these keep that memory for as long as the loss lives.

`mse_loss`, `smooth_l1_loss` and `binary_cross_entropy` make their result as large as their input and shrink it to one
number, which gives nothing back (native/BinaryOps.cpp, native/cuda/Loss.cu, 2.11).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer

aten = torch.ops.aten
Tensor = torch.Tensor
MEAN = 1
FEW_STEPS = 450
"""LossCTC.cu: beyond, the blanks of all steps are summed at once."""


def _like(x: Tensor, y: Tensor) -> Tensor:
    with _disable_current_modes():
        shaped = x + y
    return torch.empty_strided(shaped.shape, shaped.stride(), dtype=shaped.dtype, device=shaped.device)


def _shrunk(result: Tensor) -> Tensor:
    with _disable_current_modes():
        return result.resize_(())


def _of_differences(tracer: Tracer, x: Tensor, y: Tensor, reduction: int = MEAN, *_: Any) -> Tensor:
    from memfit.tracing.kernels.rules import reduced

    result = _like(x, y)
    if not reduction:
        return result
    each = torch.empty_like(result)
    reduced(tracer, each)
    return _shrunk(result)


def _huber(tracer: Tracer, x: Tensor, y: Tensor, reduction: int = MEAN, *_: Any) -> Tensor:
    each = _like(x, y)
    if not reduction:
        return each
    return each.mean() if reduction == MEAN else each.sum()


def _cross_entropy_of_two(
    tracer: Tracer, x: Tensor, y: Tensor, weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    result = torch.empty_like(x)
    if not reduction:
        return result
    total = result.mean() if reduction == MEAN else result.sum()
    del total
    return _shrunk(result)


class LogitsLoss(torch.autograd.Function):
    """native/Loss.cpp and FunctionsManual.cpp: in place, but while a dispatch mode is watching, as here."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weight: Tensor | None, positive: Tensor | None, reduction: int
    ) -> Tensor:
        ctx.save_for_backward(x, y, weight, positive)
        ctx.reduction = reduction
        logs = torch.nn.functional.logsigmoid(x)
        if positive is not None:
            factor = (positive - 1).mul(y).add_(1)
            logs.mul_(factor)
            del factor
        loss = (1 - y).mul_(x).sub_(logs)
        del logs
        if weight is not None:
            loss.mul_(weight)
        return loss.mean() if reduction == MEAN else loss.sum() if reduction else loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y, weight, positive = ctx.saved_tensors
        if positive is None:
            made = x.sigmoid().sub_(y)
        else:
            known = positive.mul(y)
            made = known.add(1).sub_(y).mul_(x.sigmoid()).sub_(known)
            del known
        made = made.mul_(grad)
        if weight is not None:
            made.mul_(weight)
        if ctx.reduction == MEAN:
            made.div_(x.numel())
        return made, None, None, None, None


def logits_loss(
    x: Tensor, y: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    if y.requires_grad or x.shape != y.shape or (weight is not None and weight.requires_grad):
        op = aten.binary_cross_entropy_with_logits.default
        return op.decompose(x, y, weight, pos_weight, reduction)  # type: ignore[no-any-return]
    return LogitsLoss.apply(x, y, weight, pos_weight, reduction)  # type: ignore[no-any-return]


def one_hot(x: Tensor, classes: int = -1) -> Tensor:
    """native/Onehot.cpp: zeros, and ones written into them."""
    if classes == -1:
        classes = int(x.max().item()) + 1
    zeros = torch.zeros(*x.shape, classes, dtype=torch.int64, device=x.device)
    return zeros.scatter_(-1, x.unsqueeze(-1), 1)


def _ctc_loss(overload: Any) -> Any:
    def run(
        logs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: int = MEAN,
        zero_infinity: bool = False,
    ) -> Tensor:
        """native/LossCTC.cpp: a mean is that of losses by the length of their targets, which move to the device."""
        loss: Tensor = overload(logs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
        if zero_infinity:
            loss = torch.where(loss == float("inf"), torch.zeros((), dtype=loss.dtype, device=loss.device), loss)
        if reduction != MEAN:
            return loss.sum() if reduction else loss
        return (loss / logs.new_empty(loss.shape).clamp_min(1)).mean()

    return run


def _ctc(
    tracer: Tracer,
    logs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Any:
    """native/cuda/LossCTC.cu: the probabilities of all prefixes, interleaved with blanks, are kept."""
    steps, batch = logs.shape[:2]
    longest = _longest(tracer, targets, target_lengths)
    with tracer.temporaries() as hold:
        for name in ("lengths of targets", "lengths of inputs", "offsets of targets"):
            hold(batch * 8, f"CTC {name}")
        alpha = logs.new_empty(batch, steps, 2 * longest + 1)
        return logs.new_empty(batch), alpha


def _ctc_backward(
    tracer: Tracer,
    grad: Tensor,
    logs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    loss: Tensor,
    alpha: Tensor,
    *_: Any,
) -> Tensor:
    with tracer.temporaries() as hold:
        for name in ("lengths of targets", "lengths of inputs", "offsets of targets"):
            hold(logs.shape[1] * 8, f"CTC {name}")
        beta = torch.empty_like(alpha)
        made = torch.empty_like(logs, memory_format=torch.contiguous_format)
        steps, batch, labels = logs.shape
        if 2 * steps + 24 * batch // 10 + 2 * labels // 10 > FEW_STEPS:
            beta.new_empty(batch, steps, alpha.shape[2] // 2 + 1).logsumexp(2)
        return made


def _longest(tracer: Tracer, targets: Tensor, lengths: Any) -> int:
    if isinstance(lengths, Tensor):
        values = getattr(tracer, "values", None)
        known = values.read(lengths) if values is not None else None
        if known is None:
            return targets.shape[-1] if targets.dim() == 2 else targets.numel()
        lengths = known.tolist()
    return max(lengths, default=0)


REPLACED: dict[Any, Any] = {
    aten.mse_loss.default: _of_differences,
    aten.smooth_l1_loss.default: _of_differences,
    aten.huber_loss.default: _huber,
    aten.binary_cross_entropy.default: _cross_entropy_of_two,
    **dict.fromkeys((aten._ctc_loss.default, aten._ctc_loss.Tensor), _ctc),
    **dict.fromkeys((aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor), _ctc_backward),
}
COMPOSITES: dict[str, Any] = {
    "binary_cross_entropy_with_logits": logits_loss,
    "one_hot": one_hot,
    "ctc_loss.Tensor": _ctc_loss(aten._ctc_loss.Tensor),
    "ctc_loss.IntList": _ctc_loss(aten._ctc_loss.default),
}
