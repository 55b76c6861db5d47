"""A timeline of any length in a bounded number of samples, without losing a peak.

Of every stretch of events two are kept: the one at which most is allocated, and the last. What is stored of a kept
event is exact, and holds until the next one; so a drawing of the samples shows every peak at its full height, and
every plateau at its own. Short timelines are kept whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.core.course import Course
from memfit.core.lifetimes import BEFORE, Ints

MAX_SAMPLES = 60_000


@dataclass(frozen=True, slots=True)
class Samples:
    """`event[0]` is BEFORE: how it began. Sums have one row a group and one column a sample."""

    event: Ints
    allocated: Ints
    reserved: Ints | None
    stride: int  # events in a stretch; 1 if none was left out


def sampled(course: Course, limit: int = MAX_SAMPLES, *, also: Ints | None = None) -> Samples:
    """`also`: events that are kept in any case, such as those before a long pause, whose state is seen for long."""
    events = len(course.trace)
    changed = np.flatnonzero(_changes(course))
    if len(changed) <= limit:
        kept, stride = changed, 1
    else:
        stride = -(-2 * events // limit)
        whole = events // stride * stride
        highest = course.allocated[:whole].reshape(-1, stride).argmax(axis=1) + np.arange(0, whole, stride)
        last = np.arange(stride - 1, events, stride)
        ends = [] if whole == events else [int(course.allocated[whole:].argmax()) + whole]
        more = np.zeros(0, dtype=np.int64) if also is None else also[(also >= 0) & (also < events)]
        kept = np.unique(np.concatenate((highest, last, more, np.array([*ends, events - 1], dtype=np.int64))))
    event = np.concatenate(([BEFORE], kept)).astype(np.int64)
    reserved = None
    if course.reserved is not None:
        reserved = np.concatenate(([course.reserved_before], course.reserved[kept]))
    return Samples(event, np.concatenate(([course.allocated_before], course.allocated[kept])), reserved, stride)


def group_sums(course: Course, samples: Samples, group: Ints, groups: int) -> Ints:
    """Bytes allocated in each group at each sample; the rows sum to `samples.allocated` exactly."""
    lives, size, length = course.lives, course.size, len(course.trace)
    counts = (lives.death != BEFORE) & (size > 0)
    sums = np.empty((groups, len(samples.event)), dtype=np.int64)
    for number in range(groups):
        blocks = np.flatnonzero(counts & (group == number))
        change = np.zeros(length + 2, dtype=np.int64)  # the first entry stands for what was there before
        np.add.at(change, lives.birth[blocks] + 1, size[blocks])
        np.subtract.at(change, lives.death[blocks] + 1, size[blocks])
        sums[number] = np.cumsum(change)[samples.event + 1]
    return sums


def top_groups(course: Course, number: Ints, names: Sequence[str], alive: Ints, count: int) -> tuple[Ints, list[str]]:
    """A column with many names, renumbered: the `count` that weigh most, at the peak or over time, and the rest."""
    size = course.size
    at_peak = np.bincount(number[alive], weights=size[alive], minlength=len(names))
    lasted = (np.minimum(course.lives.death, len(course.trace)) - course.lives.birth).astype(np.float64)
    over_time = np.bincount(number, weights=size * lasted, minlength=len(names)) / max(len(course.trace), 1)
    weight = np.maximum(at_peak, over_time)
    chosen = [i for i in np.argsort(-weight, kind="stable")[:count].tolist() if weight[i] > 0]
    table = np.full(len(names), len(chosen), dtype=np.int64)
    table[chosen] = np.arange(len(chosen))
    rest = bool((weight > 0).sum() > len(chosen))
    return table[number], [names[i] for i in chosen] + (["the rest"] if rest else [])


def _changes(course: Course) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    moved = np.diff(course.allocated, prepend=course.allocated_before) != 0
    if course.reserved is not None:
        moved |= np.diff(course.reserved, prepend=course.reserved_before) != 0
    return np.asarray(moved, dtype=np.bool_)
