"""The pieces that the caching allocator moves about: segments cut into blocks, and shelves of free blocks.

    segment   one range of addresses from the driver; its blocks tile it, each linked to its neighbours
    block     a piece of a segment: free, allocated, waiting for another stream, or (expandable) without memory
    shelf     the free blocks of one pool and one stream, in the order of torch's std::set: size, then address
    pool      small (blocks of up to 1 MiB) or large; it also counts searches, which is how torch measures age

Of two blocks that merge the lower one stays, so the object at the start of a segment is the same all its life.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

ADDRESS_BITS = 64

FREE, ALLOCATED, PENDING, UNMAPPED = range(4)
STATE_NAMES = ("inactive", "active_allocated", "active_pending_free", "unmapped")  # the first three are torch's words


class Block:
    __slots__ = ("address", "age_base", "next", "prev", "requested", "segment", "size", "state")

    def __init__(self, segment: Segment, address: int, size: int, state: int = FREE, requested: int = 0) -> None:
        self.segment = segment
        self.address = address
        self.size = size
        self.state = state
        self.requested = requested
        self.age_base = 0
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.size} bytes at {self.address:#x}, {STATE_NAMES[self.state]})"

    @property
    def stream(self) -> int:
        return self.segment.shelf.stream

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    def split(self, size: int, state: int) -> Block:
        """Keep the first `size` bytes; return the rest as a new block."""
        rest = Block(self.segment, self.address + size, self.size - size, state)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_next(self) -> None:
        following = self.next
        assert following is not None
        self.size += following.size
        self.next = following.next
        if following.next is not None:
            following.next.prev = self


class Segment:
    __slots__ = ("address", "expandable", "head", "shelf", "size")

    def __init__(self, shelf: Shelf, address: int, size: int, *, expandable: bool = False) -> None:
        self.shelf = shelf
        self.address = address
        self.size = size
        self.expandable = expandable
        self.head = Block(self, address, size, UNMAPPED if expandable else FREE)

    def __iter__(self) -> Iterator[Block]:
        block: Block | None = self.head
        while block is not None:
            yield block
            block = block.next


class Shelf:
    """Free blocks sorted by one integer each, size * 2^64 + address: twice as fast to search as tuples."""

    __slots__ = ("blocks", "keys", "pool", "stream", "unmapped")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []  # by address; parts of expandable segments that hold no memory

    def first_of(self, size: int) -> int:
        """Index of the smallest block of at least `size` bytes; the number of blocks if there is none."""
        return bisect_left(self.keys, size << ADDRESS_BITS)

    def add(self, block: Block) -> None:
        key = block.size << ADDRESS_BITS | block.address
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.blocks.insert(at, block)
        block.age_base = self.pool.searches

    def remove(self, block: Block) -> None:
        at = bisect_left(self.keys, block.size << ADDRESS_BITS | block.address)
        del self.keys[at], self.blocks[at]

    def take(self, at: int) -> Block:
        del self.keys[at]
        return self.blocks.pop(at)

    def add_unmapped(self, block: Block) -> None:
        self.unmapped.insert(bisect_left(self.unmapped, block.address, key=lambda each: each.address), block)


@dataclass(slots=True)
class Pool:
    small: bool
    searches: int = 0
    shelves: dict[int, Shelf] = field(default_factory=dict)

    def shelf(self, stream: int) -> Shelf:
        found = self.shelves.get(stream)
        if found is None:
            found = self.shelves[stream] = Shelf(self, stream)
        return found

    def in_order(self) -> list[Shelf]:
        """By stream, as torch's one set for all streams is ordered: a stream is a pointer there, hence unsigned."""
        return [self.shelves[stream] for stream in sorted(self.shelves, key=lambda stream: stream % (1 << 64))]


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A block as plain data, in the words of torch's snapshots."""

    address: int
    size: int
    state: str
    requested: int


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """A segment as plain data; an expandable one appears once for each contiguous range that holds memory."""

    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    blocks: tuple[BlockRecord, ...]

    @property
    def allocated(self) -> int:
        return sum(block.size for block in self.blocks if block.state == "active_allocated")


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
