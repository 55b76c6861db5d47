"""What a replayed trace says: the peak, what was alive at it, the phases. Plain data; others write it out."""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from memfit.core.events import CATEGORIES, Action, Mark, Trace
from memfit.core.replay import Timeline

QUIET_PHASES = ("data", "zero", "")
"""Between the phases people think in: batches are made and gradients dropped there."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Where the job is when an event happens."""

    event: int
    phase: str
    step: int
    module: str
    op: str


@dataclass(frozen=True, slots=True)
class PhasePeak:
    name: str
    step: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """Blocks alive at the peak that came from one place."""

    category: str
    module: str
    op: str
    count: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    origin: str
    peak_allocated: int
    peak_reserved: int
    at_peak: Moment
    breakdown: dict[str, int]
    """By category, all of them; they sum to the allocated peak exactly."""
    largest: tuple[LiveGroup, ...]
    phases: tuple[PhasePeak, ...]
    idle_at_reserved_peak: int
    """Bytes held from the driver but free inside the allocator when it held most."""


def make_report(trace: Trace, timeline: Timeline, *, largest: int = 12) -> Report:
    peak = timeline.peak_allocated_event
    live = live_blocks(trace, peak)
    sizes = timeline.block_size
    breakdown = dict.fromkeys(CATEGORIES, 0)
    for block in live:
        breakdown[category_of(trace, block)] += sizes[block]
    assert sum(breakdown.values()) == timeline.peak_allocated, "the parts do not add up to the peak"
    at = timeline.peak_reserved_event
    return Report(
        origin=trace.origin,
        peak_allocated=timeline.peak_allocated,
        peak_reserved=timeline.peak_reserved,
        at_peak=moment(trace, peak),
        breakdown=breakdown,
        largest=_largest(trace, live, sizes, largest),
        phases=tuple(_phases(trace, timeline)),
        idle_at_reserved_peak=timeline.reserved[at] - timeline.allocated[at] if at >= 0 else 0,
    )


def category_of(trace: Trace, block: int) -> str:
    name = trace.category(block)
    return name if name in CATEGORIES else "other"


def live_blocks(trace: Trace, event: int) -> list[int]:
    """Blocks allocated at or before an event and not freed by then."""
    born = {s for a, s in trace.events() if a == Action.ALLOC}
    live = {block for block in range(len(trace.requested)) if block not in born and trace.requested[block]}
    for action, subject in zip(trace.actions[: event + 1], trace.subjects[: event + 1], strict=True):
        if action == Action.ALLOC:
            live.add(subject)
        elif action in (Action.FREE, Action.FREE_REQUESTED):
            live.discard(subject)
    return sorted(live)


def moment(trace: Trace, event: int) -> Moment:
    mark = Mark("", 0)
    for action, subject in zip(trace.actions[: event + 1], trace.subjects[: event + 1], strict=True):
        if action == Action.MARK:
            mark = trace.marks[subject]
    allocates = 0 <= event < len(trace) and trace.actions[event] == Action.ALLOC
    block = trace.subjects[event] if allocates else None
    module, op = ("", "") if block is None else (trace.module(block), trace.op(block))
    return Moment(event, mark.phase, mark.step, module, op)


def _largest(trace: Trace, live: list[int], sizes: array[int], count: int) -> tuple[LiveGroup, ...]:
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for block in live:
        groups[category_of(trace, block), any_layer(trace.module(block)), trace.op(block)].append(sizes[block])
    made = [LiveGroup(*key, len(found), sum(found)) for key, found in groups.items()]
    return tuple(sorted(made, key=lambda group: -group.allocated_bytes)[:count])


def any_layer(module: str) -> str:
    """`model.layers.7.mlp` is `model.layers.*.mlp`: what repeats in every block is one thing."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def _phases(trace: Trace, timeline: Timeline) -> Iterator[PhasePeak]:
    """Micro-batches of one step are one phase; the peak counts from what is allocated when it begins."""
    starts = [i for i, action in enumerate(trace.actions) if action == Action.MARK]
    peaks: dict[Mark, tuple[int, int]] = {}
    for start, end in zip(starts, [*starts[1:], len(trace)][: len(starts)], strict=True):
        mark = trace.marks[trace.subjects[start]]
        if mark.phase in QUIET_PHASES:
            continue
        allocated, reserved = peaks.get(mark, (0, 0))
        peaks[mark] = (
            max(allocated, max(timeline.allocated[start:end])),
            max(reserved, max(timeline.reserved[start:end])),
        )
    for mark, (allocated, reserved) in peaks.items():
        yield PhasePeak(mark.phase, mark.step, allocated, reserved)
