"""The optimizers of bitsandbytes and torchao as a plan sees them: states of 8 or 4 bits, or in managed memory.

Shapes only. After bitsandbytes 0.50 (optim/optimizer.py): small weights have fp32 states, and a paged optimizer keeps
states of many entries where neither torch's allocator nor its statistics see them. After torchao 0.18 (optim/adam.py):
weights that are small, or no whole number of blocks, have states of their own type; its step is one compiled kernel for
each shape of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

FEWEST_IN_8_BITS = 4096
FEWEST_PAGED = 100_000
BLOCK = 256
KINDS: dict[str, dict[str, Any]] = {
    "adamw-8bit": {"states": 2, "bits": 8, "paged": False},
    "paged-adamw-8bit": {"states": 2, "bits": 8, "paged": True},
    "paged-adamw": {"states": 2, "bits": 32, "paged": True},
    "lion-8bit": {"states": 1, "bits": 8, "paged": False},
}
OF_TORCHAO: dict[str, dict[str, Any]] = {
    "adamw-8bit-torchao": {"bits": 8, "block": 256},
    "adamw-4bit-torchao": {"bits": 4, "block": 128},
}


class SmallStates(torch.optim.Optimizer):
    def __init__(
        self, params: Any, *, states: int, bits: int, paged: bool, whole: Collection[int] = (), **defaults: Any
    ) -> None:
        """`whole`: weights, by identity, whose states have 32 bits all the same."""
        super().__init__(params, defaults)
        self.states, self.bits, self.paged, self.whole = states, bits, paged, whole
        self.tables: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and not self.state[weight]:
                    self.state[weight] = self._made(weight)
                if weight.grad is not None:
                    weight.grad = weight.grad.contiguous()
        return None if closure is None else closure()

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


class CompiledStates(torch.optim.Optimizer):
    """torchao's: `OptimState8bit` and `OptimState4bit`."""

    def __init__(self, params: Any, *, bits: int, block: int, **defaults: Any) -> None:
        super().__init__(params, defaults)
        self.bits, self.block = bits, block

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if not self.state[weight]:
                    self.state[weight] = self._made(weight, "exp_avg") | self._made(weight, "exp_avg_sq")
                if self._is_packed(weight):
                    self._update(weight)
        return None if closure is None else closure()

    def _is_packed(self, weight: Tensor) -> bool:
        return weight.numel() >= FEWEST_IN_8_BITS and weight.numel() % self.block == 0

    def _update(self, weight: Tensor) -> None:
        """What the compiled kernels of torch 2.11 hand to each other: scales and moments of both states, and in 4 bits
        the codes before two of them share a byte."""
        count = weight.numel()
        scales = [weight.new_empty(count // self.block, dtype=torch.float32) for _ in range(2)]
        moments = [weight.new_empty(count, dtype=torch.float32) for _ in range(2)]
        codes = [weight.new_empty(count, dtype=torch.int64) for _ in range(2 if self.bits == 4 else 0)]
        for each in (moments, codes, scales):
            del each[:1]

    def _made(self, weight: Tensor, name: str) -> dict[str, Tensor]:
        count = weight.numel()
        if not self._is_packed(weight):
            return {name: torch.zeros_like(weight)}
        codes = weight.new_zeros(count * self.bits // 8, dtype=torch.uint8)
        scales = weight.new_zeros(count // self.block, dtype=torch.float32)
        table = weight.new_zeros(2**self.bits, dtype=torch.float32)
        return {f"{name}_codes": codes, f"{name}_scale": scales, f"{name}_qmap": table}


def managed_bytes(optimizer: str | None, entries: int) -> int:
    """Of managed memory, for a weight of so many entries."""
    kind = KINDS.get(optimizer or "", {})
    return entries * kind["states"] * kind["bits"] // 8 if kind.get("paged") and entries >= FEWEST_PAGED else 0


def by_shapes(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer of that name without its package, and what it is made with."""
    return (CompiledStates, OF_TORCHAO[name]) if name in OF_TORCHAO else (SmallStates, KINDS[name])
