"""What the driver has handed out, as ranges of addresses: played forwards, or undone backwards.

A plain segment comes and goes whole. An expandable one grows and shrinks by ranges that merge where they touch.

>>> held = Ranges()
>>> held.do(Action.SEGMENT_MAP, 0, 10), held.do(Action.SEGMENT_MAP, 10, 5), held.undo(Action.SEGMENT_MAP, 0, 4)
(True, True, True)
>>> list(held), held.total
([(4, 15, True)], 11)
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator

from memfit.core.events import Action

COMES = {Action.SEGMENT_ALLOC: False, Action.SEGMENT_MAP: True}  # whether the segment is expandable
GOES = {Action.SEGMENT_FREE: False, Action.SEGMENT_UNMAP: True}
DRIVER_ACTIONS = (*COMES, *GOES)
MAX_HELD = 50_000  # ranges at once; of 2 MiB each that is more than any GPU has
Range = tuple[int, int, bool]  # start, end, part of an expandable segment


class Ranges:
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
