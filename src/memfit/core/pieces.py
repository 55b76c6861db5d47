"""Batch sizes and lengths at which a job does the same, and what can be said about those in between.

A piece is a set of traced points with one stream (`core/holes.py`). Its sizes, and the numbers that its rules look at,
are polynomials of batch size and length that go through every one of its points (`core/polynomials.py`); filled with
them and with what the rules answer, the stream is again the trace of each point, to the byte. Both are checked here.

That leaves what no formula shows: would the job take another way at a point that was not traced? Code chooses its way
by comparisons, `length > window`, `batch * length <= 3072`, `batch < length`, and by divisibility, `length % 8 == 0`.
A comparison whose sides grow or fall with batch and with length is the same for a point as for four others that lie
around it, one in each direction, if it is the same for those four. Divisibility by powers of two is the same for a
point as for two others of which one is divisible by no more, the other by no less of them, if it is the same for those
two. So a piece `surrounds` a point if it has such points. What escapes this: what begins at one number and ends at
another in between (families see to it for the numbers of a model's config), and divisibility by other numbers than
powers of two.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np

from memfit.core.holes import Ask, Filled, Holed, NotHoled, Outline, Sized, Stream, answered, filled, fingerprint
from memfit.core.polynomials import ZERO, Coefficients, Fits, Point, evaluate

LEAST_POINTS = {0: 1, 1: 4, 2: 5}
"""By how many of batch size and length vary."""
MOST_TWOS = (3, 8)
"""Divisibility of batch and length is told apart up to 8 and up to 256."""
LARGEST_SIZE = 1 << 60


class Unproven(Exception):
    """Why a point cannot be told from others."""


class TooFewPoints(Unproven):
    """More of them may help."""


def surrounds(points: Iterable[Point], point: Point) -> bool:
    points = list(points)
    batch, length = point
    around = [(b <= batch, b >= batch, s <= length, s >= length) for b, s in points]
    corners = all(any(side[i] and side[j] for side in around) for i in (0, 1) for j in (2, 3))
    return corners and all(_divides_alike([p[axis] for p in points], point[axis], MOST_TWOS[axis]) for axis in (0, 1))


def _divides_alike(values: list[int], value: int, most: int) -> bool:
    if set(values) == {value}:
        return True
    twos = [_twos(v, most) for v in values]
    return min(twos) <= _twos(value, most) <= max(twos)


def _twos(value: int, most: int) -> int:
    return min((value & -value).bit_length() - 1, most)


class Piece:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.points: dict[Point, Holed] = {}
        self._fitted: _Fitted | None = None
        self._why_not: Unproven = TooFewPoints("no points")
        self._checked = 0

    def add(self, point: Point, traced: Holed) -> None:
        self.points[point] = traced._replace(stream=self.stream)

    def surrounds(self, point: Point) -> bool:
        return surrounds(self.points, point)

    def at(self, point: Point, ask: Ask) -> Sized:
        """Raises Unproven where that cannot be told."""
        fitted = self.fit(ask)
        if not self.surrounds(point):
            raise TooFewPoints("no traced points all around")
        return fitted.at(point)

    def fit(self, ask: Ask) -> _Fitted:
        """Find the polynomials, or see that those found before hold for the points that have been added."""
        new = list(self.points)[self._checked :]
        self._checked = len(self.points)
        if new:
            fitted, self._fitted = self._fitted, None
            try:
                if fitted is None:
                    fitted, new = self._found(), list(self.points)
                for point in new:
                    fitted.check(point, self.points[point], ask)
            except Unproven as why:
                self._why_not = why
            else:
                self._fitted = fitted
        if self._fitted is None:
            raise self._why_not
        return self._fitted

    def _found(self) -> _Fitted:
        points = list(self.points)
        varying = sum(len({p[axis] for p in points}) > 1 for axis in (0, 1))
        if len(points) < LEAST_POINTS[varying]:
            raise TooFewPoints(f"{len(points)} points")
        return _Fitted(self.stream, Fits(points), list(self.points.values()))


class _Fitted:
    """One stream's sizes and its rules' numbers as polynomials."""

    def __init__(self, stream: Stream, fits: Fits, traced: list[Holed]) -> None:
        self.stream = stream
        self._fits = fits
        self._polynomials: dict[Coefficients, int] = {ZERO: 0}
        by_rules = {block for hole in stream.holes for block in hole.kept}
        sizes = np.stack([each.sizes for each in traced], axis=1)
        sizes[sorted(by_rules)] = 0
        different, self._size_of = np.unique(sizes, axis=0, return_inverse=True)
        self._size_of = self._size_of.reshape(-1)
        self._sizes = [self._polynomial(values) for values in different.tolist()]
        self._calls: dict[tuple[Hashable, tuple[int, ...]], int] = {}
        self._which = [
            self._call(hole.form, [each.numbers[i] for each in traced]) for i, hole in enumerate(stream.holes)
        ]

    def _polynomial(self, values: list[int]) -> int:
        found = self._fits.of(values)
        if found is None:
            raise Unproven("a size is no polynomial of batch size and length")
        return self._polynomials.setdefault(found, len(self._polynomials))

    def _call(self, form: Hashable, numbers: list[tuple[int, ...]]) -> int:
        polynomials = tuple(self._polynomial(list(values)) for values in zip(*numbers, strict=True))
        return self._calls.setdefault((form, polynomials), len(self._calls))

    def at(self, point: Point) -> Sized:
        values = [evaluate(coefficients, *point) for coefficients in self._polynomials]
        sizes = [values[polynomial] for polynomial in self._sizes]
        if min(sizes, default=0) < 0 or max(sizes, default=0) >= LARGEST_SIZE:
            raise Unproven("a size out of range")
        calls = [(form, tuple([values[p] for p in polynomials])) for form, polynomials in self._calls]
        return Sized(self.stream, np.array(sizes, dtype=np.int64)[self._size_of], calls, self._which)

    def check(self, point: Point, traced: Holed, ask: Ask) -> None:
        """What is told of a traced point is what was traced there."""
        sized = self.at(point)
        outlines, pool = answered(sized, ask)
        if fingerprint(filling(sized, outlines).trace(pool)) != traced.fingerprint:
            raise Unproven(f"batch size {point[0]}, length {point[1]} is not told as it was traced")


def filling(sized: Sized, outlines: tuple[Outline, ...]) -> Filled:
    """Raises Unproven if a kernel has other results there than at the traced points."""
    try:
        return filled(sized.stream, outlines, sized.which)
    except NotHoled as why:
        raise Unproven(str(why)) from why
