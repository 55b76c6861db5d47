"""Tune the kept weights of a pruned block so that it answers as the dense one did (facts in arXiv 2406.15524).

Adam on an fp32 copy of the weights, under autocast where the model has 16 bits; mean squared error to the dense
block's outputs; the learning rate falls linearly to zero. 16 bytes a weight: copy, gradient, two moments.
A removed weight is zero in the copy and its gradient is set to zero, which is W * mask in the forward without another
copy of W: Adam moves nothing whose gradient was always zero.
Same inputs in the same order give the same weights on a CPU; on a GPU as far as the kernels of attention's backward do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from memfit.errors import InputError
from memfit.jobs.pruning.statistics import check_finite

Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""One pass over inputs and the dense block's outputs; called once an epoch, and `steps` long each time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    epochs: int = 5
    learning_rate: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """Mean squared errors over the first and over the last epoch, on the device."""

    first_error: Tensor
    last_error: Tensor


def reconstruct_(
    weights: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    forward: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    batches: Batches,
    steps: int,
    tuning: Tuning | None = None,
) -> Reconstruction:
    """Tune `weights` in place. `masks` (True is removed) has those of the pruned ones; a weight without a mask is
    tuned whole. `forward` runs the block on inputs with the weights it is given in place of its own."""
    tuning = tuning or Tuning()
    device, dtype = _common(weights)
    copies = {name: _copy(weight, masks.get(name)) for name, weight in weights.items()}
    optimizer = torch.optim.Adam(copies.values(), lr=tuning.learning_rate, betas=tuning.betas, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    errors, taken, total = [], 0, steps * tuning.epochs
    with torch.enable_grad():
        for _ in range(tuning.epochs):
            summed = torch.zeros((), dtype=torch.float32, device=device)
            for inputs, targets in batches():
                for group in optimizer.param_groups:
                    group["lr"] = tuning.learning_rate * (1 - taken / total)
                with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                    outputs = forward(copies, inputs)
                error = (outputs.float() - targets.float()).square().mean()
                scaler.scale(error).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                summed += error.detach()
                taken += 1
            errors.append(summed / steps)
    if taken != total:
        raise ValueError(f"{taken} batches came where {total} were announced")
    _check_tuned(copies)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(copies[name])
    return Reconstruction(errors[0], errors[-1])


def _common(weights: Mapping[str, Tensor]) -> tuple[torch.device, torch.dtype]:
    first = next(iter(weights.values()))
    return first.device, first.dtype


def _copy(weight: Tensor, mask: Tensor | None) -> Tensor:
    copy = weight.detach().to(torch.float32, copy=True)
    if mask is not None:
        copy.masked_fill_(mask, 0.0)
    copy.requires_grad_()
    if mask is not None:
        removed = mask

        def clear(tuned: Tensor) -> None:
            assert tuned.grad is not None
            tuned.grad.masked_fill_(removed, 0.0)

        copy.register_post_accumulate_grad_hook(clear)
    return copy


def _check_tuned(copies: Mapping[str, Tensor]) -> None:
    try:
        check_finite(copies)
    except InputError as error:
        raise InputError(f"block reconstruction ran away: {error.message}", hint="leave --reconstruct out") from error
