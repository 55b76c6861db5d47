"""What must hold of an allocator after every call, whatever was called: for tests, and for a doubtful replay."""

from __future__ import annotations

from itertools import pairwise

from memfit.core.alloc_config import MIN_BLOCK_SIZE
from memfit.core.allocator import CachingAllocator
from memfit.core.blocks import ALLOCATED, FREE, PENDING, UNMAPPED, Block, Pool, Segment, Shelf


class InvariantError(AssertionError):
    """The model of the allocator contradicts itself: a bug in memfit."""


def check(allocator: CachingAllocator) -> None:
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
    live = [block for block in blocks if block.state in (ALLOCATED, PENDING)]
    free_pieces = [b for b in blocks if b.state == FREE and b.is_split and not b.segment.expandable]
    counted = {
        "allocated": total(ALLOCATED),
        "active": total(ALLOCATED, PENDING),
        "requested": sum(block.requested for block in live),
        "reserved": total(ALLOCATED, PENDING, FREE),
        "inactive_split": sum(block.size for block in free_pieces),
        "inactive_split_blocks": len(free_pieces),
        "active_blocks": len(live),
        "allocations": sum(block.state == ALLOCATED for block in blocks),
        "segments": sum(not segment.expandable for segment in allocator.segment_at.values()),
    }
    for name, value in counted.items():
        current, peak = getattr(stats, name), getattr(stats, f"{name}_peak")
        _require(current == value, f"{name} counts what is there", current, value)
        _require(peak >= current, f"the peak of {name} is no lower than its value", peak, current)
    capacity = allocator.driver.capacity
    _require(capacity is None or stats.reserved <= capacity, "reserved never passes capacity", stats.reserved, capacity)
