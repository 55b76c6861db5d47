"""torch's CUDA caching allocator, block by block: which bytes a request takes, and when the driver is asked for more.

    >>> allocator = CachingAllocator(AllocatorConfig())
    >>> block = allocator.malloc(11 * MiB + MiB // 2)
    >>> block.size // MiB, allocator.stats.reserved // MiB      # 0.5 MiB is too little to split off
    (12, 12)
    >>> allocator.free(block)
    >>> allocator.stats.allocated // MiB, allocator.stats.reserved // MiB
    (0, 12)

A request is rounded, then served by the first of these that works:

    1  the smallest free block of its pool and stream that is large enough (lowest address among equals)
    2  new memory from the driver
    3  the release of oversize free blocks, if max_split_size is set; then new memory
    4  a wait for all streams and the release of everything releasable; then new memory; else OutOfMemory

Written from pytorch c10/cuda/CUDACachingAllocator.cpp (DeviceCachingAllocator), rules compared at 1.10, 2.1, 2.4, 2.11.
Left out: private pools (CUDA graphs, MemPool), the free-memory callbacks of CUDA IPC, and garbage_collection_threshold,
which torch heeds only under `set_per_process_memory_fraction`.

`play` is the loop over a trace's events, in which replays spend their time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from memfit.events import Action
from memfit.replay.alloc_config import MAX_REQUEST, MIN_BLOCK_SIZE, SMALL_SIZE, AllocatorConfig
from memfit.replay.blocks import (
    ALLOCATED,
    FREE,
    PENDING,
    AllocatorStats,
    Block,
    Pool,
    Segment,
    SegmentRecord,
    Shelf,
    records,
)
from memfit.replay.driver import Driver
from memfit.replay.expandable import ExpandableMemory, reach

if TYPE_CHECKING:
    from mypy_extensions import i64


NO_LIMIT: Final = 1 << 62


class OutOfMemory(Exception):
    """The allocator gave up. `alloc_size` is what torch's message says it tried to allocate."""

    def __init__(self, *, requested: int, rounded: int, alloc_size: int, allocated: int, reserved: int) -> None:
        super().__init__(f"no room for {alloc_size} bytes: {allocated} allocated, {reserved} reserved")
        self.requested = requested
        self.rounded = rounded
        self.alloc_size = alloc_size
        self.allocated = allocated
        self.reserved = reserved


