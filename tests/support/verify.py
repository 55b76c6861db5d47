"""Is the model right? A recording says where each block was placed and what the driver gave and took back; the model,
fed with the program's calls alone, must arrive at the same places and make the same calls at the same moments.

    >>> snapshot = read_snapshot("snapshot.pickle")
    >>> trace, end = snapshot.traces[0], final_layout(snapshot)
    >>> config = AllocatorConfig.from_snapshot(snapshot.settings)
    >>> verify(trace, config, start=rewind(trace, end, config), end=end)
    []

Segments are bound to recorded ones by giving the model the recorded address whenever it asks for memory. Whether the
driver was out of memory is not recorded, but shows: where segments went back before one came, it had refused. Only
where frees on other streams complete at the same moment is it a guess, whether a wait or `empty_cache` released them.

How memory lay when a recording began: the snapshot's final segments, with the recorded events undone from the last
to the first.

A recording that starts after the model was loaded has no events for what was there. But the snapshot shows every
segment and block at the end, and each event names its address; so going backwards, an `alloc` takes its block away, a
`free` puts one back, and what no live block covers is free.

One thing is not written anywhere: the size of a block that was there at the start and freed later. It is the rounded
request, and in the large pool perhaps a tail of up to 1 MiB that was too small to split off; see `_size`.

What must hold of an allocator after every call, whatever was called: for tests, and for a doubtful replay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from support.addresses import rising_addresses
from support.allocators import MAX_ADDRESS, PlayerFrom, holding, peek

from memfit.errors import InputError
from memfit.events import Action, Trace
from memfit.replay.alloc_config import MIN_BLOCK_SIZE, SMALL_SEGMENT_SIZE, SMALL_SIZE, AllocatorConfig
from memfit.replay.allocator import CachingAllocator, OutOfMemory, idle_segments
from memfit.replay.blocks import (
    ALLOCATED,
    FREE,
    PENDING,
    STATE_NAMES,
    UNMAPPED,
    Block,
    BlockRecord,
    Pool,
    Segment,
    SegmentRecord,
    Shelf,
)
from memfit.replay.driver import Driver
from memfit.replay.replay import DEFAULTS
from memfit.snapshots.read import Snapshot

RELEASES = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
DRIVER_ACTIONS = (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where model and recording part. `nearby`: free blocks of about the size in question, in order of search."""

    event: int  # the number of events for a difference in the final layout
    what: str
    recorded: str
    modelled: str
    nearby: tuple[BlockRecord, ...] = ()

    def __str__(self) -> str:
        free = ", ".join(f"{block.size} at {block.address:#x}" for block in self.nearby) or "none"
        return (
            f"event {self.event}: {self.what}: recorded {self.recorded}, modelled {self.modelled}; free nearby: {free}"
        )


def verify(
    trace: Trace, config: AllocatorConfig = DEFAULTS, *, limit: int | None = None, card: int | None = None,
    start: Sequence[SegmentRecord] = (), end: Sequence[SegmentRecord] | None = None,
) -> list[Mismatch]:  # fmt: skip
    """Empty if the model agrees with the recording. It stops at the first event that differs, since what follows one
    says nothing; differences from the final layout `end` are all listed. `card`: its bytes, where known; an expandable
    segment reserves addresses by them, and one whose addresses are used up is left for another."""
    checker = _Checker(trace, config, limit, card, start)
    for event, (action, subject) in enumerate(trace.events()):
        mismatch = checker.step(event, action, subject)
        if mismatch is not None:
            return [mismatch]
    mismatch = checker.finish(len(trace))
    if mismatch is not None:
        return [mismatch]
    return [] if end is None else list(_differences(len(trace), end, checker.allocator.layout()))


@dataclass(frozen=True, slots=True)
class _Call:
    action: Action
    address: int
    size: int

    def __str__(self) -> str:
        return f"{self.action.name.lower()} of {self.size} at {self.address:#x}"


