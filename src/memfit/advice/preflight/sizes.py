"""Bytes that follow from a model's shapes: what is loaded, what the optimizer keeps, what a checkpoint holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.jobs.training.config import Optimizer, TrainConfig

if TYPE_CHECKING:
    from torch import Tensor, nn


def loading_bytes(model: nn.Module) -> int:
    """All weights, adapters too, as they lie in memory."""
    return sum(each.numel() * each.element_size() for each in model.parameters())


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """What the optimizer keeps for the trained weights: two of each for Adam, in their own type or in eight bits."""
    return sum(_state_of(each, optimizer) for each in trained(model))


def _state_of(weight: Tensor, optimizer: Optimizer) -> int:
    if optimizer == "sgd":
        return 0
    if optimizer == "adafactor":  # fp32 sums over rows and over columns, or one of each number of a vector
        kept = sum(weight.numel() // size for size in weight.shape[-2:]) if weight.dim() > 1 else weight.numel()
        return 4 * kept
    if optimizer.endswith("8bit"):
        return 2 * weight.numel()
    return 2 * weight.numel() * weight.element_size()


def checkpoint_bytes(model: nn.Module, config: TrainConfig) -> int:
    """The weights that are trained (LoRA saves its adapters alone), and the optimizer's state."""
    weights = trained(model) if config.method.kind == "lora" else list(model.parameters())
    return sum(each.numel() * each.element_size() for each in weights) + state_bytes(model, config.optimizer.name)