class CachingAllocator:
    """One device, with what its driver can give this process."""

    def __init__(self, config: AllocatorConfig | None = None, driver: Driver | None = None) -> None:
        self.config = config = config or AllocatorConfig()
        self.driver = driver or Driver()
        self.stats: AllocatorStats = self.driver.stats
        self.small_pool, self.large_pool = Pool(small=True), Pool(small=False)
        self.segment_at: dict[int, Segment] = {}
        self.pending: dict[Block, None] = {}  # freed, but another stream may still use them; in order
        self.expandable = ExpandableMemory(self.driver, self.segment_at, config.large_segment_size)

        self._max_split: i64 = min(config.max_split_size or NO_LIMIT, NO_LIMIT)
        self._max_excess: i64 = min(config.max_non_split_rounding or config.large_segment_size, NO_LIMIT)
        self._small_size: i64 = SMALL_SIZE
        self._least_rest: i64 = MIN_BLOCK_SIZE
        self._rounds_to_512 = max(config.roundup_power2_divisions) <= 1
        self._grows_segments: bool = config.expandable_segments
        self._first_fit_is_best = not config.expandable_segments and config.max_split_size is None

    # -- what a program calls --------------------------------------------------------------------------------

    def malloc(self, requested: i64, stream: int = 0) -> Block | None:
        """The block that serves a request; None for 0 bytes. Raises OutOfMemory."""
        if requested <= 0:
            if requested < 0:
                raise ValueError(f"cannot allocate {requested} bytes")
            return None
        size: i64 = (requested + 511) & ~511 if self._rounds_to_512 else self.config.rounded(requested)
        shelf = self.shelf_for(size, stream)
        at = self.search(shelf, size)
        block = self._new_memory(shelf, requested, size) if at < 0 else shelf.blocks.pop(at)
        self._split(block, size, shelf)
        block.state = ALLOCATED
        block.requested = requested
        self.stats.allocated += block.size
        self.stats.active += block.size
        return block

    def free(self, block: Block) -> None:
        self._let_go(block)
        self._put_back(block)

    def request_free(self, block: Block) -> None:
        """The program let go of a block that another stream may still use: not allocated, not yet reusable."""
        self._let_go(block)
        block.state = PENDING
        self.pending[block] = None

    def complete_free(self, block: Block) -> None:
        """All streams are done with it. A wait (step 4, `empty_cache`) does this for every pending block."""
        del self.pending[block]
        self._put_back(block)

    def empty_cache(self) -> None:
        """Return to the driver every segment without a live block, and every whole free handle."""
        self.stats.num_sync_all_streams += 1
        for block in list(self.pending):
            self.complete_free(block)
        for pool in (self.large_pool, self.small_pool):
            for block in idle_segments(pool):
                self._release(block)
            for shelf in pool.in_order():
                self.expandable.release(shelf)

    # -- serving a request -----------------------------------------------------------------------------------

    def shelf_for(self, size: i64, stream: int) -> Shelf:
        pool = self.small_pool if size <= self._small_size else self.large_pool
        return pool.shelf(stream)

    def search(self, shelf: Shelf, size: i64) -> i64:
        """Which of the free blocks serves a request; -1 if it needs new memory."""
        at = shelf.first_of(size)
        if at == len(shelf.blocks):
            return -1
        return at if self._first_fit_is_best else self._acceptable(shelf, at, size)

    def _acceptable(self, shelf: Shelf, at: i64, size: i64) -> i64:
        """Where the search ends under expandable segments and max_split_size; -1 for nowhere."""
        blocks = shelf.blocks
        last: i64 = len(blocks) - 1
        if blocks[at].segment.expandable:
            if self._grows_segments:
                while at < last and blocks[at].segment.expandable and reach(blocks[at + 1]) < reach(blocks[at]):
                    at += 1
            else:
                while at <= last and blocks[at].segment.expandable:
                    at += 1
                if at > last:
                    return -1
        # Neither rule looks further: a block that is refused here is a miss even if the next one would do.
        if size < self._max_split <= blocks[at].size:
            return -1
        if size >= self._max_split and blocks[at].size >= size + self._max_excess:
            return -1
        return at

    def _split(self, block: Block, size: i64, shelf: Shelf) -> None:
        """Shelve what the request does not need, unless too little is left or the block is oversize."""
        rest = block.size - size
        if shelf.pool.small or self._grows_segments:
            splits = rest >= self._least_rest
        else:
            splits = rest > self._small_size and size < self._max_split
        if splits:
            shelf.add(block.split(size, FREE))

    def _new_memory(self, shelf: Shelf, requested: i64, size: i64) -> Block:
        alloc_size: i64 = self.config.segment_size(size)
        if size < MAX_REQUEST:
            block = self._attempt(shelf, size, alloc_size)
            if block is None and self._release_oversize(shelf, size):
                block = self._attempt(shelf, size, alloc_size)
            if block is None:
                self.empty_cache()
                self.stats.num_alloc_retries += 1
                block = self._attempt(shelf, size, alloc_size)
            if block is not None:
                return block
        raise OutOfMemory(
            requested=requested,
            rounded=size,
            alloc_size=alloc_size,
            allocated=self.stats.allocated,
            reserved=self.stats.reserved,
        )

    def _attempt(self, shelf: Shelf, size: i64, alloc_size: i64) -> Block | None:
        if self._grows_segments:
            return self.expandable.take(shelf, size)
        if not self.driver.has_room_for(alloc_size):
            return None
        address = self.driver.next_address(alloc_size, shelf.pool.small)
        self.driver.gave(Action.SEGMENT_ALLOC, address, alloc_size, shelf.stream)
        segment = self.segment_at[address] = Segment(shelf, address, alloc_size)
        return segment.head

    # -- taking back -----------------------------------------------------------------------------------------

    def _let_go(self, block: Block) -> None:
        if block.state != ALLOCATED:
            raise ValueError(f"cannot free {block!r}")
        self.stats.allocated -= block.size

    def _put_back(self, block: Block) -> None:
        """Merge with free neighbours, the one before first, and shelve the result."""
        self.stats.active -= block.size
        shelf = block.segment.shelf
        before = block.prev
        following = block.next
        block.state = FREE
        if before is not None and before.state == FREE:
            shelf.remove(before)
            before.absorb_next()
            block = before
        if following is not None and following.state == FREE:
            shelf.remove(following)
            block.absorb_next()
        shelf.add(block)

    def _release(self, block: Block) -> None:
        """cudaFree of a segment that is one free block."""
        shelf, segment = block.segment.shelf, block.segment
        shelf.remove(block)
        del self.segment_at[segment.address]
        self.driver.took_back(Action.SEGMENT_FREE, segment.address, segment.size, shelf.stream)

    def _release_oversize(self, shelf: Shelf, size: i64) -> bool:
        """One free block that is large enough, or else from the largest downwards until enough is released."""
        if self._max_split == NO_LIMIT:
            return False
        wanted = max(size, self._max_split)
        at = shelf.first_of(wanted)
        if at < len(shelf.blocks) and not shelf.blocks[at].segment.expandable:
            self._release(shelf.blocks[at])
            return True
        released = 0
        for block in reversed(shelf.blocks[:at]):
            if released >= wanted or block.size < self._max_split:
                break
            if not block.segment.expandable:
                released += block.size
                self._release(block)
        return released >= wanted

    # -- layouts ---------------------------------------------------------------------------------------------

    def blocks(self) -> Iterator[Block]:
        for segment in self.segment_at.values():
            yield from segment

    def layout(self) -> tuple[SegmentRecord, ...]:
        """Every segment as a snapshot would show it, by address."""
        found = [record for segment in self.segment_at.values() for record in records(segment)]
        return tuple(sorted(found, key=lambda record: record.address))

    def twin(self, capacity: int | None) -> tuple[CachingAllocator, dict[Block, Block]]:
        """Another in the same state, with its own capacity; and which of its blocks stands for which of these."""
        driver = Driver(capacity, self.driver.next_address)
        driver.stats = replace(self.stats)
        other = CachingAllocator(self.config, driver)
        twins: dict[Block, Block] = {}
        for segment in self.segment_at.values():
            shelf = other._like(segment.shelf)
            copied = Segment(shelf, segment.address, segment.size, expandable=segment.expandable)
            other.segment_at[segment.address] = copied
            twin = copied.head
            for block in segment:
                rest = twin.split(block.size, FREE) if block.size < twin.size else twin
                twin.state = block.state
                twin.requested = block.requested
                twins[block] = twin
                twin = rest
        for pool in (self.small_pool, self.large_pool):
            for shelf in pool.shelves.values():
                its = other._like(shelf)
                its.blocks = [twins[block] for block in shelf.blocks]
                its.unmapped = [twins[block] for block in shelf.unmapped]
        other.pending = {twins[block]: None for block in self.pending}
        return other, twins

    def _like(self, shelf: Shelf) -> Shelf:
        pool = self.small_pool if shelf.pool.small else self.large_pool
        return pool.shelf(shelf.stream)