class _RecordedDriver(Driver):
    """Gives what the recording shows that the driver gave; refuses where it shows that memory had to be released."""

    def __init__(self, limit: int | None, card: int | None) -> None:
        super().__init__(card)
        self.limit = limit
        self.recorded: list[_Call] = []
        self.made: list[_Call] = []
        self.ran_out = False
        self.stream = 0
        self.segment_at: dict[int, Segment] = {}
        self._elsewhere = rising_addresses(1 << 56)  # for what the recording does not show
        self.next_address = self._recorded_address

    def expect(self, calls: list[_Call], *, ran_out: bool = False, stream: int = 0) -> None:
        self.recorded, self.made, self.ran_out, self.stream = calls, [], ran_out, stream

    def has_room_for(self, size: int) -> bool:
        if self.limit is not None and self.stats.reserved + size > self.limit:
            return False
        coming = self._coming()
        return not self.ran_out if coming is None else coming.action not in RELEASES

    def gave(self, action: Action, address: int, size: int, stream: int) -> None:
        super().gave(action, address, size, stream)
        self.made.append(_Call(action, address, size))

    def took_back(self, action: Action, address: int, size: int, stream: int) -> None:
        super().took_back(action, address, size, stream)
        self.made.append(_Call(action, address, size))

    def _coming(self) -> _Call | None:
        return self.recorded[len(self.made)] if len(self.made) < len(self.recorded) else None

    def _recorded_address(self, size: int, small: bool) -> int:
        """An expandable segment reserves addresses before it is refused memory, so look past the releases. What comes
        then may lie in an older reservation: the new one is above it, for the lowest room is taken.

        How far a reservation reaches is not recorded, and the model's may be larger than the device's. They overlap
        then with those of the other pool and of other streams, which does no harm: they have nothing in common."""
        coming = next((call.address for call in self.recorded[len(self.made) :] if call.action not in RELEASES), None)
        alike = (s for s in self.segment_at.values() if (s.shelf.pool.small, s.shelf.stream) == (small, self.stream))
        if coming is None or any(s.address <= coming < s.address + s.size for s in alike):
            return self._elsewhere(size, small)
        return coming


