"""The pieces that the caching allocator moves about: segments cut into blocks, and shelves of free blocks.

    segment   one range of addresses from the driver; its blocks tile it, each linked to its neighbours
    block     a piece of a segment: free, allocated, waiting for another stream, or (expandable) without memory
    shelf     the free blocks of one pool and one stream, in the order of torch's std::set: size, then address
    pool      small (blocks of up to 1 MiB) or large

Of two blocks that merge the lower one stays, so the object at the start of a segment is the same all its life.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mypy_extensions import i64


@dataclass(frozen=True, slots=True)
class BlockRecord:
    address: int
    size: int
    state: str
    requested: int


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """An expandable segment appears once for each contiguous range that holds memory."""

    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    blocks: tuple[BlockRecord, ...]

    @property
    def allocated(self) -> int:
        return sum(block.size for block in self.blocks if block.state == "active_allocated")


FREE: Final = 0
ALLOCATED: Final = 1
PENDING: Final = 2
UNMAPPED: Final = 3
STATE_NAMES: Final = ("inactive", "active_allocated", "active_pending_free", "unmapped")
"""The first three are torch's words."""


class Block:
    __slots__ = ("address", "next", "prev", "requested", "segment", "size", "state")

    def __init__(self, segment: Segment, address: i64, size: i64, state: i64) -> None:
        self.segment = segment
        self.address: i64 = address
        self.size: i64 = size
        self.state: i64 = state
        self.requested: i64 = 0
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.size} bytes at {self.address:#x}, {STATE_NAMES[self.state]})"

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    def split(self, size: i64, state: i64) -> Block:
        """Keep the first `size` bytes; return the rest as a new block."""
        rest = Block(self.segment, self.address + size, self.size - size, state)
        following = self.next
        rest.prev = self
        rest.next = following
        if following is not None:
            following.prev = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_next(self) -> None:
        following = self.next
        assert following is not None
        self.size += following.size
        beyond = following.next
        self.next = beyond
        if beyond is not None:
            beyond.prev = self


class Segment:
    __slots__ = ("address", "expandable", "head", "shelf", "size")

    def __init__(self, shelf: Shelf, address: i64, size: i64, *, expandable: bool = False) -> None:
        self.shelf = shelf
        self.address: i64 = address
        self.size: i64 = size
        self.expandable = expandable
        self.head = Block(self, address, size, UNMAPPED if expandable else FREE)

    def __iter__(self) -> Iterator[Block]:
        block: Block | None = self.head
        while block is not None:
            yield block
            block = block.next


class Shelf:
    __slots__ = ("blocks", "pool", "stream", "unmapped")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []  # by address; parts of expandable segments that hold no memory

    def place(self, size: i64, address: i64) -> i64:
        """Index of the first block that is not smaller, nor of the same size and at a lower address; the number of
        blocks if there is none."""
        blocks = self.blocks
        low: i64 = 0
        high: i64 = len(blocks)
        while low < high:
            middle = (low + high) >> 1
            block = blocks[middle]
            if block.size < size or (block.size == size and block.address < address):
                low = middle + 1
            else:
                high = middle
        return low

    def first_of(self, size: i64) -> i64:
        """Index of the smallest block of at least `size` bytes; the number of blocks if there is none."""
        return self.place(size, LOWEST_ADDRESS)

    def add(self, block: Block) -> None:
        self.blocks.insert(self.place(block.size, block.address), block)

    def remove(self, block: Block) -> None:
        self.blocks.pop(self.place(block.size, block.address))

    def add_unmapped(self, block: Block) -> None:
        at = 0
        while at < len(self.unmapped) and self.unmapped[at].address < block.address:
            at += 1
        self.unmapped.insert(at, block)


LOWEST_ADDRESS: Final = -(1 << 62)


class Pool:
    __slots__ = ("_latest", "shelves", "small")

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.shelves: dict[int, Shelf] = {}
        self._latest: Shelf | None = None

    def shelf(self, stream: int) -> Shelf:
        latest = self._latest
        if latest is not None and latest.stream == stream:
            return latest
        found = self.shelves.get(stream)
        if found is None:
            found = self.shelves[stream] = Shelf(self, stream)
        self._latest = found
        return found

    def in_order(self) -> list[Shelf]:
        """By stream, as torch's one set for all streams is ordered: a stream is a pointer there, hence unsigned."""
        return [self.shelves[stream] for stream in sorted(self.shelves, key=lambda stream: stream % (1 << 64))]


def records(segment: Segment) -> Iterator[SegmentRecord]:
    """What a snapshot would show of a segment (less the stale request that torch leaves in a free block)."""
    run: list[Block] = []
    for block in [*segment, None]:
        if block is not None and block.state != UNMAPPED:
            run.append(block)
        elif run:
            shelf = segment.shelf
            blocks = tuple(
                BlockRecord(b.address, b.size, STATE_NAMES[b.state], 0 if b.state == FREE else b.requested) for b in run
            )
            size = sum(block.size for block in run)
            yield SegmentRecord(run[0].address, size, shelf.stream, shelf.pool.small, segment.expandable, blocks)
            run = []


@dataclass
class AllocatorStats:
    """Bytes unless the name says otherwise; where torch has a current value and a peak, both are here."""

    allocated: i64 = 0  # block sizes, not requests: tails that were too small to split off are included
    active: i64 = 0  # allocated, and freed blocks that another stream may still use
    reserved: i64 = 0  # held from the driver
    reserved_peak: i64 = 0
    num_alloc_retries: i64 = 0
    num_sync_all_streams: i64 = 0