def idle_segments(pool: Pool) -> list[Block]:
    """Plain segments that are one free block, in the order in which torch would return them to the driver."""
    return [
        block for shelf in pool.in_order() for block in shelf.blocks if not (block.segment.expandable or block.is_split)
    ]


class Calls:
    """A trace as the loop reads it. Lists are read faster than arrays, and one of these serves many replays."""

    __slots__ = ("actions", "requested", "streams", "subjects")

    def __init__(self, actions: bytes, subjects: list[int], requested: list[int], streams: list[int]) -> None:
        self.actions = actions
        self.subjects = subjects
        self.requested = requested
        self.streams = streams


class Progress:
    """How far a replay has come, and what it came to on the way."""

    __slots__ = ("event", "levels", "live", "risen", "sizes")

    def __init__(self, live: list[Block | None], sizes: list[int] | None) -> None:
        self.event: i64 = 0  # the next one to play
        self.live = live  # the block of the allocator that each block of the trace has now
        self.sizes = sizes  # what it took there, if anyone wants to know
        self.risen: list[int] = []  # the events that changed what is reserved
        self.levels: list[int] = []  # and what it was after each of them

    def twin(self, twins: dict[Block, Block]) -> Progress:
        """As far as this one, with other blocks in place of these."""
        other = Progress([None if held is None else twins[held] for held in self.live], None)
        other.event = self.event
        return other


def play(
    allocator: CachingAllocator, calls: Calls, progress: Progress, until: i64, seldom: Callable[[int, int], None]
) -> None:
    """Play events up to `until`; `seldom(action, subject)` does what is neither an allocation nor a plain free. Raises
    OutOfMemory, with `progress.event` the one that failed."""
    alloc: i64 = Action.ALLOC
    free: i64 = Action.FREE
    last_of_program: i64 = Action.EMPTY_CACHE  # what comes after it is a mark, or was seen of the driver
    actions = calls.actions
    subjects = calls.subjects
    requested = calls.requested
    streams = calls.streams
    live = progress.live
    sizes = progress.sizes
    stats = allocator.stats
    reserved: i64 = stats.reserved
    event: i64 = progress.event
    try:
        while event < until:
            action: i64 = actions[event]
            subject: i64 = subjects[event]
            if action == alloc:
                block = allocator.malloc(requested[subject], streams[subject])
                live[subject] = block
                if sizes is not None and block is not None:
                    sizes[subject] = block.size
            elif action <= last_of_program:
                held = live[subject] if action == free else None
                if held is not None:
                    live[subject] = None
                    allocator.free(held)
                else:
                    seldom(action, subject)
            if stats.reserved != reserved:
                reserved = stats.reserved
                progress.risen.append(event)
                progress.levels.append(reserved)
            event += 1
    finally:
        progress.event = event
