"""What is alive at a moment, and where it came from: totals by any label, and the largest allocations one by one.

Memory that is held from the driver but idle, and why it is of no use: cut up by live blocks, or simply free.

What an operator or a line of code needs for a moment: blocks made and gone within one phase.

Does memory grow from step to step, and which lines of code make it grow?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.analysis.course import BEFORE, Course, Ints
from memfit.analysis.labels import ALL_CATEGORIES, Labels, Phase, phase_numbers
from memfit.analysis.plan_report import any_layer
from memfit.replay.events import Action


@dataclass(frozen=True, slots=True)
class Share:
    """All blocks that have one name in common."""

    name: str
    count: int
    allocated_bytes: int
    category: str  # of most of its bytes


def breakdown(course: Course, labels: Labels, blocks: Ints) -> dict[str, int]:
    """Bytes by category, all of them; they sum to what is allocated."""
    totals = np.zeros(len(ALL_CATEGORIES), dtype=np.int64)
    np.add.at(totals, labels.category[blocks], course.size[blocks])
    return dict(zip(ALL_CATEGORIES, totals.tolist(), strict=True))


def shares(
    course: Course, labels: Labels, blocks: Ints, names: Sequence[str], number: Ints, *, limit: int = 20
) -> tuple[Share, ...]:
    """The largest groups first. Blocks whose name is empty are a group of their own, with an empty name."""
    size = course.size[blocks]
    total = np.zeros(len(names), dtype=np.int64)
    count = np.bincount(number[blocks], minlength=len(names))
    np.add.at(total, number[blocks], size)
    found = np.argsort(-total, kind="stable")[:limit]
    return tuple(
        Share(names[i], int(count[i]), int(total[i]), _main_category(course, labels, blocks[number[blocks] == i]))
        for i in found.tolist()
        if count[i]
    )


def _main_category(course: Course, labels: Labels, blocks: Ints) -> str:
    totals = np.bincount(labels.category[blocks], weights=course.size[blocks], minlength=len(ALL_CATEGORIES))
    return ALL_CATEGORIES[int(totals.argmax())]


def by_line(course: Course, labels: Labels, blocks: Ints, *, limit: int = 20) -> tuple[Share, ...]:
    return shares(course, labels, blocks, labels.lines, labels.line, limit=limit)


def by_module(course: Course, labels: Labels, blocks: Ints, *, limit: int = 20) -> tuple[Share, ...]:
    """What repeats in every layer is one module."""
    wanted = np.unique(labels.module[blocks])
    names: dict[str, int] = {}
    table = np.zeros(len(labels.modules), dtype=np.int64)
    for i in wanted.tolist():
        table[i] = names.setdefault(any_layer(labels.modules[i]), len(names))
    return shares(course, labels, blocks, tuple(names), table[labels.module], limit=limit)


def by_op(course: Course, labels: Labels, blocks: Ints, *, limit: int = 20) -> tuple[Share, ...]:
    return shares(course, labels, blocks, labels.ops, labels.op, limit=limit)


def there_before(course: Course, blocks: Ints) -> tuple[int, int]:
    """Of these blocks, how many and how many bytes have no beginning in the trace."""
    old = blocks[course.lives.birth[blocks] == BEFORE]
    return len(old), int(course.size[old].sum())


def largest(course: Course, blocks: Ints, count: int) -> Ints:
    """The largest of these blocks; of equal ones, the older first."""
    order = np.lexsort((course.lives.birth[blocks], -course.size[blocks]))
    return blocks[order[:count]]


def largest_kinds(course: Course, labels: Labels, blocks: Ints, count: int) -> list[Ints]:
    """The largest blocks, those of one size and from one place together: twelve equal layers are one line to read."""
    kinds: dict[tuple[int, int, str, int, int], list[int]] = {}
    smallest = 0
    for block in largest(course, blocks, len(blocks)).tolist():
        size = int(course.size[block])
        if len(kinds) == count and size < smallest:
            break
        module = any_layer(labels.modules[labels.module[block]])
        key = size, int(labels.line[block]), module, int(labels.op[block]), int(labels.category[block])
        if key in kinds:
            kinds[key].append(block)
        elif len(kinds) < count:
            kinds[key], smallest = [block], size
    return [np.array(found, dtype=np.int64) for found in kinds.values()]


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


def idle_at(course: Course, event: int) -> Idle | None:
    """How memory lies once an event has happened; None where that is not known."""
    reserved = course.reserved_at(event)
    if reserved is None:
        return None
    held = course.lives.held_at(event)
    alive = course.lives.alive_at(event)
    held = held[course.size[held] > 0]
    order = np.argsort(course.address[held], kind="stable")
    starts = course.address[held][order].astype(object) if _is_huge(course) else course.address[held][order]
    sizes = course.size[held][order]
    holes: list[int] = []
    releasable = at = 0
    begins = [int(start) for start in starts.tolist()]
    lengths = sizes.tolist()
    for start, end, _ in course.ranges_at(event):
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
    requested = np.frombuffer(course.trace.requested, dtype=np.int64)[alive]
    allocated = int(course.size[alive].sum())
    waiting = int(course.size[held].sum()) - allocated
    return Idle(
        event=event, reserved_bytes=reserved, allocated_bytes=allocated, waiting_bytes=waiting,
        idle_bytes=reserved - allocated - waiting, holes=len(holes), largest_hole_bytes=max(holes, default=0),
        releasable_bytes=releasable, rounding_bytes=allocated - int(requested.sum()),
    )  # fmt: skip


def _is_huge(course: Course) -> bool:
    return bool(len(course.address)) and int(course.address.max()) >= 1 << 63


@dataclass(frozen=True, slots=True)
class Temporary:
    name: str
    at_once_bytes: int  # the most that was alive at one moment
    largest_bytes: int
    count: int
    total_bytes: int  # of all of them, one after the other


def temporaries(
    course: Course, labels: Labels, names: Sequence[str], number: Ints, *, limit: int = 15
) -> tuple[Temporary, ...]:
    """By op (`labels.ops`, `labels.op`) or by line of code; the ones that need most at once first."""
    blocks = short_lived(course, labels)
    blocks = blocks[course.size[blocks] > 0]
    if not len(blocks):
        return ()
    which, size = number[blocks], course.size[blocks]
    at_once = _most_at_once(which, course.lives.birth[blocks], course.lives.death[blocks], size, len(names))
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


def short_lived(course: Course, labels: Labels) -> Ints:
    """Blocks that end in the phase in which they begin; where no phases are known, the whole run is one."""
    birth, death = course.lives.birth, course.lives.death
    ends = (birth != BEFORE) & (death < _end(course))
    if labels.phases:
        ends &= phase_numbers(labels.phases, birth) == phase_numbers(labels.phases, death)
    return np.flatnonzero(ends)


def _end(course: Course) -> int:
    """What an error makes a program let go of is not temporary."""
    failed = np.flatnonzero(np.frombuffer(course.trace.actions, dtype=np.uint8) == Action.OOM)
    return int(failed[0]) if len(failed) else len(course.trace)


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
class Step:
    step: int
    begin: int
    end: int
    peak_bytes: int
    left_bytes: int  # allocated when it ends


@dataclass(frozen=True, slots=True)
class Growth:
    steps: tuple[Step, ...]
    per_step_bytes: int | None  # what each step after the second leaves behind, in the middle; None if too few
    grows: bool | None  # whether every step after the second left more than the one before
    survivors: tuple[Share, ...]  # made in those steps and never freed


def growth(course: Course, labels: Labels) -> Growth:
    steps = tuple(_steps(course, labels.phases))
    later = [step.left_bytes for step in steps if step.step >= SETTLED]
    changes = np.diff(later)
    if len(changes) < 2:
        return Growth(steps, None, None, ())
    grows = bool((changes > 0).all())
    survivors: tuple[Share, ...] = ()
    if grows:
        begin = next(step.end for step in steps if step.step >= SETTLED)
        blocks = _survivors(course, begin, steps[-1].end)
        survivors = (by_line if labels.stacks else by_module)(course, labels, blocks, limit=8)
    return Growth(steps, int(np.median(changes)), grows, survivors)


def _steps(course: Course, phases: tuple[Phase, ...]) -> list[Step]:
    found: dict[int, tuple[int, int]] = {}
    for phase in phases:
        if phase.step > 0:
            begin, _ = found.get(phase.step, (phase.begin, 0))
            found[phase.step] = begin, phase.end
    complete = {phase.step for phase in phases if phase.name in ("step", "backward")}
    return [
        Step(step, begin, end, int(course.allocated[begin:end].max()), course.allocated_at(end - 1))
        for step, (begin, end) in found.items()
        if begin < end and step in complete
    ]


def _survivors(course: Course, begin: int, end: int) -> Ints:
    birth, death = course.lives.birth, course.lives.death
    return np.flatnonzero((birth != BEFORE) & (birth >= begin) & (birth < end) & (death >= end))