class _Checker:
    def __init__(
        self, trace: Trace, config: AllocatorConfig, limit: int | None, card: int | None, start: Sequence[SegmentRecord]
    ) -> None:
        if max(trace.range_addresses, default=0) > MAX_ADDRESS:
            raise InputError(f"the recording names an address beyond {MAX_ADDRESS:#x}, where no GPU has memory")
        self.trace = trace
        self.driver = _RecordedDriver(limit, card)
        self.allocator = holding(start, config, self.driver)
        self.driver.segment_at = self.allocator.segment_at
        self.player = PlayerFrom(trace, self.allocator)
        self.player.place_what_was_there()
        self.calls: list[_Call] = []  # seen of the driver since the last call of the program
        self.completed: list[int] = []  # blocks whose frees were seen to complete since then
        self.emptied = self.ran_out = False

    def step(self, event: int, action: int, subject: int) -> Mismatch | None:
        if action in DRIVER_ACTIONS:
            address, size = self.trace.range_addresses[subject], self.trace.range_sizes[subject]
            self.calls.append(_Call(Action(action), address, size))
            return None
        if action == Action.MARK:
            return None
        if action == Action.ALLOC:
            requested, stream = self.trace.requested[subject], self.trace.streams[subject]
            return self._explain_releases(event, requested, stream) or self._alloc(event, subject, requested, stream)
        if action == Action.OOM:
            rounded, stream = self.trace.range_sizes[subject], self.trace.range_streams[subject]
            self.ran_out = True
            return self._explain_releases(event, rounded, stream) or self._oom(event, rounded, stream)
        if action == Action.FREE_COMPLETED and not self.calls:
            self.completed.append(subject)
            return None
        mismatch = self.finish(event)
        if action == Action.EMPTY_CACHE:
            self.emptied = True
        else:
            self.player.do(action, subject)
        return mismatch

    def finish(self, event: int) -> Mismatch | None:
        """Nothing else explains what the driver was seen to do but a call of `empty_cache`."""
        self._complete()
        return self._empty_cache(event) if self.calls or self.emptied else None

    def _alloc(self, event: int, block: int, requested: int, stream: int) -> Mismatch | None:
        if not requested:
            return None
        self._expect(self.calls, stream)
        try:
            held = self.allocator.malloc(requested, stream)
        except OutOfMemory:
            return self._mismatch(event, "an allocation", "a block", "out of memory", requested, stream)
        assert held is not None
        self.player.live[block] = held
        self._settle()
        if self.driver.made != self.driver.recorded:
            return self._mismatch(event, "driver calls", *self._both(), requested, stream)
        recorded = self.trace.addresses[block]
        if held.address != recorded:
            what = f"the place of {requested} bytes"
            return self._mismatch(event, what, f"{recorded:#x}", f"{held.address:#x}", requested, stream)
        return None

    def _oom(self, event: int, rounded: int, stream: int) -> Mismatch | None:
        self._expect(self.calls, stream)
        try:
            self.allocator.malloc(rounded, stream)
        except OutOfMemory as error:
            self._settle()
            if error.rounded != rounded:
                return self._mismatch(event, "a failed request", str(rounded), str(error.rounded), rounded, stream)
            if self.driver.made != self.driver.recorded:
                return self._mismatch(event, "driver calls", *self._both(), rounded, stream)
            return None
        return self._mismatch(event, f"a request of {rounded} bytes", "out of memory", "served", rounded, stream)

    def _settle(self) -> None:
        self._complete()
        expandable = self.allocator.expandable
        for segment in [each for each in expandable.segments.values() if each.expandable]:
            expandable.drop_if_empty(segment)  # memory was refused for it: the recording does not say where it lies

    def _complete(self) -> None:
        for block in self.completed:
            self.player.do(Action.FREE_COMPLETED, block)
        self.completed.clear()

    def _explain_releases(self, event: int, requested: int, stream: int) -> Mismatch | None:
        """Before a request, frees were seen to complete and segments to go back: on its behalf, or by `empty_cache`?"""
        releases = bool(self.calls) and self.calls[0].action in RELEASES
        missed = self.ran_out or (bool(self.calls) and self.calls[-1].action not in RELEASES)
        if not (missed and self._would_hit_once_completed(requested, stream)):
            self._complete()  # else they completed after the search, when the allocator waited for all streams
        cached = bool(requested) and peek(self.allocator, requested, stream) is not None
        if self.emptied or (releases and (not missed or cached or self._released_everything())):
            self._complete()
            return self._empty_cache(event)
        return None

    def _would_hit_once_completed(self, requested: int, stream: int) -> bool:
        if not self.completed or len(self.completed) < len(self.allocator.pending):
            return False  # a wait completes them all
        trial = holding(self.allocator.layout(), self.allocator.config)
        for block in list(trial.pending):
            trial.complete_free(block)
        return peek(trial, requested, stream) is not None

    def _released_everything(self) -> bool:
        """With max_split_size a request would have released oversize blocks first, in another order."""
        if self.allocator.config.max_split_size is None or self.allocator.pending:
            return False
        pools = self.allocator.large_pool, self.allocator.small_pool
        idle = [block.address for pool in pools for block in idle_segments(pool)]
        return idle == [call.address for call in self.calls if call.action == Action.SEGMENT_FREE]

    def _empty_cache(self, event: int) -> Mismatch | None:
        count = next((i for i, call in enumerate(self.calls) if call.action not in RELEASES), len(self.calls))
        released, rest = self.calls[:count], self.calls[count:]
        self.driver.expect(released)
        self.calls, self.emptied = rest, False
        self.allocator.empty_cache()
        if self.driver.made != released:
            return self._mismatch(event, "released by empty_cache", *self._both(), 0, 0)
        return None

    def _expect(self, calls: list[_Call], stream: int) -> None:
        self.driver.expect(calls, ran_out=self.ran_out, stream=stream)
        self.calls, self.ran_out = [], False

    def _both(self) -> tuple[str, str]:
        return _listed(self.driver.recorded, self.driver.made), _listed(self.driver.made, self.driver.recorded)

    def _mismatch(self, event: int, what: str, recorded: str, modelled: str, requested: int, stream: int) -> Mismatch:
        size = self.allocator.config.rounded(requested)
        shelf = self.allocator.shelf_for(size, stream)
        at = shelf.first_of(size)
        nearby = tuple(BlockRecord(b.address, b.size, "inactive", 0) for b in shelf.blocks[max(at - 3, 0) : at + 3])
        return Mismatch(event, what, recorded, modelled, nearby)


