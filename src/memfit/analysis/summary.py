"""What a run comes to: its peak and phases, what is alive at a moment by any name, what lies idle, what grows.

The same for plans, recordings and the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from memfit.analysis.labels import ALL_CATEGORIES, QUIET_PHASES, Labels, Phase, phase_numbers
from memfit.analysis.stacks import labels_of_trace
from memfit.events import CATEGORIES, Action
from memfit.replay.timeline import BEFORE, Ints, Timeline

LARGEST = 12
MOST_TEMPORARIES = 15


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


@dataclass(frozen=True, slots=True)
class Share:
    """All blocks that have one name in common."""

    name: str
    count: int
    allocated_bytes: int
    category: str  # of most of its bytes


def shares(
    timeline: Timeline, labels: Labels, blocks: Ints, by: Literal["line", "module", "op"], *, limit: int = 20
) -> tuple[Share, ...]:
    """The largest groups first; what repeats in every layer is one module. Blocks whose name is empty are a group of
    their own, with an empty name."""
    columns = {"line": (labels.lines, labels.line), "op": (labels.ops, labels.op)}
    names, number = labels.modules_anywhere(blocks) if by == "module" else columns[by]
    found = [(int(timeline.size[alike].sum()), int(number[alike[0]]), alike) for alike in groups(blocks, number)]
    found.sort(key=lambda each: (-each[0], each[1]))
    return tuple(
        Share(names[i], len(alike), total, _main_category(timeline, labels, alike)) for total, i, alike in found[:limit]
    )


def _main_category(timeline: Timeline, labels: Labels, blocks: Ints) -> str:
    totals = np.bincount(labels.category[blocks], weights=timeline.size[blocks], minlength=len(ALL_CATEGORIES))
    return ALL_CATEGORIES[int(totals.argmax())]


def there_before(timeline: Timeline, blocks: Ints) -> dict[str, int]:
    """Of these blocks, how many and how many bytes have no beginning in the trace."""
    old = blocks[timeline.lives.birth[blocks] == BEFORE]
    return {"count": len(old), "allocated_bytes": int(timeline.size[old].sum())}


def largest(timeline: Timeline, blocks: Ints, count: int | None = None) -> Ints:
    """The largest of these blocks; of equal ones, the older first."""
    order = np.lexsort((timeline.lives.birth[blocks], -timeline.size[blocks]))
    return blocks[order[:count]]


def largest_kinds(timeline: Timeline, labels: Labels, blocks: Ints, count: int) -> list[Ints]:
    """The largest blocks, those of one size and from one place together: twelve equal layers are one line to read."""
    _, module = labels.modules_anywhere(blocks)
    in_order = largest(timeline, blocks)
    return groups(in_order, timeline.size, labels.line, module, labels.op, labels.category)[:count]


@dataclass(frozen=True, slots=True)
class Idle:
    event: int
    reserved_bytes: int
    allocated_bytes: int
    waiting_bytes: int  # freed, but another stream may still use it
    idle_bytes: int
    holes: int  # pieces that the idle bytes are in
    largest_hole_bytes: int  # no request above this could be served without new memory
    releasable_bytes: int  # whole segments without a live block: `empty_cache` gives these back
    rounding_bytes: int  # in live blocks, beyond what was asked for


def idle_at(timeline: Timeline, event: int) -> Idle | None:
    """How memory lies once an event has happened; None where that is not known."""
    reserved, address = timeline.reserved_at(event), timeline.address
    if reserved is None or address is None:
        return None
    held = timeline.lives.held_at(event)
    alive = timeline.lives.alive_at(event)
    held = held[timeline.size[held] > 0]
    order = np.argsort(address[held], kind="stable")
    begins, lengths = address[held][order].tolist(), timeline.size[held][order].tolist()
    holes: list[int] = []
    releasable = at = 0
    for start, end, _ in timeline.ranges_at(event):
        cursor, first = start, at
        while at < len(begins) and begins[at] < end:
            if begins[at] >= start:
                if begins[at] > cursor:
                    holes.append(begins[at] - cursor)
                cursor = max(cursor, begins[at] + lengths[at])
            at += 1
        if cursor < end:
            holes.append(end - cursor)
            if first == at:
                releasable += end - start
    requested = np.frombuffer(timeline.trace.requested, dtype=np.int64)[alive]
    allocated = int(timeline.size[alive].sum())
    waiting = int(timeline.size[held].sum()) - allocated
    return Idle(
        event=event,
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        waiting_bytes=waiting,
        idle_bytes=reserved - allocated - waiting,
        holes=len(holes),
        largest_hole_bytes=max(holes, default=0),
        releasable_bytes=releasable,
        rounding_bytes=allocated - int(requested.sum()),
    )


@dataclass(frozen=True, slots=True)
class Temporary:
    name: str
    at_once_bytes: int  # the most that was alive at one moment
    largest_bytes: int
    count: int
    total_bytes: int  # of all of them, one after the other


def temporaries(timeline: Timeline, labels: Labels, names: Sequence[str], number: Ints) -> tuple[Temporary, ...]:
    """By op (`labels.ops`, `labels.op`) or by line of code; the ones that need most at once first."""
    blocks = short_lived(timeline, labels)
    blocks = blocks[timeline.size[blocks] > 0]
    if not len(blocks):
        return ()
    which, size = number[blocks], timeline.size[blocks]
    at_once = _most_at_once(which, timeline.lives.birth[blocks], timeline.lives.death[blocks], size, len(names))
    count = np.bincount(which, minlength=len(names))
    total = np.zeros(len(names), dtype=np.int64)
    np.add.at(total, which, size)
    biggest = np.zeros(len(names), dtype=np.int64)
    np.maximum.at(biggest, which, size)
    order = np.lexsort((-total, -at_once))[:MOST_TEMPORARIES]
    return tuple(
        Temporary(names[i], int(at_once[i]), int(biggest[i]), int(count[i]), int(total[i]))
        for i in order.tolist()
        if count[i]
    )


def short_lived(timeline: Timeline, labels: Labels) -> Ints:
    """Blocks that end in the phase in which they begin; where no phases are known, the whole run is one."""
    birth, death = timeline.lives.birth, timeline.lives.death
    ends = (birth != BEFORE) & (death < _end(timeline))
    if labels.phases:
        ends &= phase_numbers(labels.phases, birth) == phase_numbers(labels.phases, death)
    return np.flatnonzero(ends)


def _end(timeline: Timeline) -> int:
    """What an error makes a program let go of is not temporary."""
    failed = np.flatnonzero(np.frombuffer(timeline.trace.actions, dtype=np.uint8) == Action.OOM)
    return int(failed[0]) if len(failed) else len(timeline.trace)


def _most_at_once(which: Ints, birth: Ints, death: Ints, size: Ints, groups: int) -> Ints:
    """For each group the highest sum of what is alive: all groups in one sweep, for they lie one behind the other."""
    group = np.concatenate((which, which))
    event = np.concatenate((birth, death))
    change = np.concatenate((size, -size))
    order = np.lexsort((event, group))
    running = np.cumsum(change[order])  # every group ends at the sum it began with: each block is freed again
    most = np.zeros(groups, dtype=np.int64)
    np.maximum.at(most, group[order], running)
    return most


SETTLED = 2  # the first step makes what stays: optimizer state, workspaces


@dataclass(frozen=True, slots=True)
class StepMemory:
    step: int
    begin: int
    end: int
    peak_bytes: int
    left_bytes: int  # allocated when it ends


@dataclass(frozen=True, slots=True)
class StepGrowth:
    steps: tuple[StepMemory, ...]
    per_step_bytes: int | None  # what each step after the second leaves behind, in the middle; None if too few
    grows: bool | None  # whether every step after the second left more than the one before
    survivors: tuple[Share, ...]  # made in those steps and never freed


def growth(timeline: Timeline, labels: Labels) -> StepGrowth:
    steps = tuple(_steps(timeline, labels.phases))
    later = [step.left_bytes for step in steps if step.step >= SETTLED]
    changes = np.diff(later)
    if len(changes) < 2:
        return StepGrowth(steps, None, None, ())
    grows = bool((changes > 0).all())
    survivors: tuple[Share, ...] = ()
    if grows:
        begin = next(step.end for step in steps if step.step >= SETTLED)
        blocks = _survivors(timeline, begin, steps[-1].end)
        survivors = shares(timeline, labels, blocks, "line" if labels.stacks else "module", limit=8)
    return StepGrowth(steps, int(np.median(changes)), grows, survivors)


def _steps(timeline: Timeline, phases: tuple[Phase, ...]) -> list[StepMemory]:
    found: dict[int, tuple[int, int]] = {}
    for phase in phases:
        if phase.step > 0:
            begin, _ = found.get(phase.step, (phase.begin, 0))
            found[phase.step] = begin, phase.end
    complete = {phase.step for phase in phases if phase.name in ("step", "backward")}
    return [
        StepMemory(step, begin, end, int(timeline.allocated[begin:end].max()), timeline.allocated_at(end - 1))
        for step, (begin, end) in found.items()
        if begin < end and step in complete
    ]


def _survivors(timeline: Timeline, begin: int, end: int) -> Ints:
    birth, death = timeline.lives.birth, timeline.lives.death
    return np.flatnonzero((birth != BEFORE) & (birth >= begin) & (birth < end) & (death >= end))
