"""The optimizers of bitsandbytes as a plan sees them: states of 8 bits with their scales, or in managed memory.

Shapes only, after bitsandbytes 0.50 (optim/optimizer.py): small weights have fp32 states, and a paged optimizer keeps
states of many entries where neither torch's allocator nor its statistics see them.
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