def _listed(calls: list[_Call], others: list[_Call]) -> str:
    """From the first that differs; a burst can have hundreds."""
    first = next(
        (i for i, (a, b) in enumerate(zip(calls, others, strict=False)) if a != b), min(len(calls), len(others))
    )
    shown = ", ".join(str(call) for call in calls[first : first + 3])
    return f"{len(calls)} calls" + (f", the {first + 1}th of them {shown}" if shown else "")


def _differences(
    event: int, recorded: Iterable[SegmentRecord], modelled: Iterable[SegmentRecord]
) -> Iterable[Mismatch]:
    ours = {segment.address: segment for segment in modelled}
    theirs = {segment.address: segment for segment in recorded}
    for address in sorted(ours.keys() | theirs.keys()):
        left, right = _shape(theirs.get(address)), _shape(ours.get(address))
        if left != right:
            yield Mismatch(event, f"the segment at {address:#x}", left, right)


def _shape(segment: SegmentRecord | None) -> str:
    """Everything but the requested size of free blocks, which is stale in snapshots."""
    if segment is None:
        return "nothing"
    kind = "small" if segment.small else "large"
    blocks = " ".join(
        f"{b.size}:{b.state}" + (f":{b.requested}" if b.state != "inactive" else "") for b in segment.blocks
    )
    return f"{segment.size} bytes, {kind}, stream {segment.stream}, expandable {segment.expandable}: {blocks}"


def final_layout(snapshot: Snapshot, device: int = 0) -> tuple[SegmentRecord, ...]:
    """The segments of one device in the default pools; private pools (CUDA graphs) are not modelled."""
    return tuple(
        SegmentRecord(
            segment.address,
            segment.total_size,
            segment.stream,
            segment.segment_type == "small",
            segment.is_expandable,
            tuple(BlockRecord(b.address, b.size, b.state, b.requested_size) for b in segment.blocks),
        )
        for segment in snapshot.segments
        if segment.device == device and segment.pool_id == (0, 0)
    )


def rewind(trace: Trace, final: tuple[SegmentRecord, ...], config: AllocatorConfig) -> tuple[SegmentRecord, ...]:
    """The layout before the first event of a recorded trace that ended in `final`."""
    past = _Past(trace, final, config)
    for event in range(len(trace) - 1, -1, -1):
        past.undo(event, trace.actions[event], trace.subjects[event])
    return tuple(past.layout())


@dataclass(slots=True)
class _Range:
    """Memory that the driver had handed out: a segment, or a mapped part of an expandable one."""

    address: int
    size: int
    stream: int
    small: bool
    expandable: bool

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass(slots=True)
class _Live:
    size: int  # 0: not known
    requested: int
    state: int
    freed_at: int = 0


