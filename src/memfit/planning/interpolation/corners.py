"""Which batch sizes and lengths to trace, so that those in between are told by them.

    length
      |  o---------o----o  longest          o  a traced corner       x  asked for
      |  |    x    |  x |
      |  o---------o----o                   A cell whose corners do the same needs no more. Else a line is drawn
      |  |   x  x  |    |                   through it: at a number of the model's config, such as a window, or through
      |  o---------o----o  shortest         its middle. Batch size 1 and length 1 are lines of their own.
      +------------------- batch size

This is about what pays, not about what is true: no proof rests on it (`planning/interpolation/shapes.py` has those).
"""

from __future__ import annotations

from collections.abc import Callable

from memfit.planning.interpolation.shapes import Point

ASKED_FIRST = 4
"""One job asked at so many points is a sweep or a search, and may have as many points again."""
EXPECTED_FOR_ONE = 3
"""A point that nobody asked for is traced for so many that are known to come."""
BATCH, LENGTH = 0, 1
TWOS = (8, 256)
"""Outer lines are divisible by these, so that points in between are divisible by no more twos than their corners."""


class Corners:
    def __init__(self) -> None:
        self.asked: set[Point] = set()
        self.expected: set[Point] = set()
        self._lines: tuple[set[int], set[int]] = (set(), set())
        self._out_of_reach: set[int] = set()
        self._eights_matter: dict[int, bool] = {}
        """From which length on the job does something else at lengths that 8 divides."""

    def around(self, point: Point) -> list[Point]:
        """In order: the first has the smaller numbers, the last the larger ones."""
        batches, (short, long) = self._cell(BATCH, point), self._cell(LENGTH, point)
        if self._eights_matter.get(short) and short != long:
            short, long = _lengths_like(point[LENGTH], short, long)
        return sorted({(batch, length) for batch in batches for length in (short, long)})

    def pay(self, corners: list[Point], new: int, unasked: int) -> bool:
        """Whether to trace so many of them, after so many that nobody asked for: for points that are known to come
        inside, or as many again as were asked, each on lines of its own if it has batch size 1 or length 1."""
        (low, short), (high, long) = corners[0], corners[-1]
        coming = sum(low <= b <= high and short <= s <= long for b, s in self.expected - self.asked)
        asked = sum((b == 1) == (high == 1) and (s == 1) == (long == 1) for b, s in self.asked)
        return coming >= EXPECTED_FOR_ONE * new or (asked >= ASKED_FIRST and unasked + new <= asked)

    def is_out_of_reach(self, corner: Point) -> None:
        """The job cannot do that: its lines go back to what was asked for."""
        self._out_of_reach.update(corner)
        for axis in (BATCH, LENGTH):
            values = [point[axis] for point in self.asked | self.expected if point[axis] > 1]
            line = corner[axis]
            if values and line in self._lines[axis] and not min(values) <= line <= max(values):
                self._lines[axis].discard(line)
                self._lines[axis].add(max(values) if line > max(values) else min(values))

    def draw_line(
        self, point: Point, what: Callable[[Point], object], likely: list[int], trace: Callable[[Point], None]
    ) -> bool:
        """Through the cell of a point, if its corners do different things; whether there is a new one. `what` is done
        at a corner; None if it could not be traced."""
        corners = self.around(point)
        if any(what(corner) is None for corner in corners):
            return False
        (low, short), (high, long) = corners[0], corners[-1]
        along_length = any(what((batch, short)) != what((batch, long)) for batch in (low, high))
        along_batch = any(what((low, length)) != what((high, length)) for length in (short, long))
        if along_length and self._eights_are_news(low, short, what, trace):
            return True
        if not along_length and not along_batch:
            return False
        axis = LENGTH if along_length else BATCH
        least, most = self._cell(axis, point)
        inside = {line for line in likely if least < line < most} if along_length else set()
        new = inside or {(least + most) // 2} - {least}
        self._lines[axis].update(new)
        return bool(new)

    def _eights_are_news(
        self, batch: int, length: int, what: Callable[[Point], object], trace: Callable[[Point], None]
    ) -> bool:
        if length in self._eights_matter or length % 8 == 0:
            return False
        divided = batch, length // 8 * 8 + 8
        trace(divided)
        self._eights_matter[length] = what(divided) is not None and what(divided) != what((batch, length))
        return self._eights_matter[length]

    def _cell(self, axis: int, point: Point) -> tuple[int, int]:
        """The lines beside a value."""
        value, lines = point[axis], self._lines[axis]
        if value == 1:
            return 1, 1
        if not lines or not min(lines) <= value <= max(lines):
            self._widen(axis, value)
        return max(line for line in lines if line <= value), min(line for line in lines if line >= value)

    def _widen(self, axis: int, value: int) -> None:
        lines = self._lines[axis]
        values = {point[axis] for point in self.asked | self.expected if point[axis] > 1} | {value}
        if len(values) == 1:
            lines.add(value)
            return
        if len(lines) == 1:
            lines.clear()  # it was the only value so far
        least, most = min(values), max(values)
        lowest, highest = _outer(axis, least, most, exact=bool(self.expected))
        lines |= {least if lowest in self._out_of_reach else lowest, most if highest in self._out_of_reach else highest}


def _outer(axis: int, least: int, most: int, *, exact: bool) -> tuple[int, int]:
    """Lines around all values, one of them odd and the other divisible by many twos; with room to grow where it is not
    known what comes."""
    step = TWOS[axis]
    highest = -(-most // step) * step if exact and most > step else 1 << max(most - 1, 1).bit_length()
    if axis == BATCH:
        return 2, highest
    lowest = least if exact else (1 << (least.bit_length() - 1)) // 2 + 1
    return max(2, lowest - (lowest + 1) % 2), highest


def _lengths_like(length: int, short: int, long: int) -> tuple[int, int]:
    """Lengths near two lines, between them, that 8 divides as it does this one: by few twos, and by many."""
    few, many = ((2, 1), (8, 4)) if length % 8 else ((16, 8), (256, 0))
    above_short = short + (few[1] - short) % few[0]
    below_long = long - (long - many[1]) % many[0]
    return min(above_short, length), max(below_long, length)
