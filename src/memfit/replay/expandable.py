"""Expandable segments: address space reserved once for each stream and pool, memory mapped into it piece by piece.

    | allocated | free | allocated |  unmapped ...                                              |
    ^ reservation of 1 1/8 of the device; memory comes and goes in whole handles of 2 MiB (small) or 20 MiB (large)

From pytorch c10/cuda/CUDACachingAllocator.cpp: find_expandable_block, map_block, try_allocate_expandable_block and
unmap_block; the same in 2.1, 2.4 and 2.11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.events import Action
from memfit.replay.alloc_config import SMALL_SEGMENT_SIZE
from memfit.replay.blocks import FREE, UNMAPPED, Block, Segment, Shelf
from memfit.replay.driver import Driver

if TYPE_CHECKING:
    from mypy_extensions import i64

ASSUMED_DEVICE = 1 << 40  # where no capacity is known: more than any GPU has


class ExpandableMemory:
    def __init__(self, driver: Driver, segments: dict[int, Segment], large_handle: int) -> None:
        self.driver = driver
        self.segments = segments
        self.large_handle: i64 = large_handle
        self.small_handle: i64 = SMALL_SEGMENT_SIZE
        self.device_total: i64 = driver.capacity or ASSUMED_DEVICE

    def handle_size(self, shelf: Shelf) -> i64:
        return self.small_handle if shelf.pool.small else self.large_handle

    def take(self, shelf: Shelf, size: i64) -> Block | None:
        """Map what is missing for a block of `size` bytes and take it; None if the driver refuses (what was mapped
        until then stays, as free blocks)."""
        block: Block | None = _lowest_room(shelf, size) or self.reserve(shelf)
        if block is not None and block.state == UNMAPPED:
            block = self._map(block, min(block.size, size))
        while block is not None and block.size < size:
            following = block.next
            assert following is not None and following.state == UNMAPPED
            block = self._map(following, min(size - block.size, following.size))
        if block is not None:
            shelf.remove(block)
        return block

    def release(self, shelf: Shelf) -> None:
        """Unmap every whole handle inside a free block; a reservation that holds nothing any more goes too."""
        for block in [block for block in shelf.blocks if block.segment.expandable]:
            self._unmap(block)
            self.drop_if_empty(block.segment)

    def drop_if_empty(self, segment: Segment) -> None:
        if segment.head.state == UNMAPPED and segment.head.next is None:
            segment.shelf.unmapped.remove(segment.head)
            del self.segments[segment.address]

    def reserve(self, shelf: Shelf, address: int | None = None) -> Block:
        """Where the driver says, unless the `address` is known."""
        handle = self.handle_size(shelf)
        size = -(-(self.device_total + self.device_total // 8) // handle) * handle
        if address is None:
            address = self.driver.next_address(size, shelf.pool.small)
        segment = self.segments[address] = Segment(shelf, address, size, expandable=True)
        shelf.add_unmapped(segment.head)
        return segment.head

    def _map(self, block: Block, size: i64) -> Block | None:
        """Back the first `size` bytes (rounded up to handles) of an unmapped block; return the free block it joins."""
        shelf = block.segment.shelf
        handle = self.handle_size(shelf)
        size = -(-size // handle) * handle
        if not self.driver.has_room_for(size):
            return None
        address = block.address
        shelf.unmapped.remove(block)
        if size < block.size:
            shelf.add_unmapped(block.split(size, UNMAPPED))
        block.state = FREE
        if block.prev is not None and block.prev.state == FREE:
            block = block.prev
            shelf.remove(block)
            block.absorb_next()
        if block.next is not None and block.next.state == FREE:
            shelf.remove(block.next)
            block.absorb_next()
        shelf.add(block)
        self.driver.gave(Action.SEGMENT_MAP, address, size, shelf.stream)
        return block

    def _unmap(self, block: Block) -> None:
        shelf, base = block.segment.shelf, block.segment.address
        handle = self.handle_size(shelf)
        begin = base + -((base - block.address) // handle) * handle
        end = base + (block.address + block.size - base) // handle * handle
        if begin >= end:
            return
        shelf.remove(block)
        if begin > block.address:
            front, block = block, block.split(begin - block.address, UNMAPPED)
            shelf.add(front)
        if end < block.address + block.size:
            shelf.add(block.split(end - begin, FREE))
        block.state = UNMAPPED
        if block.prev is not None and block.prev.state == UNMAPPED:
            block = block.prev
            block.absorb_next()
        else:
            shelf.add_unmapped(block)
        if block.next is not None and block.next.state == UNMAPPED:
            shelf.unmapped.remove(block.next)
            block.absorb_next()
        self.driver.took_back(Action.SEGMENT_UNMAP, begin, end - begin, shelf.stream)


def reach(block: Block) -> i64:
    """What a free block could grow to without moving: best fit compares this, not its present size."""
    following = block.next
    if following is not None and following.state == UNMAPPED:
        return block.size + following.size
    return block.size


def _lowest_room(shelf: Shelf, size: i64) -> Block | None:
    """The lowest free or unmapped block from which `size` bytes follow that are free or unmapped."""
    for unmapped in shelf.unmapped:
        before = unmapped.prev
        start = before if before is not None and before.state == FREE else unmapped
        room: i64 = 0
        block = start
        while room < size and (block.state == FREE or block.state == UNMAPPED):
            room += block.size
            if block.next is None:
                break
            block = block.next
        if room >= size:
            return start
    return None
