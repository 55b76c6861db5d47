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
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memfit.errors import InputError
from memfit.replay.alloc_config import ROUND_LARGE, AllocatorConfig
from memfit.replay.allocator import CachingAllocator, OutOfMemory
from memfit.replay.blocks import ALLOCATED, PENDING, AllocatorStats, Block, SegmentRecord
from memfit.replay.driver import AddressSource
from memfit.replay.events import Action, Trace
from memfit.replay.playing import Calls, Progress, play
from memfit.units import MiB

BEFORE = -1  # in place of an event: what was there before the first one
DEFAULTS = AllocatorConfig()
MAX_LIVE_MIB = 1 << 40
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OutOfMemoryEvent:
    event: int
    block: int
    requested: int
    rounded: int
    alloc_size: int  # what torch's message says it tried to allocate
    allocated: int
    reserved: int


@dataclass(frozen=True)
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
    allocator: CachingAllocator = field(repr=False, compare=False)

    @cached_property
    def segments(self) -> tuple[SegmentRecord, ...]:
        """As they are at the end."""
        return self.allocator.layout()


def replay(
    trace: Trace, config: AllocatorConfig = DEFAULTS, *, capacity: int | None = None, limit: int | None = None,
    start: Sequence[SegmentRecord] = (), addresses: AddressSource | None = None,
) -> Timeline:  # fmt: skip
    """Blocks of the trace without an ALLOC event were there before: where `start` has them, or else allocated first."""
    return Replays(trace, config, start=start).timeline(capacity=capacity, limit=limit, addresses=addresses)


