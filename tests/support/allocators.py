"""Allocators and replays that begin as a recording shows that memory lay: the model is held against recordings so."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.errors import InputError
from memfit.events import Trace
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.allocator import CachingAllocator
from memfit.replay.blocks import ALLOCATED, FREE, PENDING, STATE_NAMES, UNMAPPED, Block, Segment, SegmentRecord, Shelf
from memfit.replay.driver import AddressSource, Driver
from memfit.replay.replay import DEFAULTS, OutOfMemoryEvent, Player, Replay, Replays, there_before

MAX_ADDRESS = 1 << 60


def holding(
    segments: Sequence[SegmentRecord], config: AllocatorConfig | None = None, driver: Driver | None = None
) -> CachingAllocator:
    """An allocator that already holds these segments and blocks, as if it had got there by itself."""
    if max((record.address + record.size for record in segments), default=0) > MAX_ADDRESS:
        raise InputError(f"a segment lies beyond {MAX_ADDRESS:#x}, where no GPU has memory")
    allocator = CachingAllocator(config, driver)
    for record in sorted(segments, key=lambda record: record.address):
        _install(allocator, record)
    return allocator


def _install(allocator: CachingAllocator, record: SegmentRecord) -> None:
    shelf = (allocator.small_pool if record.small else allocator.large_pool).shelf(record.stream)
    allocator.stats.reserved += record.size
    allocator.stats.reserved_peak = max(allocator.stats.reserved_peak, allocator.stats.reserved)
    if record.expandable:
        allocator._first_fit_is_best = False
        block = _adopted(allocator, shelf, record.address, record.size)
    else:
        segment = allocator.segment_at[record.address] = Segment(shelf, record.address, record.size)
        block = segment.head
    for piece in record.blocks:
        rest = block.split(piece.size, FREE) if piece.size < block.size else block
        block.requested = piece.requested
        if piece.state == STATE_NAMES[FREE]:
            block.state = FREE
            shelf.add(block)
        else:
            block.state = ALLOCATED
            allocator.stats.allocated += block.size
            allocator.stats.active += block.size
            if piece.state == STATE_NAMES[PENDING]:
                allocator.request_free(block)
        block = rest


def _adopted(allocator: CachingAllocator, shelf: Shelf, address: int, size: int) -> Block:
    """A range that already holds memory. One below all reservations becomes the start of a new one."""
    for block in shelf.unmapped:
        if block.address <= address and address + size <= block.address + block.size:
            break
    else:
        block = allocator.expandable.reserve(shelf, address)
    if block.address < address:
        block = block.split(address - block.address, UNMAPPED)
    else:
        shelf.unmapped.remove(block)
    if size < block.size:
        shelf.add_unmapped(block.split(size, UNMAPPED))
    return block


def peek(allocator: CachingAllocator, requested: int, stream: int = 0) -> Block | None:
    """The free block that a request would be cut from; None if it would need new memory."""
    size = allocator.config.rounded(requested)
    shelf = allocator.shelf_for(size, stream)
    at = allocator.search(shelf, size)
    return None if at < 0 else shelf.blocks[at]


class PlayerFrom(Player):
    """Of a trace whose first blocks lie where the allocator has them."""

    def place_what_was_there(self) -> OutOfMemoryEvent | None:
        there = {b.address: b for b in self.allocator.blocks() if b.state in (ALLOCATED, PENDING)}
        for block, is_freed in there_before(self.trace):
            held = there.get(self.trace.addresses[block])
            if held is None and is_freed:
                self.freed_before.add(block)
                continue
            if held is None:
                held = self.allocator.malloc(self.trace.requested[block], self.trace.streams[block])
            elif held.state == PENDING:
                self.waits_at[block] = self.allocator.stats.num_sync_all_streams
            self.lies_there(block, held)
        return None


class _ReplaysFrom(Replays):
    def __init__(
        self, trace: Trace, config: AllocatorConfig, start: Sequence[SegmentRecord], addresses: AddressSource | None
    ) -> None:
        super().__init__(trace, config)
        self.start, self.addresses = start, addresses

    def _player(self, driver: Driver, *, notes_sizes: bool = False) -> Player:
        if self.addresses is not None:
            driver.next_address = self.addresses
        allocator = holding(self.start, self.config, driver)
        return PlayerFrom(self.trace, allocator, calls=self._calls, notes_sizes=notes_sizes)


def replay_from(
    start: Sequence[SegmentRecord], trace: Trace, config: AllocatorConfig = DEFAULTS, *,
    capacity: int | None = None, addresses: AddressSource | None = None,
) -> Replay:  # fmt: skip
    """As `replay`, from this layout on."""
    return _ReplaysFrom(trace, config, start, addresses).timeline(capacity=capacity)
