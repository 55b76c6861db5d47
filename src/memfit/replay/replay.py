"""A trace, played through the model of the allocator: what is allocated and reserved after each event.

    >>> trace = Trace()
    >>> x = trace.alloc(3 << 20)
    >>> y = trace.alloc(30 << 20)
    >>> trace.free(x)
    >>> timeline = replay(trace)
    >>> (timeline.allocated >> 20).tolist(), (timeline.reserved >> 20).tolist()
    ([3, 33, 30], [20, 50, 50])
    >>> Replays(trace).smallest_capacity() >> 20
    50

What a recording saw of the driver and of errors is not obeyed here; tests/support/verify.py compares with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from memfit.errors import InputError
from memfit.events import Action, Trace
from memfit.replay.alloc_config import ROUND_LARGE, AllocatorConfig
from memfit.replay.allocator import CachingAllocator, Calls, OutOfMemory, Progress, play
from memfit.replay.blocks import AllocatorStats, Block, SegmentRecord
from memfit.replay.driver import Driver, NotingDriver, Ranges
from memfit.replay.timeline import BEFORE, Ints, Timeline, allocated_changes, rounded_sizes
from memfit.units import MiB

DEFAULTS = AllocatorConfig()
MAX_LIVE_MIB = 1 << 40


@dataclass(frozen=True, slots=True)
class OutOfMemoryEvent:
    event: int
    block: int
    requested: int
    rounded: int
    alloc_size: int  # what torch's message says it tried to allocate
    allocated: int
    reserved: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay(Timeline):
    """Where memory ran out, the replay stops: `oom` says where, and from there on the columns repeat what was held
    then."""

    reserved: Ints
    retries: int  # waits for the whole device in order to release cached memory: each costs time
    oom: OutOfMemoryEvent | None
    stats: AllocatorStats
    allocator: CachingAllocator = field(repr=False)

    @property
    def peak_reserved(self) -> int:
        """Also what was given back within the same event."""
        return self.stats.reserved_peak

    @cached_property
    def segments(self) -> tuple[SegmentRecord, ...]:
        """As they are at the end."""
        return self.allocator.layout()


def replay(
    trace: Trace, config: AllocatorConfig = DEFAULTS, *, capacity: int | None = None, places: bool = False
) -> Replay:
    """Blocks of the trace without an ALLOC event were there before: they are allocated first."""
    return Replays(trace, config).timeline(capacity=capacity, places=places)


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
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

    def __init__(self, trace: Trace, config: AllocatorConfig = DEFAULTS) -> None:
        self.trace = trace
        self.config = config
        _check_bytes(trace)
        self._calls = _calls(trace)
        self._outcomes: list[ReplayOutcome] = []
        # Expandable segments reserve addresses in proportion to the capacity, so each capacity has its own course.
        self._settles_ranges = not config.expandable_segments

    @cached_property
    def ample(self) -> Replay:
        """With all the memory that is asked for."""
        made = self.timeline()
        self._outcomes.append(ReplayOutcome(made.peak_reserved, None, made.retries, made.oom))
        return made

    def timeline(self, *, capacity: int | None = None, places: bool = False) -> Replay:
        """`places`: also where each block lay and what the driver did, which takes a few times as long."""
        noted = NotingDriver(capacity, event=BEFORE) if places else None
        player = self._player(noted or Driver(capacity), notes_sizes=True)
        oom = player.place_what_was_there()
        stats, progress = player.allocator.stats, player.progress
        allocated_before, reserved_before = stats.allocated, stats.reserved
        address = None
        if noted is None:
            oom = oom or player.play()
        else:
            address = [0 if held is None else held.address for held in player.live]
            oom = oom or player.play_noting(noted, address)
        size = np.array(progress.sizes, dtype=np.int64)
        changes = allocated_changes(self.trace, size)
        changes[progress.event :] = 0
        reserved = _after_each(progress, reserved_before, len(self.trace))
        reserved[progress.event :] = stats.reserved  # a failed request has released what it could
        calls = [] if noted is None else noted.calls
        start = Ranges()
        for event, action, where, nbytes, _ in calls:
            if event == BEFORE:
                start.do(action, where, nbytes)
        return Replay(
            trace=self.trace,
            size=size,
            allocated=allocated_before + changes.cumsum(),
            reserved=reserved,
            allocated_before=allocated_before,
            reserved_before=reserved_before,
            address=None if address is None else np.array(address, dtype=np.uint64),
            start=tuple(start),
            driver=tuple(call for call in calls if call[0] != BEFORE),
            retries=stats.num_alloc_retries,
            oom=oom,
            stats=stats,
            allocator=player.allocator,
        )

    def outcome(self, capacity: int) -> ReplayOutcome:
        """As `timeline` with this capacity, without its columns."""
        for known in self._outcomes:
            if known.is_also_that_of(capacity):
                return known
        made = self._played(capacity)
        if self._settles_ranges:
            self._outcomes.append(made)
        return made

    def smallest_capacity(self, *, within: int = 0) -> int:
        """The least capacity with which the trace runs to its end (perhaps with retries), or one that is at most
        `within` bytes more: a sum of segments, so in steps of 2 MiB.

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
            margin = high + max(high // 64 // ROUND_LARGE, 1) * ROUND_LARGE
            if margin >= ample or (outcome := self.outcome(margin)).fits:
                return high
            low, high = outcome.smallest_refusal or 0, ample

    # -- how it is done ----------------------------------------------------------------------------------------

    def _player(self, driver: Driver, *, notes_sizes: bool = False) -> Player:
        return Player(self.trace, CachingAllocator(self.config, driver), calls=self._calls, notes_sizes=notes_sizes)

    def _played(self, capacity: int) -> ReplayOutcome:
        oom: OutOfMemoryEvent | None = None
        if self._beginning is not None and self._beginning.allocator.stats.reserved_peak <= capacity:
            player = self._beginning.twin(capacity)
        else:
            player = self._player(Driver(capacity))
            oom = player.place_what_was_there()
        oom = oom or player.play()
        stats = player.allocator.stats
        return ReplayOutcome(
            stats.reserved_peak, player.allocator.driver.smallest_refusal, stats.num_alloc_retries, oom
        )

    @cached_property
    def _least(self) -> int:
        """The most bytes live at once, each block counted with its rounded size: no layout can do with less."""
        sizes = rounded_sizes(self.trace, self.config)
        changes = allocated_changes(self.trace, sizes)
        born = changes[np.frombuffer(self.trace.actions, np.uint8) == Action.ALLOC]
        peak = int(sizes.sum() - born.sum()) + int(changes.cumsum().max(initial=0))
        return -(-peak // ROUND_LARGE) * ROUND_LARGE

    @cached_property
    def _beginning(self) -> Player | None:
        """As far as all go the same way that have at least the least capacity."""
        if not self._settles_ranges:
            return None
        above = np.frombuffer(self.ample.reserved, dtype=np.int64) > self._least
        player = self._player(Driver())
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
        self.waits_at: dict[int, int] = {}
        self.freed_before: set[int] = set()

    @property
    def live(self) -> list[Block | None]:
        return self.progress.live

    def twin(self, capacity: int) -> Player:
        """Another, as far as this one, that goes on with this capacity."""
        allocator, twins = self.allocator.twin(capacity)
        other = Player(self.trace, allocator, calls=self.calls)
        other.progress = self.progress.twin(twins)
        other.waits_at = dict(self.waits_at)
        return other

    def place_what_was_there(self) -> OutOfMemoryEvent | None:
        for block, is_freed in there_before(self.trace):
            if is_freed:
                self.freed_before.add(block)
                continue
            try:
                held = self.allocator.malloc(self.trace.requested[block], self.trace.streams[block])
            except OutOfMemory as error:
                return _oom_event(error, BEFORE, block)
            self.lies_there(block, held)
        return None

    def lies_there(self, block: int, held: Block | None) -> None:
        self.live[block] = held
        if self.progress.sizes is not None and held is not None:
            self.progress.sizes[block] = held.size

    def play(self, until: int | None = None) -> OutOfMemoryEvent | None:
        """All events, or those before `until`."""
        progress = self.progress
        try:
            play(self.allocator, self.calls, progress, len(self.trace) if until is None else until, self.do)
        except OutOfMemory as error:
            return _oom_event(error, progress.event, self.trace.subjects[progress.event])
        return None

    def play_noting(self, driver: NotingDriver, address: list[int]) -> OutOfMemoryEvent | None:
        """All events one by one: where each block is put, and at which event the driver is asked."""
        for event, (action, subject) in enumerate(self.trace.events()):
            driver.event = event
            oom = self.play(until=event + 1)
            if oom is not None:
                return oom
            held = self.live[subject] if action == Action.ALLOC else None
            if held is not None:
                address[subject] = held.address
        return None

    def do(self, action: int, subject: int) -> None:
        """Any action of the program but ALLOC; what the driver did is left alone."""
        if action == Action.EMPTY_CACHE:
            self.allocator.empty_cache()
        elif action in (Action.FREE, Action.FREE_REQUESTED, Action.FREE_COMPLETED):
            block = self.live[subject]
            if block is not None:
                self._free(action, subject, block)
            elif self.trace.requested[subject] and subject not in self.freed_before:
                raise InputError(f"the trace frees block {subject} while it is not allocated")

    def _free(self, action: int, subject: int, block: Block) -> None:
        waits = self.allocator.stats.num_sync_all_streams
        if action == Action.FREE_REQUESTED:
            self.allocator.request_free(block)
            self.waits_at[subject] = waits
            return
        self.live[subject] = None
        if action == Action.FREE:
            self.allocator.free(block)
        elif self.waits_at.pop(subject, None) == waits:  # else a wait for all streams has completed it already
            self.allocator.complete_free(block)


def _check_bytes(trace: Trace) -> None:
    """What is counted must fit into 64 bits, with room to spare."""
    requested = np.frombuffer(trace.requested, dtype=np.int64)
    if int(requested.max(initial=0)) * len(requested) <= MAX_LIVE_MIB * MiB:
        return
    if allocated_changes(trace, requested // MiB).cumsum().max(initial=0) > MAX_LIVE_MIB:
        raise InputError("the job holds more than 2^60 bytes at once", hint="no GPU has even a millionth of that")


def _calls(trace: Trace) -> Calls:
    return Calls(trace.actions.tobytes(), trace.subjects.tolist(), trace.requested.tolist(), trace.streams.tolist())


def there_before(trace: Trace) -> Iterator[tuple[int, bool]]:
    """Blocks without an ALLOC event, and of each whether it was freed before: only the end of that is in the trace."""
    actions, subjects = np.frombuffer(trace.actions, np.uint8), np.frombuffer(trace.subjects, np.int64)
    count = np.bincount(subjects[actions == Action.ALLOC], minlength=len(trace.requested))
    if len(count) and count.max() > 1:
        raise InputError(f"the trace allocates block {count.argmax()} twice")
    is_freed = np.zeros(len(count), dtype=bool)
    is_freed[subjects[actions == Action.FREE_COMPLETED]] = True
    is_freed[subjects[actions == Action.FREE_REQUESTED]] = False
    for block in np.flatnonzero(count == 0).tolist():
        yield block, bool(is_freed[block])


def _after_each(progress: Progress, first: int, events: int) -> Ints:
    """What was reserved after each event."""
    starts = np.array([0, *progress.risen], dtype=np.int64)
    return np.repeat(np.array([first, *progress.levels], dtype=np.int64), np.diff(starts, append=events))


def _oom_event(error: OutOfMemory, event: int, block: int) -> OutOfMemoryEvent:
    return OutOfMemoryEvent(
        event, block, error.requested, error.rounded, error.alloc_size, error.allocated, error.reserved
    )
