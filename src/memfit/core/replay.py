"""A trace, played through the model of the allocator: what is allocated and reserved after each event.

    >>> trace = Trace()
    >>> x = trace.alloc(3 << 20)
    >>> y = trace.alloc(30 << 20)
    >>> trace.free(x)
    >>> timeline = replay(trace)
    >>> [n >> 20 for n in timeline.allocated], [n >> 20 for n in timeline.reserved]
    ([3, 33, 30], [20, 50, 50])
    >>> smallest_capacity(trace) >> 20
    50

What a recording saw of the driver and of errors is not obeyed here; `verify` compares with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.core.alloc_config import ROUND_LARGE, AllocatorConfig
from memfit.core.alloc_stats import AllocatorStats
from memfit.core.allocator import CachingAllocator, OutOfMemory
from memfit.core.blocks import ALLOCATED, PENDING, Block, SegmentRecord
from memfit.core.driver import AddressSource
from memfit.core.events import Action, Trace
from memfit.errors import InputError

BEFORE = -1  # in place of an event: what was there before the first one
DEFAULTS = AllocatorConfig()


@dataclass(frozen=True, slots=True)
class OutOfMemoryEvent:
    event: int
    block: int
    requested: int
    rounded: int
    alloc_size: int  # what torch's message says it tried to allocate
    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Columns have one entry for each event of the trace. Where memory ran out, the replay stops: `oom` says where,
    and from there on the columns repeat what was held then."""

    allocated: array[int]
    reserved: array[int]
    block_size: array[int]  # of each block of the trace; 0 if it was never placed
    peak_allocated: int
    peak_allocated_event: int  # the first event at the peak; BEFORE if that is how it began
    peak_reserved: int
    peak_reserved_event: int
    retries: int  # waits for the whole device in order to release cached memory: each costs time
    oom: OutOfMemoryEvent | None
    stats: AllocatorStats
    segments: tuple[SegmentRecord, ...]  # as they are at the end


def replay(
    trace: Trace, config: AllocatorConfig = DEFAULTS, *, capacity: int | None = None, limit: int | None = None,
    start: Sequence[SegmentRecord] = (), addresses: AddressSource | None = None,
) -> Timeline:  # fmt: skip
    """Blocks of the trace without an ALLOC event were there before: where `start` has them, or else allocated first."""
    player = Player(
        trace, CachingAllocator.from_segments(start, config, capacity=capacity, limit=limit, addresses=addresses)
    )
    stats = player.allocator.stats
    oom = player.place_what_was_there()
    first_allocated, first_reserved = stats.allocated, stats.reserved
    oom = oom or player.play()
    for column, last in ((player.allocated, stats.allocated), (player.reserved, stats.reserved)):
        column.extend([last] * (len(trace) - len(column)))
    peak_allocated, peak_allocated_event = _peak(player.allocated, first_allocated)
    _, peak_reserved_event = _peak(player.reserved, first_reserved)
    return Timeline(
        allocated=player.allocated, reserved=player.reserved, block_size=array("q", player.sizes),
        peak_allocated=peak_allocated, peak_allocated_event=peak_allocated_event,
        peak_reserved=stats.reserved_peak, peak_reserved_event=peak_reserved_event,
        retries=stats.num_alloc_retries, oom=oom, stats=stats, segments=player.allocator.layout(),
    )  # fmt: skip


