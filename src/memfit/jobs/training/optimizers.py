"""Optimizers by memfit's names, in a plain loop and in the Trainer.

The optimizer that a config asks for. Biases and norms are not decayed.
"""

from __future__ import annotations

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

TRAINER_NAMES = {
    "adamw": "adamw_torch",
    "adamw-fused": "adamw_torch_fused",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "adamw-8bit": "adamw_bnb_8bit",
}


def make_optimizer(name: str, parameters: list[nn.Parameter], *, on_host: bool = False) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        made: torch.optim.Optimizer = Adafactor(parameters, lr=1e-4, scale_parameter=False, relative_step=False)
        return made
    if name == "adamw-8bit":
        try:
            from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise UsageError("--optimizer adamw-8bit needs bitsandbytes", hint="pip install bitsandbytes") from error
        eight: torch.optim.Optimizer = AdamW8bit(parameters, lr=1e-4)
        return eight
    kind: Any = adamw(on_host)
    chosen: torch.optim.Optimizer = kind(parameters, lr=1e-4, **ADAMW[name])
    return chosen


def adamw(on_host: bool) -> type[torch.optim.Optimizer]:
    if not on_host:
        return torch.optim.AdamW
    from memfit.jobs.training.offload.optimizer import AdamWOnHost

    return AdamWOnHost


def trainer_name(name: str) -> str:
    if name not in TRAINER_NAMES:
        raise UsageError(f"the Trainer has no --optimizer {name}", hint=f"it has {', '.join(TRAINER_NAMES)}")
    return TRAINER_NAMES[name]


BITSANDBYTES = {"adamw-8bit": "AdamW8bit", "paged-adamw": "PagedAdamW", "paged-adamw-8bit": "PagedAdamW8bit"}


def choose_optimizer(config: TrainConfig, model: nn.Module, decayed: set[str]) -> torch.optim.Optimizer:
    said, rate = config.optimizer, config.schedule.learning_rate
    groups = _groups(model, decayed, said.weight_decay)
    betas = (said.beta1, said.beta2)
    if said.name == "sgd":
        return torch.optim.SGD(groups, lr=rate)
    if said.name == "adafactor":
        from transformers.optimization import Adafactor

        made: torch.optim.Optimizer = Adafactor(groups, lr=rate, scale_parameter=False, relative_step=False)
        return made
    if said.name in BITSANDBYTES:
        try:
            import bitsandbytes.optim as bnb  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise UsageError(f"optimizer {said.name} needs bitsandbytes", hint="pip install bitsandbytes") from error
        small: torch.optim.Optimizer = getattr(bnb, BITSANDBYTES[said.name])(groups, lr=rate, betas=betas, eps=said.eps)
        return small
    kind: Any = adamw(on_host="optimizer" in config.memory.offload)
    chosen: torch.optim.Optimizer = kind(groups, lr=rate, betas=betas, eps=said.eps, **ADAMW[said.name])
    return chosen


def _groups(model: nn.Module, decayed: set[str], decay: float) -> list[dict[str, Any]]:
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    groups = [
        {"params": [each for name, each in trained if name in decayed], "weight_decay": decay},
        {"params": [each for name, each in trained if name not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
