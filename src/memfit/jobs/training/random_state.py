"""The random numbers of a process as they stand, so that a step can be run again with the very same ones."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RandomState:
    python: Any
    cpu: torch.Tensor
    gpu: torch.Tensor | None

    @classmethod
    def capture(cls) -> RandomState:
        gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return cls(random.getstate(), torch.get_rng_state(), gpu)

    def restore(self) -> None:
        random.setstate(self.python)
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu)