def smallest_capacity(
    trace: Trace, config: AllocatorConfig = DEFAULTS, *, start: Sequence[SegmentRecord] = (), within: int = 0
) -> int:
    """The least capacity, in steps of 2 MiB, with which the trace runs to its end (perhaps with retries); or one that
    is at most `within` bytes more."""
    return Replays(trace, config, start=start).smallest_capacity(within=within)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay with some capacity came to. With any capacity from the peak it reached up to the smallest sum it
    was refused, everything would have gone the same way (in plain segments)."""

    reserved_peak: int
    smallest_refusal: int | None
    retries: int
    oom: OutOfMemoryEvent | None

    @property
    def fits(self) -> bool:
        return self.oom is None

    def is_also_that_of(self, capacity: int) -> bool:
        return self.reserved_peak <= capacity and (self.smallest_refusal is None or capacity < self.smallest_refusal)


class Replays:
    """All replays of one trace with the same settings. What they have in common is done once."""

    def __init__(
        self, trace: Trace, config: AllocatorConfig = DEFAULTS, *, start: Sequence[SegmentRecord] = ()
    ) -> None:
        self.trace = trace
        self.config = config
        self.start = start
        _check_bytes(trace)
        self._calls = _calls(trace)
        self._outcomes: list[Outcome] = []
        # Expandable segments reserve addresses in proportion to the capacity, so each capacity has its own course.
        self._settles_ranges = not config.expandable_segments and not any(segment.expandable for segment in start)

    @cached_property
    def ample(self) -> Timeline:
        """With all the memory that is asked for."""
        made = self.timeline()
        self._outcomes.append(Outcome(made.peak_reserved, None, made.retries, made.oom))
        return made

    def timeline(
        self, *, capacity: int | None = None, limit: int | None = None, addresses: AddressSource | None = None
    ) -> Timeline:
        player = self._player(capacity, limit, addresses, notes_sizes=True)
        oom = player.place_what_was_there()
        stats, progress = player.allocator.stats, player.progress
        first_allocated, first_reserved = stats.allocated, stats.reserved
        oom = oom or player.play()
        sizes = np.array(progress.sizes, dtype=np.int64)
        changes = _changes(self.trace, sizes)
        changes[progress.event :] = 0
        allocated = first_allocated + changes.cumsum()
        reserved = _after_each(progress, first_reserved, len(self.trace))
        reserved[progress.event :] = stats.reserved  # a failed request has released what it could
        peak_allocated, peak_allocated_event = _peak(allocated, first_allocated)
        _, peak_reserved_event = _peak(reserved, first_reserved)
        return Timeline(
            allocated=_column(allocated), reserved=_column(reserved), block_size=_column(sizes),
            peak_allocated=peak_allocated, peak_allocated_event=peak_allocated_event,
            peak_reserved=stats.reserved_peak, peak_reserved_event=peak_reserved_event,
            retries=stats.num_alloc_retries, oom=oom, stats=stats, allocator=player.allocator,
        )  # fmt: skip

    def outcome(self, capacity: int) -> Outcome:
        """As `timeline` with this capacity, without its columns."""
        for known in self._outcomes:
            if known.is_also_that_of(capacity):
                return known
        made = self._played(capacity)
        if self._settles_ranges:
            self._outcomes.append(made)
        return made

    def smallest_capacity(self, *, within: int = 0) -> int:
        """The least capacity, in steps of 2 MiB, with which the trace runs to its end (perhaps with retries); or one
        that is at most `within` bytes more.

        A bisection with few replays, for each one settles a whole range. More capacity can in theory turn a fit into a
        failure, so the answer is also tried with a margin of 1/64, and raised if that fails.
        """
        ample = self.ample.peak_reserved
        low, high = self._least, ample
        while True:
            probe = low
            while high - low > within:
                outcome = self.outcome(probe)
                if outcome.fits:
                    high = outcome.reserved_peak
                else:
                    low = outcome.smallest_refusal or 0
                probe = (low + high) // 2
            answer = -(-high // ROUND_LARGE) * ROUND_LARGE
            margin = answer + max(answer // 64 // ROUND_LARGE, 1) * ROUND_LARGE
            doubtful = [self.outcome(each) for each in {answer, margin} if high < each < ample]
            refusals = [outcome.smallest_refusal or 0 for outcome in doubtful if not outcome.fits]
            if not refusals:
                return answer
            low, high = max(refusals), ample

    # -- how it is done ----------------------------------------------------------------------------------------

    def _player(
        self, capacity: int | None, limit: int | None = None, addresses: AddressSource | None = None, *,
        notes_sizes: bool = False,
    ) -> Player:  # fmt: skip
        allocator = CachingAllocator.from_segments(
            self.start, self.config, capacity=capacity, limit=limit, addresses=addresses
        )
        return Player(self.trace, allocator, calls=self._calls, notes_sizes=notes_sizes)

    def _played(self, capacity: int) -> Outcome:
        oom: OutOfMemoryEvent | None = None
        if self._beginning is not None and self._beginning.allocator.stats.reserved_peak <= capacity:
            player = self._beginning.twin(capacity)
        else:
            player = self._player(capacity)
            oom = player.place_what_was_there()
        oom = oom or player.play()
        stats = player.allocator.stats
        return Outcome(stats.reserved_peak, player.allocator.driver.smallest_refusal, stats.num_alloc_retries, oom)

    @cached_property
    def _least(self) -> int:
        """No capacity below this can do."""
        return max(_live_peak(self.trace, self.config), sum(segment.size for segment in self.start))

    @cached_property
    def _beginning(self) -> Player | None:
        """As far as all go the same way that have at least the least capacity."""
        if not self._settles_ranges:
            return None
        above = np.frombuffer(self.ample.reserved, dtype=np.int64) > self._least
        player = self._player(None)
        player.place_what_was_there()
        player.play(until=int(above.argmax()) if above.any() else len(self.trace))
        return player


class Player:
    """Binds the blocks of a trace to those of an allocator."""

    def __init__(
        self, trace: Trace, allocator: CachingAllocator, *, calls: Calls | None = None, notes_sizes: bool = False
    ) -> None:
        self.trace = trace
        self.allocator = allocator
        self.calls = calls or _calls(trace)
        blocks = len(trace.requested)
        self.progress = Progress([None] * blocks, [0] * blocks if notes_sizes else None)
        self._waits_at: dict[int, int] = {}

    @property
    def live(self) -> list[Block | None]:
        return self.progress.live

    def twin(self, capacity: int) -> Player:
        """Another, as far as this one, that goes on with this capacity."""
        allocator, twins = self.allocator.twin(capacity)
        other = Player(self.trace, allocator, calls=self.calls)
        other.progress = self.progress.twin(twins)
        other._waits_at = dict(self._waits_at)
        return other

    def place_what_was_there(self) -> OutOfMemoryEvent | None:
        there = {b.address: b for b in self.allocator.blocks() if b.state in (ALLOCATED, PENDING)}
        for block in _there_before(self.trace):
            held = there.get(self.trace.addresses[block])
            if held is None:
                try:
                    held = self.allocator.malloc(self.trace.requested[block], self.trace.streams[block])
                except OutOfMemory as error:
                    return _oom_event(error, BEFORE, block)
            elif held.state == PENDING:
                self._waits_at[block] = self.allocator.stats.num_sync_all_streams
            self.live[block] = held
            if self.progress.sizes is not None and held is not None:
                self.progress.sizes[block] = held.size
        return None

    def play(self, until: int | None = None) -> OutOfMemoryEvent | None:
        """All events, or those before `until`."""
        progress = self.progress
        try:
            play(self.allocator, self.calls, progress, len(self.trace) if until is None else until, self.do)
        except OutOfMemory as error:
            return _oom_event(error, progress.event, self.trace.subjects[progress.event])
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


def _check_bytes(trace: Trace) -> None:
    """What is counted must fit into 64 bits, with room to spare."""
    requested = np.frombuffer(trace.requested, dtype=np.int64)
    if int(requested.max(initial=0)) * len(requested) <= MAX_LIVE_MIB * MiB:
        return
    if _changes(trace, requested // MiB).cumsum().max(initial=0) > MAX_LIVE_MIB:
        raise InputError("the job holds more than 2^60 bytes at once", hint="no GPU has even a millionth of that")


def _calls(trace: Trace) -> Calls:
    return Calls(trace.actions.tobytes(), trace.subjects.tolist(), trace.requested.tolist(), trace.streams.tolist())


def _there_before(trace: Trace) -> list[int]:
    """Blocks without an ALLOC event."""
    births = np.frombuffer(trace.subjects, dtype=np.int64)[np.frombuffer(trace.actions, np.uint8) == Action.ALLOC]
    count = np.bincount(births, minlength=len(trace.requested))
    if len(count) and count.max() > 1:
        raise InputError(f"the trace allocates block {count.argmax()} twice")
    return [int(block) for block in np.flatnonzero(count == 0)]


def _changes(trace: Trace, sizes: Ints) -> Ints:
    """What each event adds to the bytes that are allocated."""
    actions, subjects = np.frombuffer(trace.actions, np.uint8), np.frombuffer(trace.subjects, np.int64)
    changes = np.zeros(len(actions), dtype=np.int64)
    for action, sign in ((Action.ALLOC, 1), (Action.FREE, -1), (Action.FREE_REQUESTED, -1)):
        at = np.flatnonzero(actions == action)
        changes[at] = sign * sizes[subjects[at]]
    return changes


def _after_each(progress: Progress, first: int, events: int) -> Ints:
    """What was reserved after each event."""
    starts = np.array([0, *progress.risen], dtype=np.int64)
    return np.repeat(np.array([first, *progress.levels], dtype=np.int64), np.diff(starts, append=events))


def _live_peak(trace: Trace, config: AllocatorConfig) -> int:
    """The most bytes that are live at once, each block counted with its rounded size: no layout can do with less."""
    if max(config.roundup_power2_divisions) <= 1:
        sizes = -(-np.frombuffer(trace.requested, dtype=np.int64) // 512) * 512
    else:
        sizes = np.array([config.rounded(size) if size else 0 for size in trace.requested], dtype=np.int64)
    changes = _changes(trace, sizes)
    before = int(sizes.sum() - changes[np.frombuffer(trace.actions, np.uint8) == Action.ALLOC].sum())
    peak = before + int(changes.cumsum().max(initial=0))
    return -(-peak // ROUND_LARGE) * ROUND_LARGE


def _peak(column: Ints, before: int) -> tuple[int, int]:
    at = int(column.argmax()) if len(column) else BEFORE
    return (int(column[at]), at) if at >= 0 and column[at] > before else (before, BEFORE)


def _column(values: Ints) -> array[int]:
    return array("q", values.tobytes())


def _oom_event(error: OutOfMemory, event: int, block: int) -> OutOfMemoryEvent:
    return OutOfMemoryEvent(
        event, block, error.requested, error.rounded, error.alloc_size, error.allocated, error.reserved
    )
