"""How a plan was made: what of the job was traced, and from what the rest of it is known.

    traced          all of it
    extended        a part of its blocks, steps, tokens or micro-batches, which the others repeat
    interpolated    at other batch sizes and lengths, between which this one lies

A trace that was read from the cache was made in one of the first two ways, at another time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Way = Literal["traced", "extended", "interpolated"]
SHARES = {"blocks": "blocks", "steps": "steps", "tokens": "new tokens", "micro_batches": "micro-batches"}
"""Of what a share is kept, and how it is called."""


class TracedShare(NamedTuple):
    """How many of a job's blocks, steps or others were traced."""

    traced: int
    all: int


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """A share is None where all of them were traced, or where the job has none."""

    blocks: TracedShare | None = None
    steps: TracedShare | None = None
    """Of the optimizer, those of the probe included."""
    tokens: TracedShare | None = None
    micro_batches: TracedShare | None = None
    shapes: int | None = None
    """How many batch sizes and lengths it was interpolated between."""
    cached: bool = False

    @property
    def way(self) -> Way:
        if self.shapes is not None:
            return "interpolated"
        return "extended" if self._parts() else "traced"

    def in_words(self) -> str:
        *first, last = self._parts() or [""]
        parts = f"{', '.join(first)}{' and ' if first else ''}{last}"
        if self.shapes is not None:
            told = f"interpolated between {self.shapes} traced batch sizes and lengths"
            return f"{told}, each from {parts}" if parts else told
        told = f"extended from {parts}: the others repeat them" if parts else "traced whole"
        return f"read from the cache: {told}" if self.cached else told

    def to_json(self) -> dict[str, Any]:
        shares = {name: share and share._asdict() for name in SHARES for share in (getattr(self, name),)}
        return {"way": self.way, "cached": self.cached, **shares, "shapes": self.shapes}

    def facts(self) -> dict[str, Any]:
        """What the cache keeps of it."""
        return {name: getattr(self, name) for name in SHARES if getattr(self, name) is not None}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Provenance:
        """From a file, so nothing is believed unread: raises ValueError or TypeError."""
        shares = {str(name): TracedShare(*map(int, share)) for name, share in facts.items()}
        if not set(shares) <= set(SHARES) or any(not 0 < share.traced < share.all for share in shares.values()):
            raise ValueError(f"impossible shares: {shares}")
        return cls(**shares, cached=True)  # type: ignore[arg-type]

    def _parts(self) -> list[str]:
        shares = {word: getattr(self, name) for name, word in SHARES.items()}
        return [f"{share.traced} of {share.all} {word}" for word, share in shares.items() if share is not None]
