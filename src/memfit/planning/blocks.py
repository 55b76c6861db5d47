"""Which part of a model repeats, and proof that it does.

The proof is on the model itself, built without memory: every block has the same modules, with the same settings and
weights, as the block one period before it. A setting that differs and is not the block's own number breaks the
pattern, whether or not it would change memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from memfit.core.repeat import UNITS
from memfit.models.block_list import block_list
from memfit.models.registry import ModelSource, build_model, parameter_count, resolve

MAX_PERIOD = 8
PLAIN = (bool, int, float, str, type(None))
OWN_NUMBER = ("layer_idx", "layer_id", "block_idx")


@dataclass(frozen=True)
class Blocks:
    path: str
    count: int
    period: int
    unit_parameters: int = field(default=0, compare=False)
    """Parameters of one period of blocks."""

    @property
    def units(self) -> int:
        """Periods; the last of them may be cut short."""
        return -(-self.count // self.period)

    @property
    def traced(self) -> int:
        """How many blocks to trace: three periods, and the last one as it is."""
        return self.count - (self.units - UNITS) * self.period

    @property
    def worthwhile(self) -> bool:
        return self.units > UNITS


def find_blocks(model: nn.Module) -> Blocks | None:
    """The list of blocks, if it has a period."""
    found = block_list(model)
    if found is None:
        return None
    path, blocks = found
    kinds = [_kind(block) for block in blocks]
    period = next((p for p in range(1, MAX_PERIOD + 1) if kinds[1 + p :] == kinds[1:-p]), None)
    if period is None:
        return None
    unit = sum(p.numel() for block in list(blocks)[period : 2 * period] for p in block.parameters())
    return Blocks(path, len(blocks), period, unit)


def _kind(block: nn.Module) -> tuple[Any, ...]:
    return tuple(_facts(name, module) for name, module in block.named_modules())


def _facts(name: str, module: nn.Module) -> tuple[Any, ...]:
    settings = tuple((k, v) for k, v in vars(module).items() if isinstance(v, PLAIN) and k not in OWN_NUMBER)
    weights = tuple((k, tuple(p.shape), p.dtype) for k, p in module._parameters.items() if p is not None)
    buffers = tuple((k, tuple(b.shape), b.dtype) for k, b in module._buffers.items() if b is not None)
    return name, type(module), settings, weights, buffers


def blocks_of(model: str, attention: str) -> tuple[Blocks | None, int]:
    """The blocks and the number of parameters of a model by name, from its full size built without memory."""
    source = resolve(model)
    changed = os.stat(source.target).st_mtime_ns if os.path.exists(source.target) else 0
    return _blocks_of(source, attention, changed)


@lru_cache(maxsize=128)
def _blocks_of(source: ModelSource, attention: Any, changed: int) -> tuple[Blocks | None, int]:
    with torch.device("meta"):
        built = build_model(source, dtype=torch.bfloat16, attention=attention)
    if getattr(getattr(built, "config", None), "rescale_every", None):
        return None, parameter_count(built)  # RWKV: what a block does depends on its number, which no module shows
    return find_blocks(built), parameter_count(built)
