"""What became of a trace: how large each block was and how long it lived, what was held after each event.

A job that is predicted is replayed (`replay`), a recording is taken at its word (`analysis/observed.py`). What reads a
`Timeline` need not know which it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.errors import InputError
from memfit.events import Action, Trace
from memfit.replay.alloc_config import MIN_BLOCK_SIZE, AllocatorConfig
from memfit.replay.driver import DriverCall, Range, Ranges

BEFORE = -1
"""In place of an event: what was there before the first one."""
MOST_BYTES = 2.0**62
Ints = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Events, one entry a block. `BEFORE` is a birth that the trace does not show; its length, an end that it does not.

    >>> trace = Trace()
    >>> x, y = trace.alloc(1), trace.alloc(2)
    >>> trace.free(x)
    >>> lives = lifetimes(trace)
    >>> lives.birth.tolist(), lives.death.tolist(), lives.alive_at(2).tolist()
    ([0, 1], [2, 3], [1])
    """

    birth: Ints
    death: Ints  # no longer allocated: FREE, or FREE_REQUESTED
    gone: Ints  # its memory can be used again: FREE, or FREE_COMPLETED

    def alive_at(self, event: int) -> Ints:
        """Blocks that are allocated once an event has happened."""
        return np.flatnonzero((self.birth <= event) & (self.death > event))

    def held_at(self, event: int) -> Ints:
        """The same, and what still waits for another stream."""
        return np.flatnonzero((self.birth <= event) & (self.gone > event))


def lifetimes(trace: Trace) -> Lifetimes:
    actions = np.frombuffer(trace.actions, dtype=np.uint8)
    subjects = np.frombuffer(trace.subjects, dtype=np.int64)
    blocks, end = len(trace.requested), len(trace)
    allocs = np.flatnonzero(actions == Action.ALLOC)
    ends = np.flatnonzero((actions == Action.FREE) | (actions == Action.FREE_REQUESTED))
    completions = np.flatnonzero(actions == Action.FREE_COMPLETED)
    birth = np.full(blocks, BEFORE, dtype=np.int64)
    death = np.full(blocks, end, dtype=np.int64)
    gone = np.full(blocks, end, dtype=np.int64)
    birth[subjects[allocs]] = allocs
    death[subjects[ends]] = ends
    frees = ends[actions[ends] == Action.FREE]
    gone[subjects[frees]] = frees
    gone[subjects[completions]] = completions
    only_completed = (death == end) & (gone < end)  # its first half was before the trace began: it never counted
    death[only_completed] = BEFORE
    _check_once(allocs, subjects, blocks)
    _check_once(ends, subjects, blocks)
    _check_once(np.concatenate((frees, completions)), subjects, blocks)
    wrong = np.flatnonzero((death < birth) | (gone < death))
    if len(wrong):
        raise InputError(f"the trace frees block {wrong[0]} while it is not allocated")
    return Lifetimes(birth, death, gone)


def _check_once(events: Ints, subjects: Ints, blocks: int) -> None:
    twice = np.flatnonzero(np.bincount(subjects[events], minlength=blocks) > 1)
    if len(twice):
        raise InputError(f"the trace allocates or frees block {twice[0]} twice")


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """`size` and `address` have one entry a block, `allocated` and `reserved` one an event: what was held after it."""

    trace: Trace
    size: Ints  # as the allocator counts it; 0 if it was never placed
    allocated: Ints
    reserved: Ints | None  # None where it is not known
    allocated_before: int
    reserved_before: int
    address: Addresses | None = None  # None where nobody asked for places
    start: tuple[Range, ...] = ()  # what was held from the driver before the first event
    driver: tuple[DriverCall, ...] = ()
    doubts: int = 0  # events that contradict what lies in memory
    known_lives: Lifetimes | None = None  # where somebody has them already

    @cached_property
    def lives(self) -> Lifetimes:
        return self.known_lives or lifetimes(self.trace)

    @cached_property
    def peak_event(self) -> int:
        """The first event at which most is allocated; BEFORE if that is how it began."""
        return _first_peak(self.allocated, self.allocated_before)

    @cached_property
    def reserved_peak_event(self) -> int | None:
        return None if self.reserved is None else _first_peak(self.reserved, self.reserved_before)

    @property
    def peak_allocated(self) -> int:
        return self.allocated_at(self.peak_event)

    @property
    def peak_reserved(self) -> int | None:
        return None if self.reserved_peak_event is None else self.reserved_at(self.reserved_peak_event)

    def allocated_at(self, event: int) -> int:
        return self.allocated_before if event < 0 else int(self.allocated[event])

    def reserved_at(self, event: int) -> int | None:
        if self.reserved is None:
            return None
        return self.reserved_before if event < 0 else int(self.reserved[event])

    def ranges_at(self, event: int) -> Ranges:
        held = Ranges(self.start)
        for at, action, address, size, _ in self.driver:
            if at > event:
                break
            held.do(action, address, size)
        return held


def rounded_sizes(trace: Trace, config: AllocatorConfig) -> Ints:
    """Of each block the size that is looked for among the free ones."""
    requested = np.frombuffer(trace.requested, dtype=np.int64)
    if max(config.roundup_power2_divisions) <= 1:
        return -(-requested // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE
    distinct, which = np.unique(requested, return_inverse=True)
    return np.array([config.rounded(size) if size else 0 for size in distinct.tolist()], dtype=np.int64)[which]


def allocated_changes(trace: Trace, size: Ints) -> Ints:
    """What each event adds to the bytes that are allocated."""
    actions, subjects = np.frombuffer(trace.actions, np.uint8), np.frombuffer(trace.subjects, np.int64)
    changes = np.zeros(len(actions), dtype=np.int64)
    for action, sign in ((Action.ALLOC, 1), (Action.FREE, -1), (Action.FREE_REQUESTED, -1)):
        at = np.flatnonzero(actions == action)
        changes[at] = sign * size[subjects[at]]
    return changes


def check_total(sizes: npt.NDArray[Any]) -> None:
    """Sums are made of 64-bit numbers; no machine fills them, but a file can say so."""
    if float(sizes.sum(dtype=np.float64)) >= MOST_BYTES:
        raise InputError("its sizes add up to more than 4 EiB, which no run allocates", hint="is the file damaged?")


def _first_peak(column: Ints, before: int) -> int:
    if not len(column):
        return BEFORE
    at = int(column.argmax())
    return at if column[at] > before else BEFORE
