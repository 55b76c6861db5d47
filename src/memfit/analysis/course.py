"""What became of a trace: where each block lay, how large it was, what was allocated and reserved after each event.

A recording is taken at its word (`observed`): each block lies where it was seen. A prediction is placed by the model of
the allocator (`placed`). What reads a `Course` need not know which it was.

When each block of a trace is born and when it dies, as columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.errors import InputError
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.allocator import CachingAllocator
from memfit.replay.driver import NotingDriver, Range, Ranges
from memfit.replay.events import Action, Trace
from memfit.replay.replay import Player

Ints = npt.NDArray[np.int64]
BEFORE = -1


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


MOST = 2.0**62
DriverEvent = tuple[int, int, int, int]  # at which event of the trace; action, address, size


@dataclass(frozen=True, slots=True)
class Course:
    trace: Trace
    lives: Lifetimes
    size: Ints  # of each block, as the allocator counts it
    address: npt.NDArray[np.uint64]
    allocated: Ints  # after each event
    reserved: Ints | None  # the same; None where it is not known
    allocated_before: int
    reserved_before: int
    start: tuple[Range, ...]  # what was held from the driver before the first event
    driver: tuple[DriverEvent, ...]
    doubts: int = 0  # events that contradict what lies in memory

    @property
    def peak_event(self) -> int:
        """The first event at which most is allocated; BEFORE if that is how it began."""
        return _first_peak(self.allocated, self.allocated_before)

    @property
    def reserved_peak_event(self) -> int | None:
        return None if self.reserved is None else _first_peak(self.reserved, self.reserved_before)

    def allocated_at(self, event: int) -> int:
        return self.allocated_before if event < 0 else int(self.allocated[event])

    def reserved_at(self, event: int) -> int | None:
        if self.reserved is None:
            return None
        return self.reserved_before if event < 0 else int(self.reserved[event])

    def ranges_at(self, event: int) -> Ranges:
        held = Ranges(self.start)
        for at, action, address, size in self.driver:
            if at > event:
                break
            held.do(action, address, size)
        return held


def columns(trace: Trace, lives: Lifetimes, size: Ints) -> tuple[Ints, int]:
    """Bytes allocated after each event, and before the first."""
    check_total(size)
    change = np.zeros(len(trace) + 1, dtype=np.int64)
    born, died = lives.birth >= 0, (lives.death >= 0) & (lives.death < len(trace))
    change[lives.birth[born]] += size[born]
    change[lives.death[died]] -= size[died]
    before = int(size[~born & (lives.death != BEFORE)].sum())
    return before + np.cumsum(change[:-1]), before


def check_total(sizes: npt.NDArray[Any]) -> None:
    """Sums are made of 64-bit numbers; no machine fills them, but a file can say so."""
    if float(sizes.sum(dtype=np.float64)) >= MOST:
        raise InputError("its sizes add up to more than 4 EiB, which no run allocates", hint="is the file damaged?")


def reserved_column(trace: Trace, driver: tuple[DriverEvent, ...], before: int) -> Ints:
    check_total(np.array([before, *(size for _, _, _, size in driver)], dtype=np.float64))
    change = np.zeros(len(trace), dtype=np.int64)
    for event, action, _, size in driver:
        change[event] += size if action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP) else -size
    return before + np.cumsum(change)


def _first_peak(column: Ints, before: int) -> int:
    if not len(column):
        return BEFORE
    at = int(column.argmax())
    return at if column[at] > before else BEFORE


# -- placed by the model -----------------------------------------------------------------------------------------


def placed(trace: Trace, config: AllocatorConfig) -> Course:
    """A trace without addresses, given some by the model of the allocator; there is always memory enough."""
    lives = lifetimes(trace)
    driver = NotingDriver(event=BEFORE)
    player = Player(trace, CachingAllocator(config, driver=driver))
    size, address = [0] * len(trace.requested), [0] * len(trace.requested)

    def put(block: int) -> None:
        held = player.live[block] = player.allocator.malloc(trace.requested[block], trace.streams[block])
        if held is not None:
            size[block], address[block] = held.size, held.address

    for block in np.flatnonzero((lives.birth == BEFORE) & (lives.death != BEFORE)).tolist():
        put(block)
    start, calls = Ranges(), len(driver.calls)
    for _, done, where, nbytes, _ in driver.calls:
        start.do(done, where, nbytes)
    for event, (action, subject) in enumerate(trace.events()):
        driver.event = event
        if action == Action.ALLOC:
            put(subject)
        elif action == Action.EMPTY_CACHE or (action <= Action.FREE_COMPLETED and player.live[subject] is not None):
            player.do(action, subject)
    sizes = np.array(size, dtype=np.int64)
    allocated, before = columns(trace, lives, sizes)
    made = tuple((event, action, where, nbytes) for event, action, where, nbytes, _ in driver.calls[calls:])
    return Course(
        trace=trace, lives=lives, size=sizes, address=np.array(address, dtype=np.uint64), allocated=allocated,
        reserved=reserved_column(trace, made, start.total), allocated_before=before, reserved_before=start.total,
        start=tuple(start), driver=made,
    )  # fmt: skip