def smallest_capacity(
    trace: Trace, config: AllocatorConfig = DEFAULTS, *, start: Sequence[SegmentRecord] = (), ample: int | None = None,
    within: int = 0,
) -> int:  # fmt: skip
    """The least capacity, in steps of 2 MiB, with which the trace runs to its end (perhaps with retries); or one that
    is at most `within` bytes more. `ample` is the reserved peak of a replay without limit, if one was made.

    A bisection with few replays, for each one settles a whole range: with any capacity from the peak it reached up to
    the smallest sum it was refused, everything would have gone the same way. More capacity can in theory turn a fit
    into a failure, so the answer is also tried with a margin of 1/64, and raised if that fails.
    """
    ample = ample or _course(trace, config, None, start).reserved_peak
    low, high = max(_live_peak(trace, config), sum(segment.size for segment in start)), ample
    while True:
        probe = low
        while high - low > within:
            course = _course(trace, config, probe, start)
            if course.fits:
                high = course.reserved_peak
            else:
                low = course.smallest_refusal
            probe = (low + high) // 2
        answer = -(-high // ROUND_LARGE) * ROUND_LARGE
        margin = answer + max(answer // 64 // ROUND_LARGE, 1) * ROUND_LARGE
        doubtful = [_course(trace, config, each, start) for each in {answer, margin} if high < each < ample]
        refusals = [course.smallest_refusal for course in doubtful if not course.fits]
        if not refusals:
            return answer
        low, high = max(refusals), ample


# -- how it is done --------------------------------------------------------------------------------------------


class Player:
    """Binds the blocks of a trace to those of an allocator."""

    def __init__(self, trace: Trace, allocator: CachingAllocator) -> None:
        self.trace = trace
        self.allocator = allocator
        self.live: list[Block | None] = [None] * len(trace.requested)
        self.sizes = [0] * len(trace.requested)
        self.allocated = array("q")
        self.reserved = array("q")
        self._waits_at: dict[int, int] = {}

    def place_what_was_there(self) -> OutOfMemoryEvent | None:
        actions = np.frombuffer(self.trace.actions, dtype=np.uint8)
        born = np.frombuffer(self.trace.subjects, dtype=np.int64)[actions == Action.ALLOC]
        there = {b.address: b for b in self.allocator.blocks() if b.state in (ALLOCATED, PENDING)}
        for block in np.setdiff1d(np.arange(len(self.live)), born).tolist():
            held = there.get(self.trace.addresses[block])
            if held is None:
                try:
                    held = self.allocator.malloc(self.trace.requested[block], self.trace.streams[block])
                except OutOfMemory as error:
                    return _oom_event(error, BEFORE, block)
            elif held.state == PENDING:
                self._waits_at[block] = self.allocator.stats.num_sync_all_streams
            self.live[block] = held
            self.sizes[block] = held.size if held is not None else 0
        return None

    def play(self) -> OutOfMemoryEvent | None:
        malloc, free, stats = self.allocator.malloc, self.allocator.free, self.allocator.stats
        requested, streams = self.trace.requested.tolist(), self.trace.streams.tolist()
        live, sizes = self.live, self.sizes
        allocated, reserved = self.allocated.append, self.reserved.append
        alloc_action, free_action = int(Action.ALLOC), int(Action.FREE)
        try:
            for action, subject in self.trace.events():
                if action == alloc_action:
                    block = live[subject] = malloc(requested[subject], streams[subject])
                    if block is not None:
                        sizes[subject] = block.size
                elif action == free_action and (block := live[subject]) is not None:
                    live[subject] = None
                    free(block)
                else:
                    self.do(action, subject)
                allocated(stats.allocated)
                reserved(stats.reserved)
        except OutOfMemory as error:
            return _oom_event(error, len(self.allocated), subject)
        return None

    def do(self, action: int, subject: int) -> None:
        """Any action of the program but ALLOC; what the driver did is left alone."""
        if action == Action.EMPTY_CACHE:
            self.allocator.empty_cache()
        elif action in (Action.FREE, Action.FREE_REQUESTED, Action.FREE_COMPLETED):
            block = self.live[subject]
            if block is not None:
                self._free(action, subject, block)
            elif self.trace.requested[subject]:
                raise InputError(f"the trace frees block {subject} while it is not allocated")

    def _free(self, action: int, subject: int, block: Block) -> None:
        waits = self.allocator.stats.num_sync_all_streams
        if action == Action.FREE_REQUESTED:
            self.allocator.request_free(block)
            self._waits_at[subject] = waits
            return
        self.live[subject] = None
        if action == Action.FREE:
            self.allocator.free(block)
        elif self._waits_at.pop(subject, None) == waits:  # else a wait for all streams has completed it already
            self.allocator.complete_free(block)


@dataclass(frozen=True, slots=True)
class _Course:
    """What a replay at some capacity showed."""

    fits: bool
    reserved_peak: int
    smallest_refusal: int


def _course(trace: Trace, config: AllocatorConfig, capacity: int | None, start: Sequence[SegmentRecord]) -> _Course:
    player = Player(trace, CachingAllocator.from_segments(start, config, capacity=capacity))
    oom = player.place_what_was_there() or player.play()
    return _Course(oom is None, player.allocator.stats.reserved_peak, player.allocator.driver.smallest_refusal or 0)


def _live_peak(trace: Trace, config: AllocatorConfig) -> int:
    """The most bytes that are live at once, each block counted with its rounded size: no layout can do with less."""
    if max(config.roundup_power2_divisions) <= 1:
        sizes = -(-np.frombuffer(trace.requested, dtype=np.int64) // 512) * 512
    else:
        sizes = np.array([config.rounded(size) if size else 0 for size in trace.requested], dtype=np.int64)
    actions = np.frombuffer(trace.actions, dtype=np.uint8)
    subjects = np.frombuffer(trace.subjects, dtype=np.int64)
    change = np.zeros(len(actions), dtype=np.int64)
    for action, sign in ((Action.ALLOC, 1), (Action.FREE, -1), (Action.FREE_REQUESTED, -1)):
        at = actions == action
        change[at] = sign * sizes[subjects[at]]
    before = int(sizes.sum() - change[actions == Action.ALLOC].sum())
    peak = before + int(change.cumsum().max(initial=0))
    return -(-peak // ROUND_LARGE) * ROUND_LARGE


def _peak(column: array[int], before: int) -> tuple[int, int]:
    peak = max(column, default=before)
    return (peak, column.index(peak)) if peak > before else (before, BEFORE)


def _oom_event(error: OutOfMemory, event: int, block: int) -> OutOfMemoryEvent:
    return OutOfMemoryEvent(
        event, block, error.requested, error.rounded, error.alloc_size, error.allocated, error.reserved
    )
