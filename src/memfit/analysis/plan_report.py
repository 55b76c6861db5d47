"""What a replayed trace says: the peak, what was alive at it, the phases. Plain data; others write it out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from memfit.replay.events import CATEGORIES, Action, Mark, Trace
from memfit.replay.replay import Timeline

QUIET_PHASES = ("data", "zero", "")
"""Between the phases people think in: batches are made and gradients dropped there."""
MODULES_REMEMBERED = 1 << 16
Ints = npt.NDArray[np.int64]


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
    live = _live_at(trace, peak)
    sizes = np.frombuffer(timeline.block_size, dtype=np.int64)[live]
    categories = _categories(trace)[np.frombuffer(trace.category_of, dtype=np.int32)[live]]
    breakdown = {name: int(sizes[categories == i].sum()) for i, name in enumerate(CATEGORIES)}
    assert sum(breakdown.values()) == timeline.peak_allocated, "the parts do not add up to the peak"
    at = timeline.peak_reserved_event
    return Report(
        origin=trace.origin,
        peak_allocated=timeline.peak_allocated,
        peak_reserved=timeline.peak_reserved,
        at_peak=moment(trace, peak),
        breakdown=breakdown,
        largest=_largest(trace, live, sizes, categories, largest),
        phases=tuple(_phases(trace, timeline)),
        idle_at_reserved_peak=timeline.reserved[at] - timeline.allocated[at] if at >= 0 else 0,
    )


def _categories(trace: Trace) -> Ints:
    """For each name of the trace, the number of the category that it is."""
    number = {name: i for i, name in enumerate(CATEGORIES)}
    return np.array([number.get(name, number["other"]) for name in trace.names], dtype=np.int64)


def live_blocks(trace: Trace, event: int) -> list[int]:
    """Blocks allocated at or before an event and not freed by then."""
    return [int(block) for block in _live_at(trace, event)]


def _live_at(trace: Trace, event: int) -> Ints:
    actions, subjects = np.frombuffer(trace.actions, np.uint8), np.frombuffer(trace.subjects, np.int64)
    alive = np.frombuffer(trace.requested, dtype=np.int64) > 0
    alive[subjects[actions == Action.ALLOC]] = False  # the others were there before
    actions, subjects = actions[: event + 1], subjects[: event + 1]
    told = np.isin(actions, (Action.ALLOC, Action.FREE, Action.FREE_REQUESTED))
    alive[subjects[told]] = actions[told] == Action.ALLOC
    return np.flatnonzero(alive)


def moment(trace: Trace, event: int) -> Moment:
    marks = np.flatnonzero(np.frombuffer(trace.actions, np.uint8)[: event + 1] == Action.MARK)
    mark = trace.marks[trace.subjects[marks[-1]]] if len(marks) else Mark("", 0)
    allocates = 0 <= event < len(trace) and trace.actions[event] == Action.ALLOC
    block = trace.subjects[event] if allocates else None
    module, op = ("", "") if block is None else (trace.module(block), trace.op(block))
    return Moment(event, mark.phase, mark.step, module, op)


def _largest(trace: Trace, live: Ints, sizes: Ints, categories: Ints, count: int) -> tuple[LiveGroup, ...]:
    """By size; of the same size, in the order of their names."""
    names = len(trace.names)
    modules, ops = (np.frombuffer(column, dtype=np.int32)[live] for column in (trace.module_of, trace.op_of))
    alike, which = np.unique((categories * names + modules) * names + ops, return_inverse=True)
    totals, blocks = np.zeros(len(alike), dtype=np.int64), np.bincount(which, minlength=len(alike))
    np.add.at(totals, which, sizes)
    groups: dict[tuple[str, str, str], tuple[int, int]] = {}
    for place, number, total in zip(alike.tolist(), blocks.tolist(), totals.tolist(), strict=True):
        rest, op = divmod(place, names)
        category, module = divmod(rest, names)
        key = CATEGORIES[category], any_layer(trace.names[module]), trace.names[op]
        others, bytes_of_others = groups.get(key, (0, 0))
        groups[key] = others + number, bytes_of_others + total
    in_order = sorted(groups.items(), key=lambda group: (-group[1][1], group[0]))
    return tuple(LiveGroup(*key, *figures) for key, figures in in_order[:count])


@lru_cache(maxsize=MODULES_REMEMBERED)
def any_layer(module: str) -> str:
    """`model.layers.7.mlp` is `model.layers.*.mlp`: what repeats in every block is one thing."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def _phases(trace: Trace, timeline: Timeline) -> Iterator[PhasePeak]:
    """Micro-batches of one step are one phase; the peak counts from what is allocated when it begins."""
    starts = np.flatnonzero(np.frombuffer(trace.actions, np.uint8) == Action.MARK).tolist()
    held, kept = (np.frombuffer(column, dtype=np.int64) for column in (timeline.allocated, timeline.reserved))
    peaks: dict[Mark, tuple[int, int]] = {}
    for start, end in zip(starts, [*starts[1:], len(trace)][: len(starts)], strict=True):
        mark = trace.marks[trace.subjects[start]]
        if mark.phase in QUIET_PHASES:
            continue
        allocated, reserved = peaks.get(mark, (0, 0))
        peaks[mark] = (
            max(allocated, int(held[start:end].max())),
            max(reserved, int(kept[start:end].max())),
        )
    for mark, (allocated, reserved) in peaks.items():
        yield PhasePeak(mark.phase, mark.step, allocated, reserved)
