"""What is alive at a moment by any name, what lies idle, what comes and goes, what grows step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.analysis.labels import ALL_CATEGORIES, Labels, Phase, phase_numbers
from memfit.analysis.summary import groups
from memfit.events import Action
from memfit.replay.timeline import BEFORE, Ints, Timeline


@dataclass(frozen=True, slots=True)
class Share:
    """All blocks that have one name in common."""

    name: str
    count: int
    allocated_bytes: int
    category: str  # of most of its bytes


def shares(
    timeline: Timeline, labels: Labels, blocks: Ints, names: Sequence[str], number: Ints, *, limit: int = 20
) -> tuple[Share, ...]:
    """The largest groups first. Blocks whose name is empty are a group of their own, with an empty name."""
    found = [(int(timeline.size[alike].sum()), int(number[alike[0]]), alike) for alike in groups(blocks, number)]
    found.sort(key=lambda each: (-each[0], each[1]))
    return tuple(
        Share(names[i], len(alike), total, _main_category(timeline, labels, alike)) for total, i, alike in found[:limit]
    )


def _main_category(timeline: Timeline, labels: Labels, blocks: Ints) -> str:
    totals = np.bincount(labels.category[blocks], weights=timeline.size[blocks], minlength=len(ALL_CATEGORIES))
    return ALL_CATEGORIES[int(totals.argmax())]


def by_line(timeline: Timeline, labels: Labels, blocks: Ints, *, limit: int = 20) -> tuple[Share, ...]:
    return shares(timeline, labels, blocks, labels.lines, labels.line, limit=limit)


def by_module(timeline: Timeline, labels: Labels, blocks: Ints, *, limit: int = 20) -> tuple[Share, ...]:
    """What repeats in every layer is one module."""
    return shares(timeline, labels, blocks, *labels.modules_anywhere(blocks), limit=limit)


def by_op(timeline: Timeline, labels: Labels, blocks: Ints, *, limit: int = 20) -> tuple[Share, ...]:
    return shares(timeline, labels, blocks, labels.ops, labels.op, limit=limit)


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


def temporaries(
    timeline: Timeline, labels: Labels, names: Sequence[str], number: Ints, *, limit: int = 15
) -> tuple[Temporary, ...]:
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
    order = np.lexsort((-total, -at_once))[:limit]
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
        survivors = (by_line if labels.stacks else by_module)(timeline, labels, blocks, limit=8)
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