class _Past:
    def __init__(self, trace: Trace, final: tuple[SegmentRecord, ...], config: AllocatorConfig) -> None:
        self.trace = trace
        self.config = config
        self.ranges = [_Range(s.address, s.size, s.stream, s.small, s.expandable) for s in final]
        self.live = {
            block.address: _Live(block.size, block.requested, STATE_NAMES.index(block.state))
            for segment in final
            for block in segment.blocks
            if block.state != STATE_NAMES[FREE]
        }

    def undo(self, event: int, action: int, subject: int) -> None:
        if action == Action.ALLOC:
            if self.trace.requested[subject] and self.live.pop(self.trace.addresses[subject], None) is None:
                raise InputError(f"event {event} allocates what is not in the snapshot's final state")
        elif action in (Action.FREE, Action.FREE_COMPLETED):
            state = ALLOCATED if action == Action.FREE else PENDING
            self.live[self.trace.addresses[subject]] = _Live(0, self.trace.requested[subject], state, event)
        elif action == Action.FREE_REQUESTED:
            if self.trace.addresses[subject] not in self.live:
                raise InputError(f"event {event} frees what is not in the snapshot's final state")
            self.live[self.trace.addresses[subject]].state = ALLOCATED
        elif action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
            self._take_away(event, self.trace.range_addresses[subject], self.trace.range_sizes[subject])
        elif action in (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP):
            self._give_back(subject, expandable=action == Action.SEGMENT_UNMAP)

    def _take_away(self, event: int, address: int, size: int) -> None:
        for at, held in enumerate(self.ranges):
            if held.address <= address and address + size <= held.end:
                parts = ((held.address, address), (address + size, held.end))
                self.ranges[at : at + 1] = [
                    _Range(start, end - start, held.stream, held.small, held.expandable)
                    for start, end in parts
                    if start < end
                ]
                return
        raise InputError(f"event {event} adds memory that is not in the snapshot's final state")

    def _give_back(self, subject: int, *, expandable: bool) -> None:
        address, size = self.trace.range_addresses[subject], self.trace.range_sizes[subject]
        given = _Range(address, size, self.trace.range_streams[subject], size == SMALL_SEGMENT_SIZE, expandable)
        if expandable:
            touching = [r for r in self.ranges if r.expandable and (r.end == address or r.address == given.end)]
            given.small = touching[0].small if touching else bool(size % self.config.large_segment_size)
            for held in touching:
                self.ranges.remove(held)
                given.address, given.size = min(given.address, held.address), given.size + held.size
        self.ranges.append(given)

    def layout(self) -> Iterator[SegmentRecord]:
        starts = sorted(self.live)
        for held in sorted(self.ranges, key=lambda each: each.address):
            inside = starts[bisect_left(starts, held.address) : bisect_left(starts, held.end)]
            blocks: list[BlockRecord] = []
            at = held.address
            for address, ceiling in zip(inside, [*inside, held.end][1:], strict=True):
                live = self.live[address]
                size = live.size or self._size(address, live, held, ceiling)
                if at < address:
                    blocks.append(BlockRecord(at, address - at, STATE_NAMES[FREE], 0))
                if address < at or address + size > ceiling:
                    raise InputError(f"the recorded events overlap at address {address:#x}")
                blocks.append(BlockRecord(address, size, STATE_NAMES[live.state], live.requested))
                at = address + size
            if at < held.end:
                blocks.append(BlockRecord(at, held.end - at, STATE_NAMES[FREE], 0))
            yield SegmentRecord(held.address, held.size, held.stream, held.small, held.expandable, tuple(blocks))

    def _size(self, address: int, live: _Live, held: _Range, ceiling: int) -> int:
        """Of a block that was freed during the recording. The next live block, or the end, is at `ceiling`."""
        rounded = self.config.rounded(live.requested)
        least = address + rounded
        if held.small or held.expandable or least >= ceiling:
            return rounded
        oversize = self.config.max_split_size is not None and rounded >= self.config.max_split_size
        if oversize or ceiling - least <= SMALL_SIZE:  # no free block of the large pool is as small as that
            return ceiling - address
        return self._next_start(least, live.freed_at, default=least) - address

    def _next_start(self, least: int, before: int, *, default: int) -> int:
        """Where a block was placed right behind, while the one in question lived: the free block there began so."""
        placed = self._placements[bisect_left(self._placements, (least, 0)) :]
        for address, event in placed:
            if address > least + SMALL_SIZE:
                break
            if event < before:
                return address
        return default

    @cached_property
    def _placements(self) -> list[tuple[int, int]]:
        events = enumerate(self.trace.events())
        return sorted((self.trace.addresses[b], event) for event, (action, b) in events if action == Action.ALLOC)


