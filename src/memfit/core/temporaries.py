"""What an operator or a line of code needs for a moment: blocks made and gone within one phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.core.course import Course
from memfit.core.events import Action
from memfit.core.labels import Labels
from memfit.core.lifetimes import BEFORE, Ints
from memfit.core.phases import phase_numbers


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
