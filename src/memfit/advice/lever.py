"""A change to a job's settings that can save memory, and what a person should know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Cost = Literal["free", "time", "precision", "experiment"]
COSTS: tuple[Cost, ...] = ("free", "time", "precision", "experiment")
"""In this order of preference."""

CACHED = "cached"
"""What the allocator holds beyond the tensors that are alive: no category of a breakdown, but a lever lowers it."""
SAME = "same results but for rounding"


@dataclass(frozen=True, kw_only=True)
class Lever:
    name: str
    cost: Cost
    settings: Mapping[str, object]
    """Changes to the workload."""
    says: str
    """What it does."""
    price: str
    """What it costs."""
    how: Mapping[str, str]
    """How to switch it on in `memfit`, in the Hugging Face `trainer`, with `accelerate`."""
    risk: str = SAME
    """To the quality of the result."""
    group: str
    """Levers of one group replace each other, and each saves more than the one before it."""
    lowers: tuple[str, ...]
    """Categories of what is alive that it can lower: where the peak has none of these it cannot help."""
    only_in: str | None = None
    """The phase that it changes, where it is a single one."""
    missing: str | None = None
    """A package that it needs and that is not there."""
