"""Optimizers by memfit's names, in a plain loop and in the Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memfit.errors import UsageError

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
