"""One thing to do about it. A saving is there only if it was predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Basis = Literal["predicted", "message", "arithmetic", "words"]
"""On this very job; a fact in the message; arithmetic on its numbers; or general, without a figure."""


@dataclass(frozen=True, kw_only=True)
class Fix:
    name: str
    says: str
    basis: Basis
    cost: str | None = None
    """free, time, precision or experiment."""
    price: str | None = None
    saved_bytes: int | None = None
    after_bytes: int | None = None
    """What the device would hold at the peak."""
    verdict: str | None = None
    """Whether the job then fits on this card."""
    changes: Mapping[str, object] = field(default_factory=dict)
    """Settings of the job that it changes, and to what; none where it is only words."""
    how: Mapping[str, str] = field(default_factory=dict)


def in_words(name: str, says: str, *, basis: Basis = "words", **how: str) -> Fix:
    return Fix(name=name, says=says, basis=basis, how=how)