class InvariantError(AssertionError):
    """The model of the allocator contradicts itself: a bug in memfit."""


def check_invariants(allocator: CachingAllocator) -> None:
    blocks = list(allocator.blocks())
    for segment in allocator.segment_at.values():
        _segment_is_tiled(segment)
    for pool in (allocator.small_pool, allocator.large_pool):
        _shelves_hold_exactly_the_free_blocks(pool, [b for b in blocks if b.segment.shelf.pool is pool])
    _require(set(allocator.pending) == {b for b in blocks if b.state == PENDING}, "pending blocks are remembered")
    _counters_match(allocator, blocks)


def _require(condition: bool, law: str, *subject: object) -> None:
    if not condition:
        raise InvariantError(f"broken: {law} {subject or ''}")


def _segment_is_tiled(segment: Segment) -> None:
    blocks = list(segment)
    _require(
        blocks[0].address == segment.address and blocks[0].prev is None, "a segment starts with its head", blocks[0]
    )
    end = blocks[-1].address + blocks[-1].size
    _require(end == segment.address + segment.size, "blocks fill their segment", blocks[-1])
    for block in blocks:
        _require(block.size > 0 and block.size % MIN_BLOCK_SIZE == 0, "a block is a multiple of 512 bytes", block)
        _require(block.segment is segment, "a block knows its segment", block)
        _require(segment.expandable or block.state != UNMAPPED, "plain segments hold memory throughout", block)
        if block.state in (ALLOCATED, PENDING):
            _require(0 < block.requested <= block.size, "a block is at least as large as its request", block)
    for left, right in pairwise(blocks):
        _require(left.address + left.size == right.address and right.prev is left, "no gap, no overlap", left, right)
        merged = left.state != right.state or left.state not in (FREE, UNMAPPED)
        _require(merged, "no two neighbours are both free, or both unmapped", left, right)


def _shelves_hold_exactly_the_free_blocks(pool: Pool, blocks: list[Block]) -> None:
    for shelf in pool.shelves.values():
        places = [(block.size, block.address) for block in shelf.blocks]
        _require(places == sorted(places), "a shelf is sorted")
        _require(_at_home(shelf, shelf.blocks, blocks, FREE), "a shelf holds the free blocks of its stream")
        _require(_at_home(shelf, shelf.unmapped, blocks, UNMAPPED), "and the ranges without memory")
        order = [block.address for block in shelf.unmapped]
        _require(order == sorted(order), "unmapped ranges are sorted by address")


def _at_home(shelf: Shelf, held: list[Block], blocks: list[Block], state: int) -> bool:
    expected = {block for block in blocks if block.state == state and block.segment.shelf is shelf}
    return len(held) == len(expected) and set(held) == expected


def _counters_match(allocator: CachingAllocator, blocks: list[Block]) -> None:
    def total(*states: int) -> int:
        return sum(block.size for block in blocks if block.state in states)

    stats = allocator.stats
    counted = {
        "allocated": total(ALLOCATED),
        "active": total(ALLOCATED, PENDING),
        "reserved": total(ALLOCATED, PENDING, FREE),
    }
    for name, value in counted.items():
        _require(getattr(stats, name) == value, f"{name} counts what is there", getattr(stats, name), value)
    _require(stats.reserved_peak >= stats.reserved, "the peak is no lower than its value", stats.reserved_peak)
    capacity = allocator.driver.capacity
    _require(capacity is None or stats.reserved <= capacity, "reserved never passes capacity", stats.reserved, capacity)
