"""Reconstruction of a block: kept weights move towards the dense answers, removed ones stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from memfit.errors import InputError
from memfit.jobs.pruning import methods
from memfit.jobs.pruning.methods import reconstruct_

STEPS = 6


def block(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)).to(dtype).requires_grad_(False)


def batches_of(dense: nn.Module, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    drawn = [torch.randn(4, 5, 12).to(dtype) for _ in range(STEPS)]
    return [(x, dense(x)) for x in drawn]


def pruned(dense: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    weights = {name: value.clone() for name, value in dense.named_parameters()}
    masks = {name: value.abs() < value.abs().median() for name, value in weights.items() if value.dim() == 2}
    for name, mask in masks.items():
        weights[name].masked_fill_(mask, 0)
    return weights, masks


def tuned(dtype: torch.dtype, **how: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    dense = block(dtype)
    batches = batches_of(dense, dtype)
    weights, masks = pruned(dense)

    def forward(with_weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(dense, dict(with_weights), (x,))

    def once() -> Iterable[tuple[Tensor, Tensor]]:
        return iter(batches)

    with mock.patch.multiple(methods, **{"EPOCHS": 5, **how}):
        reconstruct_(weights, masks, forward, once, STEPS)
    return weights, masks


def error(weights: Mapping[str, Tensor], dtype: torch.dtype) -> float:
    dense = block(dtype)
    pairs = [(torch.func.functional_call(dense, dict(weights), (x,)), y) for x, y in batches_of(dense, dtype)]
    return sum(float((made - wanted).float().square().mean()) for made, wanted in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_falls_and_what_was_removed_stays_removed(dtype: torch.dtype) -> None:
    before, _ = pruned(block(dtype))
    weights, masks = tuned(dtype, LEARNING_RATE=5e-3, EPOCHS=8)
    assert error(weights, dtype) < 0.7 * error(before, dtype)
    for name, weight in weights.items():
        assert weight.dtype == dtype
        assert not torch.equal(weight, before[name])
        if name in masks:
            assert (weight[masks[name]] == 0).all()


def test_the_same_again_gives_the_same_bits() -> None:
    (first, _), (second, _) = tuned(torch.float32), tuned(torch.float32)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_it_equals_adam_with_the_mask_in_the_forward() -> None:
    weights, masks = tuned(torch.float32, EPOCHS=2)
    dense = block()
    batches = batches_of(dense, torch.float32)
    start, _ = pruned(dense)
    free = {name: value.requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.Adam(free.values(), lr=2e-4, betas=(0.9, 0.95), foreach=False)
    for taken, (x, y) in enumerate(batches * 2):
        optimizer.param_groups[0]["lr"] = 2e-4 * (1 - taken / (2 * STEPS))
        masked = {name: value * ~masks[name] if name in masks else value for name, value in free.items()}
        optimizer.zero_grad()
        (torch.func.functional_call(dense, masked, (x,)) - y).square().mean().backward()
        optimizer.step()
    for name, value in free.items():
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-5, atol=1e-7)


def test_a_learning_rate_that_is_far_too_high_is_an_error_and_leaves_the_weights() -> None:
    dense = block()
    weights, masks = pruned(dense)
    before = {name: value.clone() for name, value in weights.items()}

    def forward(with_weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(dense, dict(with_weights), (x,)) * torch.inf

    with pytest.raises(InputError, match="ran away"):
        reconstruct_(weights, masks, forward, lambda: batches_of(dense, torch.float32), STEPS)
    assert all(torch.equal(weights[name], before[name]) for name in weights)
