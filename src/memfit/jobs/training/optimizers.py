"""Optimizers by memfit's names: one factory for plans, plain loops and runs, and the Trainer's words for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit.errors import UsageError
from memfit.jobs.small_states import SmallStates, by_shapes
from memfit.jobs.training.config import TrainConfig
from memfit.jobs.training.config_names import TRAINER_NAMES
from memfit.jobs.workload import Workload

ADAMW: dict[str, dict[str, Any]] = {
    "adamw": {"foreach": True},
    "adamw-fused": {"fused": True},
    "adamw-single": {"foreach": False},
}
OF_PACKAGES = {
    "adamw-8bit": "bitsandbytes.AdamW8bit", "paged-adamw": "bitsandbytes.PagedAdamW",
    "paged-adamw-8bit": "bitsandbytes.PagedAdamW8bit", "lion-8bit": "bitsandbytes.Lion8bit",
    "adamw-8bit-torchao": "torchao.AdamW8bit", "adamw-4bit-torchao": "torchao.AdamW4bit",
}  # fmt: skip
"""The package, whose `optim` has it, and the class there."""


def optimizer_of(work: Workload) -> Callable[..., torch.optim.Optimizer]:
    """Of a plain loop, to be called with weights and `lr`. What AdamW's decay is has no part in its memory."""
    of_sgd = {"momentum": work.momentum, "weight_decay": work.weight_decay}
    return choose_optimizer(str(work.optimizer), on_host="optimizer" in work.offload, of_sgd=of_sgd)


def choose_optimizer(
    name: str,
    *,
    on_host: bool = False,
    setting: str = "--optimizer",
    of_sgd: Mapping[str, float] | None = None,
    **of_adam: Any,
) -> Callable[..., torch.optim.Optimizer]:
    """To be called with weights, or groups of them, and `lr`. `setting` is how the user said it; `of_adam`:
    betas and eps."""
    kind: Any = torch.optim.SGD
    settings: dict[str, Any] = dict(of_sgd or {})
    if name == "adafactor":
        from transformers.optimization import Adafactor as kind

        settings = {"scale_parameter": False, "relative_step": False}
    elif name in OF_PACKAGES:
        if name == "lion-8bit":
            of_adam = {key: value for key, value in of_adam.items() if key != "eps"}
        return partial(_of_package, name, setting, of_adam)
    elif name in ADAMW:
        kind, settings = adamw(on_host), of_adam | ADAMW[name]
    return partial(kind, **settings)


def _of_package(name: str, setting: str, settings: dict[str, Any], weights: Any, **more: Any) -> Any:
    """In a plan, where weights have no memory, its shapes are enough."""
    weights = list(weights)
    first = weights[0]["params"][0] if isinstance(weights[0], dict) else weights[0]
    if first.device.type == "meta":
        kind, shapes = by_shapes(name)
        return kind(weights, **shapes, **more)
    package, _, made = OF_PACKAGES[name].partition(".")
    try:
        optimizers = importlib.import_module(f"{package}.optim")
    except ImportError as error:
        raise UsageError(f"{setting} {name} needs {package}", hint=f"pip install {package}") from error
    return getattr(optimizers, made)(weights, **settings, **more)


def begin_anew(optimizer: torch.optim.Optimizer) -> None:
    """Its state as before the first step. That of bitsandbytes stays where it is: managed memory never goes back."""
    if not _has_small_states(optimizer):
        optimizer.state.clear()
        return
    for state in optimizer.state.values():
        state["step"] = 0
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not name.startswith("qmap"):
                value.zero_()


def load_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """bitsandbytes itself would put states that were paged, and a table for each weight, on the GPU."""
    if not _has_small_states(optimizer):
        optimizer.load_state_dict(saved)
        return
    of_bitsandbytes: Any = optimizer
    before = dict(optimizer.state)
    of_bitsandbytes.load_state_dict(saved, move_to_device=False)
    for index, group in enumerate(optimizer.param_groups):
        for number, weight in enumerate(group["params"]):
            read = optimizer.state.pop(weight, None)
            if not read:
                continue
            made = optimizer.state[weight] = before.get(weight) or {}
            if not made:
                of_bitsandbytes.init_state(group, weight, index, number)
            for name, value in read.items():
                if not isinstance(value, torch.Tensor):
                    made[name] = value
                elif not name.startswith("qmap"):
                    made[name].copy_(value)


def _has_small_states(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, SmallStates) or hasattr(optimizer, "page_mng")


def adamw(on_host: bool) -> type[torch.optim.Optimizer]:
    if not on_host:
        return torch.optim.AdamW
    from memfit.jobs.training.offload import AdamWOnHost

    return AdamWOnHost


def configured_optimizer(config: TrainConfig, model: nn.Module, decayed: set[str]) -> torch.optim.Optimizer:
    """As the config asks for it; weights that are not among the `decayed`, such as biases, are not decayed."""
    said, work = config.optimizer, config.workload
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    groups = [
        {"params": [each for name, each in trained if name in decayed], "weight_decay": work.weight_decay},
        {"params": [each for name, each in trained if name not in decayed], "weight_decay": 0.0},
    ]
    on_host, betas = "optimizer" in work.offload, (said.beta1, said.beta2)
    made: Any = {"of_sgd": {"momentum": work.momentum}, "betas": betas, "eps": said.eps}
    make = choose_optimizer(str(work.optimizer), on_host=on_host, setting="optimizer", **made)
    return make([group for group in groups if group["params"]], lr=config.schedule.learning_rate)


def trainer_name(name: str) -> str:
    if name not in TRAINER_NAMES:
        raise UsageError(f"the Trainer has no --optimizer {name}", hint=f"it has {', '.join(TRAINER_NAMES)}")
    return TRAINER_NAMES[name]
