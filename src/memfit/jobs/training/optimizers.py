"""Optimizers by memfit's names: one factory for plans, plain loops and runs, and the Trainer's words for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memfit.errors import UsageError
from memfit.jobs.training.config import TrainConfig

ADAMW: dict[str, dict[str, Any]] = {
    "adamw": {"foreach": True},
    "adamw-fused": {"fused": True},
    "adamw-single": {"foreach": False},
}
BITSANDBYTES = {"adamw-8bit": "AdamW8bit", "paged-adamw": "PagedAdamW", "paged-adamw-8bit": "PagedAdamW8bit"}
TRAINER_NAMES = {
    "adamw": "adamw_torch",
    "adamw-fused": "adamw_torch_fused",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "adamw-8bit": "adamw_bnb_8bit",
}


def make_optimizer(
    name: str, trained: Sequence[Any], *, on_host: bool = False, rate: float = 1e-4, setting: str = "--optimizer",
    **of_adam: Any,
) -> torch.optim.Optimizer:  # fmt: skip
    """Of weights, or of groups of them. `setting` is how the user said it; `of_adam` are its betas and eps."""
    kind: Any
    if name == "sgd":
        return torch.optim.SGD(trained, lr=rate)
    if name == "adafactor":
        from transformers.optimization import Adafactor as kind

        settings: dict[str, Any] = {"scale_parameter": False, "relative_step": False}
    elif name in BITSANDBYTES:
        try:
            import bitsandbytes.optim as bnb  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise UsageError(f"{setting} {name} needs bitsandbytes", hint="pip install bitsandbytes") from error
        kind, settings = getattr(bnb, BITSANDBYTES[name]), of_adam
    else:
        kind, settings = adamw(on_host), of_adam | ADAMW[name]
    made: torch.optim.Optimizer = kind(trained, lr=rate, **settings)
    return made


def adamw(on_host: bool) -> type[torch.optim.Optimizer]:
    if not on_host:
        return torch.optim.AdamW
    from memfit.jobs.training.offload.optimizer import AdamWOnHost

    return AdamWOnHost


def configured_optimizer(config: TrainConfig, model: nn.Module, decayed: set[str]) -> torch.optim.Optimizer:
    """As the config asks for it; weights that are not among the `decayed`, such as biases, are not decayed."""
    said, trained = config.optimizer, [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    groups = [
        {"params": [each for name, each in trained if name in decayed], "weight_decay": said.weight_decay},
        {"params": [each for name, each in trained if name not in decayed], "weight_decay": 0.0},
    ]
    return make_optimizer(
        said.name, [group for group in groups if group["params"]], rate=config.schedule.learning_rate,
        betas=(said.beta1, said.beta2), eps=said.eps, on_host="optimizer" in config.memory.offload, setting="optimizer",
    )  # fmt: skip


def trainer_name(name: str) -> str:
    if name not in TRAINER_NAMES:
        raise UsageError(f"the Trainer has no --optimizer {name}", hint=f"it has {', '.join(TRAINER_NAMES)}")
    return TRAINER_NAMES[name]
