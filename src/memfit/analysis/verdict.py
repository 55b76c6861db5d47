"""Whether a job fits a card, said in one place: safe, tight or fails, and by how much.

What a card must have is what is reserved, CUDA's own (the context), and what the card may yet decide to take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.replay import Replays
from memfit.units import gib

Verdict = Literal["safe", "tight", "fails"]
MARGIN = 0.1
"""The share of a card that stays free where a job is called safe, unless another is asked for."""
RANGE = "padded products"
"""Among the facts of a trace: bytes at the peak without and with them, where the card decides."""
SMALLEST_PRECISION = 512
"""The smallest card is found to one part in so many: each step of the search replays the whole job."""


def judge(use_bytes: float | None, capacity: int, margin: float = MARGIN) -> Verdict:
    """`use_bytes`: what the job takes of what it may use, context included; None where memory runs out.

    >>> judge(90, 100), judge(91, 100), judge(91, 100, margin=0.05), judge(None, 100)
    ('safe', 'tight', 'safe', 'fails')
    """
    if use_bytes is None:
        return "fails"
    return "safe" if use_bytes <= (1 - margin) * capacity else "tight"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a replay with the card's capacity came to."""

    capacity_bytes: int
    """Of the card, what the process may use."""
    verdict: Verdict
    device_bytes: int
    """The most that it held, where it fails before it did."""
    retries: int
    failed_at: str | None = None


def needed_with_room(replays: Replays, context: int) -> int:
    """Where torch need not give anything back."""
    return replays.ample.peak_reserved + _beside(replays, context)


def fit_card(replays: Replays, card_bytes: int, context: int, margin: float = MARGIN) -> Fit:
    capacity, beside = capacity_for(card_bytes, replays.config, context), _beside(replays, context)
    limited = replays.outcome(max(capacity - beside, 0))
    device, failed, trace = limited.reserved_peak + beside, limited.oom, replays.trace
    return Fit(
        capacity_bytes=capacity,
        verdict=judge(None if failed else device, capacity, margin),
        device_bytes=device,
        retries=limited.retries,
        failed_at=f"{trace.module(failed.block)} {trace.op(failed.block)}".strip() if failed else None,
    )


def smallest_card(replays: Replays, context: int) -> int:
    """On which the job runs, perhaps with cached memory given back."""
    precision = replays.ample.peak_reserved // SMALLEST_PRECISION
    return replays.smallest_capacity(within=precision) + _beside(replays, context)


def _beside(replays: Replays, context: int) -> int:
    """What a card must have beside the replayed job."""
    ends = replays.trace.facts.get(RANGE)
    return context if ends is None else context + _undecided(ends)


def _undecided(ends: Mapping[str, Any]) -> int:
    """The job that is replayed is that of one end. The other may reserve more, a mixture may have more allocated."""
    planned, names = ends["planned"], ("unpadded_reserved_bytes", "padded_reserved_bytes")
    allocated = ends["most_bytes"] - ends[f"{planned}_bytes"]
    return int(max(allocated, max(ends[name] for name in names) - ends[f"{planned}_reserved_bytes"]))


def capacity_for(card_bytes: int, config: AllocatorConfig, context: int) -> int:
    """Of the card, what the process may use: `per_process_memory_fraction` limits what is reserved."""
    limit = config.limit_on(card_bytes)
    return card_bytes if limit is None else min(card_bytes, limit + context)


def card_document(name: str, card_bytes: int, fit: Fit | None) -> dict[str, Any]:
    """As documents show the card: `usable_bytes` where the process may not use all of it."""
    document: dict[str, Any] = {"name": name, "capacity_bytes": card_bytes}
    if fit is not None and fit.capacity_bytes < card_bytes:
        document["usable_bytes"] = fit.capacity_bytes
    return document


def limit_note(capacity: int) -> str:
    return f"per_process_memory_fraction leaves {gib(capacity)} of the card to the process"
