"""What a run comes to: its peak, what is alive then, its phases; the same for plans, recordings and the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from memfit.analysis.labels import QUIET_PHASES, Labels, labels_of_trace
from memfit.events import CATEGORIES, Action
from memfit.replay.timeline import BEFORE, Ints, Timeline

LARGEST = 12


@dataclass(frozen=True, slots=True)
class Moment:
    """Where the job is when an event happens, and what it makes there."""

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
    reserved_bytes: int | None
    begin_event: int = field(default=BEFORE, compare=False)

    def to_json(self) -> dict[str, Any]:
        made = asdict(self)
        del made["begin_event"]
        return made


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """Blocks alive at the peak that came from one place."""

    category: str
    module: str
    op: str
    count: int
    allocated_bytes: int


@dataclass(frozen=True, eq=False)
class Summary:
    timeline: Timeline
    labels: Labels

    @cached_property
    def alive(self) -> Ints:
        """The blocks that are there at the peak."""
        return self.timeline.lives.alive_at(self.timeline.peak_event)

    @cached_property
    def breakdown(self) -> dict[str, int]:
        """By category, all of them; they sum to the allocated peak exactly."""
        parts = breakdown(self.timeline, self.labels, self.alive)
        assert sum(parts.values()) == self.timeline.peak_allocated, "the parts do not add up to the peak"
        return parts

    @cached_property
    def at_peak(self) -> Moment:
        return moment(self.timeline, self.labels, self.timeline.peak_event)

    @cached_property
    def phases(self) -> tuple[PhasePeak, ...]:
        return tuple(_phase_peaks(self.timeline, self.labels))

    @cached_property
    def largest(self) -> tuple[LiveGroup, ...]:
        """By size; of the same size, in the order of their names. What repeats in every layer is one group."""
        labels = self.labels
        modules, module = labels.modules_anywhere(self.alive)
        found = []
        for alike in groups(self.alive, labels.category, module, labels.op):
            category, op = labels.categories[labels.category[alike[0]]], labels.ops[labels.op[alike[0]]]
            nbytes = int(self.timeline.size[alike].sum())
            found.append(LiveGroup(category, modules[module[alike[0]]], op, len(alike), nbytes))
        found.sort(key=lambda group: (-group.allocated_bytes, group.category, group.module, group.op))
        return tuple(found[:LARGEST])


def summarise_plan(timeline: Timeline) -> Summary:
    """All of a plan is labelled: what has no category is of the category "other"."""
    return Summary(timeline, labels_of_trace(timeline, CATEGORIES))


def breakdown(timeline: Timeline, labels: Labels, blocks: Ints) -> dict[str, int]:
    """Bytes by category, all of them; they sum to what is allocated."""
    totals = np.zeros(len(labels.categories), dtype=np.int64)
    np.add.at(totals, labels.category[blocks], timeline.size[blocks])
    return dict(zip(labels.categories, totals.tolist(), strict=True))


def groups(blocks: Ints, *columns: Ints) -> list[Ints]:
    """Blocks that agree in all columns, in the order of the first of each group."""
    if not len(blocks):
        return []
    keys = [column[blocks] for column in columns]
    order = np.lexsort(keys)
    begins = np.zeros(len(blocks) - 1, dtype=bool)
    for key in keys:
        begins |= np.diff(key[order]) != 0
    pieces = np.split(order, np.flatnonzero(begins) + 1)
    return [blocks[piece] for piece in sorted(pieces, key=lambda piece: int(piece[0]))]


def moment(timeline: Timeline, labels: Labels, event: int) -> Moment:
    trace, phase = timeline.trace, labels.phase_at(event)
    name, step = (phase.name, phase.step) if phase else ("", 0)
    if event < 0 or trace.actions[event] != Action.ALLOC:
        return Moment(event, name, step, "", "")
    block = trace.subjects[event]
    return Moment(event, name, step, trace.module(block), trace.op(block))


def _phase_peaks(timeline: Timeline, labels: Labels) -> Iterator[PhasePeak]:
    """Micro-batches of one step are one phase; its peak counts from what is there when it begins."""
    peaks: dict[tuple[str, int], tuple[int, int, int]] = {}
    for phase in labels.phases:
        if phase.name in QUIET_PHASES:
            continue
        begin, before, inside = phase.begin, phase.begin - 1, slice(phase.begin, phase.end)
        allocated = max(timeline.allocated_at(before), int(timeline.allocated[inside].max(initial=0)))
        reserved = 0
        if timeline.reserved is not None:
            reserved = max(timeline.reserved_at(before) or 0, int(timeline.reserved[inside].max(initial=0)))
        if known := peaks.get((phase.name, phase.step)):
            allocated, reserved, begin = max(allocated, known[0]), max(reserved, known[1]), known[2]
        peaks[phase.name, phase.step] = allocated, reserved, begin
    for (name, step), (allocated, reserved, begin) in peaks.items():
        yield PhasePeak(name, step, allocated, None if timeline.reserved is None else reserved, begin)
