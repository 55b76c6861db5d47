"""Optimizers by memfit's names: one factory for plans, plain loops and runs, and the Trainer's words for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memfit.errors import UsageError
from memfit.jobs.training.config import TrainConfig
from memfit.jobs.training.config_names import OF_PACKAGES, TRAINER_NAMES
from memfit.jobs.workload import Workload

ADAMW: dict[str, dict[str, Any]] = {
    "adamw": {"foreach": True},
    "adamw-fused": {"fused": True},
    "adamw-single": {"foreach": False},
}


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


# -- states of 8 or 4 bits, or in managed memory, as a plan sees them --------------------------------------------------

FEWEST_IN_8_BITS = 4096
FEWEST_PAGED = 100_000
BLOCK = 256
OF_BITSANDBYTES: dict[str, dict[str, Any]] = {
    "adamw-8bit": {"states": 2, "bits": 8, "paged": False},
    "paged-adamw-8bit": {"states": 2, "bits": 8, "paged": True},
    "paged-adamw": {"states": 2, "bits": 32, "paged": True},
    "lion-8bit": {"states": 1, "bits": 8, "paged": False},
}
OF_TORCHAO: dict[str, dict[str, Any]] = {
    "adamw-8bit-torchao": {"bits": 8, "block": 256},
    "adamw-4bit-torchao": {"bits": 4, "block": 128},
}


class ShapesOfStates(torch.optim.Optimizer):
    """Shapes only: what a step would leave beside each weight."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for weight in (weight for group in self.param_groups for weight in group["params"] if weight.grad is not None):
            if not self.state[weight]:
                self.state[weight] = self._made(weight)
            self._update(weight)
        return None if closure is None else closure()

    def _made(self, weight: Tensor) -> dict[str, Any]:
        raise NotImplementedError

    def _update(self, weight: Tensor) -> None:
        raise NotImplementedError


class SmallStates(ShapesOfStates):
    """After bitsandbytes 0.50 (optim/optimizer.py): small weights have fp32 states, and a paged optimizer keeps states
    of many entries where neither torch's allocator nor its statistics see them."""

    def __init__(
        self, params: Any, *, states: int, bits: int, paged: bool, whole: Collection[int] = (), **defaults: Any
    ) -> None:
        """`whole`: weights, by identity, whose states have 32 bits all the same."""
        super().__init__(params, defaults)
        self.states, self.bits, self.paged, self.whole = states, bits, paged, whole
        self.tables: list[Tensor] = []

    def _update(self, weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad = weight.grad.contiguous()

    def _made(self, weight: Tensor) -> dict[str, Any]:
        small = self.bits == 8 and weight.numel() >= FEWEST_IN_8_BITS and id(weight) not in self.whole
        made: dict[str, Any] = {"step": 0}
        if small and not self.tables:
            self.tables = [torch.tensor([0.0] * 256, device=weight.device) for _ in range(self.states)]
        managed = self.paged and weight.numel() >= FEWEST_PAGED
        for number in range(0 if managed else self.states):
            made[f"state{number}"] = torch.zeros_like(weight, dtype=torch.uint8 if small else torch.float32)
        for number in range(self.states if small else 0):
            scales = -(-weight.numel() // BLOCK)
            made[f"absmax{number}"] = torch.zeros(scales, dtype=torch.float32, device=weight.device)
        return made


class CompiledStates(ShapesOfStates):
    """After torchao 0.18 (optim/adam.py, `OptimState8bit` and `OptimState4bit`): weights that are small, or no whole
    number of blocks, have states of their own type; its step is one compiled kernel for each shape of a weight."""

    def __init__(self, params: Any, *, bits: int, block: int, **defaults: Any) -> None:
        super().__init__(params, defaults)
        self.bits, self.block = bits, block

    def _is_packed(self, weight: Tensor) -> bool:
        return weight.numel() >= FEWEST_IN_8_BITS and weight.numel() % self.block == 0

    def _update(self, weight: Tensor) -> None:
        """What the compiled kernels of torch 2.11 hand to each other: scales and moments of both states, and in 4 bits
        the codes before two of them share a byte."""
        if not self._is_packed(weight):
            return
        count = weight.numel()
        scales = [weight.new_empty(count // self.block, dtype=torch.float32) for _ in range(2)]
        moments = [weight.new_empty(count, dtype=torch.float32) for _ in range(2)]
        codes = [weight.new_empty(count, dtype=torch.int64) for _ in range(2 if self.bits == 4 else 0)]
        for each in (moments, codes, scales):
            del each[:1]

    def _made(self, weight: Tensor) -> dict[str, Any]:
        return self._state(weight, "exp_avg") | self._state(weight, "exp_avg_sq")

    def _state(self, weight: Tensor, name: str) -> dict[str, Tensor]:
        count = weight.numel()
        if not self._is_packed(weight):
            return {name: torch.zeros_like(weight)}
        codes = weight.new_zeros(count * self.bits // 8, dtype=torch.uint8)
        scales = weight.new_zeros(count // self.block, dtype=torch.float32)
        table = weight.new_zeros(2**self.bits, dtype=torch.float32)
        return {f"{name}_codes": codes, f"{name}_scale": scales, f"{name}_qmap": table}


def managed_bytes(optimizer: str | None, entries: int) -> int:
    """Of managed memory, for a weight of so many entries."""
    kind = OF_BITSANDBYTES.get(optimizer or "", {})
    return entries * kind["states"] * kind["bits"] // 8 if kind.get("paged") and entries >= FEWEST_PAGED else 0


def by_shapes(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer of that name without its package, and what it is made with."""
    return (CompiledStates, OF_TORCHAO[name]) if name in OF_TORCHAO else (SmallStates, OF_BITSANDBYTES[name])
