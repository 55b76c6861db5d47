"""The CUDA driver below the allocator, and what it has handed out as ranges of addresses.

Assumed: any request that fits in the bytes left is served. The driver maps pages of 2 MiB freely, so its own
fragmentation does not count.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator

from memfit.events import Action
from memfit.replay.blocks import AllocatorStats
from memfit.units import MiB

AddressSource = Callable[[int, bool], int]
"""`next_address(size, small)`: where a new segment (or expandable reservation) of the small or large pool lies."""

FIRST_ADDRESS = 0x7000_0000_0000
GAP = 2 * MiB  # segments never touch, so nothing can come to depend on their being neighbours


def falling_addresses() -> AddressSource:
    """Every segment below the one before, as recordings mostly show. Only the order of addresses matters."""
    start = FIRST_ADDRESS

    def next_address(size: int, small: bool) -> int:
        nonlocal start
        start -= -(-size // GAP) * GAP + GAP
        return start

    return next_address


class Driver:
    """Counts what it hands out and refuses what would pass `capacity`."""

    def __init__(self, capacity: int | None = None, addresses: AddressSource | None = None) -> None:
        self.capacity = capacity
        self.next_address = addresses or falling_addresses()
        self.stats = AllocatorStats()
        self.smallest_refusal: int | None = None
        """The least capacity that would have changed the course of events so far; None: no capacity would."""

    def has_room_for(self, size: int) -> bool:
        needed = self.stats.reserved + size
        if self.capacity is None or needed <= self.capacity:
            return True
        self.smallest_refusal = min(needed, self.smallest_refusal or needed)
        return False

    def gave(self, action: Action, address: int, size: int, stream: int) -> None:
        stats = self.stats
        stats.reserved += size
        stats.reserved_peak = max(stats.reserved_peak, stats.reserved)

    def took_back(self, action: Action, address: int, size: int, stream: int) -> None:
        self.stats.reserved -= size


DriverCall = tuple[int, Action, int, int, int]
"""At which event of a trace; action, address, size, stream."""


class NotingDriver(Driver):
    """Remembers what it was asked for."""

    def __init__(self, capacity: int | None = None, *, event: int = 0) -> None:
        super().__init__(capacity)
        self.event = event
        self.calls: list[DriverCall] = []

    def gave(self, action: Action, address: int, size: int, stream: int) -> None:
        super().gave(action, address, size, stream)
        self.calls.append((self.event, action, address, size, stream))

    def took_back(self, action: Action, address: int, size: int, stream: int) -> None:
        super().took_back(action, address, size, stream)
        self.calls.append((self.event, action, address, size, stream))


COMES = {Action.SEGMENT_ALLOC: False, Action.SEGMENT_MAP: True}  # whether the segment is expandable
GOES = {Action.SEGMENT_FREE: False, Action.SEGMENT_UNMAP: True}
DRIVER_ACTIONS = (*COMES, *GOES)
MAX_HELD = 50_000  # ranges at once; of 2 MiB each that is more than any GPU has
Range = tuple[int, int, bool]  # start, end, part of an expandable segment


class Ranges:
    """Played forwards, or undone backwards. A plain segment comes and goes whole; an expandable one grows and shrinks
    by ranges that merge where they touch.

    >>> held = Ranges()
    >>> held.do(Action.SEGMENT_MAP, 0, 10), held.do(Action.SEGMENT_MAP, 10, 5), held.undo(Action.SEGMENT_MAP, 0, 4)
    (True, True, True)
    >>> list(held), held.total
    ([(4, 15, True)], 11)
    """

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._held = {start: (end, expandable) for start, end, expandable in ranges}
        self._starts = sorted(self._held)

    def __iter__(self) -> Iterator[Range]:
        return ((start, *self._held[start]) for start in self._starts)

    @property
    def total(self) -> int:
        return sum(end - start for start, (end, _) in self._held.items())

    def do(self, action: int, address: int, size: int) -> bool:
        """False if it cannot be: taken is what was not held, or given what was held already."""
        came = COMES.get(Action(action))
        return self._take(address, size) if came is None else self._give(address, size, came)

    def undo(self, action: int, address: int, size: int) -> bool:
        went = GOES.get(Action(action))
        return self._take(address, size) if went is None else self._give(address, size, went)

    def holding(self, address: int) -> Range | None:
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start = self._starts[at]
        end, expandable = self._held[start]
        return (start, end, expandable) if address < end else None

    def _give(self, start: int, size: int, expandable: bool) -> bool:
        end = start + size
        at = bisect_right(self._starts, start)
        following = self._starts[at] if at < len(self._starts) else None
        if size <= 0 or self.holding(start) is not None or (following is not None and following < end):
            return False
        if len(self._starts) >= MAX_HELD:
            return False
        if expandable:
            before = self.holding(start - 1) if start else None
            if before is not None and before[2]:
                start = before[0]
                self._drop(start)
            if following == end and self._held[end][1]:
                end = self._drop(end)
        self._held[start] = end, expandable
        insort(self._starts, start)
        return True

    def _take(self, address: int, size: int) -> bool:
        held = self.holding(address)
        if size <= 0 or held is None or address + size > held[1]:
            return False
        start, end, expandable = held
        self._drop(start)
        for left, right in ((start, address), (address + size, end)):
            if left < right:
                self._held[left] = right, expandable
                insort(self._starts, left)
        return True

    def _drop(self, start: int) -> int:
        end, _ = self._held.pop(start)
        del self._starts[bisect_right(self._starts, start) - 1]
        return end
