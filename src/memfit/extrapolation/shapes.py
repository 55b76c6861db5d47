"""Batch sizes and lengths at which a job does the same, what can be said of those in between, and exact polynomials.

A piece is a set of traced points with one stream (`extrapolation/streams.py`). Its sizes, and the numbers that
its rules look at, are polynomials of batch size and length that go through every one of its points; filled with
them and with what the rules answer, the stream is again the trace of each point, to the byte. Both are checked here.

That leaves what no formula shows: would the job take another way at a point that was not traced? Code chooses its way
by comparisons, `length > window`, `batch * length <= 3072`, `batch < length`, and by divisibility, `length % 8 == 0`.
A comparison whose sides grow or fall with batch and with length is the same for a point as for four others that lie
around it, one in each direction, if it is the same for those four. Divisibility by powers of two is the same for a
point as for two others of which one is divisible by no more, the other by no less of them, if it is the same for those
two. So a piece `surrounds` a point if it has such points. What escapes this: what begins at one number and ends at
another in between (families see to it for the numbers of a model's config), and divisibility by other numbers than
powers of two.

`Fits` finds whole numbers as exact polynomials of batch size and length, from a few points, and holds them against
others.

>>> points = [(2, 16), (3, 40), (5, 64), (7, 24), (4, 31)]
>>> fits = Fits(points)
>>> polynomial = fits.find([4 * batch * length + 256 for batch, length in points])
>>> evaluate(polynomial, 10, 100)
4256
>>> fits.find([batch * min(length, 50) for batch, length in points]) is None
True

The polynomial with the fewest terms is looked for. It is taken if no other with as many terms goes through all points
and there are at least two points more than terms. Coefficients are whole: nothing is rounded. Where it is needed, the
length rounded up to a multiple is one more letter: mem-efficient attention has masks with rows of a multiple of 8, and
statistics of 32.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations

import numpy as np

from memfit.extrapolation.streams import (
    Ask,
    FilledStream,
    NotSeparable,
    Outline,
    SizedStream,
    Stream,
    TracedStream,
    answered,
    filled,
    fingerprint,
)

Point = tuple[int, int]
Coefficients = tuple[int, ...]

MULTIPLES = (8, 32)
PLAIN = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 2, 0), (1, 2, 0))
ROUNDED = tuple((batch, length, multiple) for multiple in MULTIPLES for batch in (0, 1) for length in (0, 1))
TERMS = PLAIN + ROUNDED
"""Powers of batch size and of length, and a multiple to which the length is rounded up once more, or 0."""
MOST_PLAIN, MOST_WITH_ROUNDED = 4, 2
SPARE_POINTS = 2
ZERO: Coefficients = (0,) * len(TERMS)


def terms_at(batch: int, length: int) -> tuple[int, ...]:
    rounded = {multiple: -(-length // multiple) * multiple for multiple in MULTIPLES} | {0: 1}
    return tuple([batch**b * length**s * rounded[multiple] for b, s, multiple in TERMS])


def evaluate(coefficients: Coefficients, batch: int, length: int) -> int:
    return sum(c * term for c, term in zip(coefficients, terms_at(batch, length), strict=True) if c)


class Fits:
    def __init__(self, points: Sequence[Point]) -> None:
        self._rows = [terms_at(*point) for point in points]
        self._known: dict[tuple[int, ...], Coefficients | None] = {}
        batch_varies, length_varies = (len({point[axis] for point in points}) > 1 for axis in (0, 1))
        usable = [i for i, (b, s, m) in enumerate(TERMS) if (batch_varies or not b) and (length_varies or not (s or m))]
        plain = [i for i in usable if i < len(PLAIN)]
        most = len(points) - SPARE_POINTS
        supports = [list(combinations(plain, count)) for count in range(1, min(MOST_PLAIN, most) + 1)]
        supports += [
            [terms for terms in combinations(usable, count) if terms[-1] >= len(PLAIN)]
            for count in range(1, min(MOST_WITH_ROUNDED, most) + 1)
        ]
        self._supports = supports
        self._solvers: dict[int, list[_Solver]] = {}

    def find(self, values: Sequence[int]) -> Coefficients | None:
        """None if no polynomial goes through all points, or more than one does."""
        key = tuple(values)
        if key not in self._known:
            self._known[key] = self._found(key)
        return self._known[key]

    def _found(self, values: tuple[int, ...]) -> Coefficients | None:
        if not any(values):
            return ZERO
        for number in range(len(self._supports)):
            found = list(self._through(values, number))
            if found:
                return found[0] if len(found) == 1 else None
        return None

    def _through(self, values: tuple[int, ...], number: int) -> Iterator[Coefficients]:
        if number not in self._solvers:
            made = (_Solver.make(terms, self._rows) for terms in self._supports[number])
            self._solvers[number] = [solver for solver in made if solver]
        for solver in self._solvers[number]:
            found = solver.solve(values)
            if found is not None and all(
                sum(c * term for c, term in zip(found, row, strict=True)) == value
                for row, value in zip(self._rows, values, strict=True)
            ):
                yield found


class _Solver:
    """For some of the terms: which points determine them, and the inverse of that system."""

    def __init__(self, terms: tuple[int, ...], points: list[int], inverse: list[list[Fraction]]) -> None:
        self._terms, self._points, self._inverse = terms, points, inverse

    @classmethod
    def make(cls, terms: tuple[int, ...], rows: list[tuple[int, ...]]) -> _Solver | None:
        """None if the points do not determine them."""
        chosen: list[int] = []
        for at in range(len(rows)):
            inverse = _eliminated([[rows[i][t] for t in terms] for i in (*chosen, at)])
            if inverse is not None:
                chosen.append(at)
            if inverse is not None and len(chosen) == len(terms):
                return cls(terms, chosen, inverse)
        return None

    def solve(self, values: tuple[int, ...]) -> Coefficients | None:
        known = [values[i] for i in self._points]
        made = list(ZERO)
        for term, row in zip(self._terms, self._inverse, strict=True):
            coefficient = sum((c * v for c, v in zip(row, known, strict=True)), Fraction(0))
            if coefficient.denominator != 1 or not coefficient:
                return None
            made[term] = int(coefficient)
        return tuple(made)


def _eliminated(matrix: list[list[int]]) -> list[list[Fraction]] | None:
    """By Gauss and Jordan: None if rows depend on each other, else what they were multiplied with; with as many rows as
    columns that is the inverse."""
    size = len(matrix)
    rows = [[Fraction(v) for v in row] + [Fraction(int(i == j)) for j in range(size)] for i, row in enumerate(matrix)]
    width = len(matrix[0])
    order: list[int] = []
    for done in range(size):
        column = next((c for c in range(width) if rows[done][c]), None)
        if column is None:
            return None
        lead = rows[done][column]
        rows[done] = [v / lead for v in rows[done]]
        for r in range(size):
            if r != done and rows[r][column]:
                factor = rows[r][column]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[done], strict=True)]
        order.append(column)
    return [row[width:] for _, row in sorted(zip(order, rows, strict=True))]


LEAST_POINTS = {0: 1, 1: 4, 2: 5}
"""By how many of batch size and length vary."""
MOST_TWOS = (3, 8)
"""Divisibility of batch and length is told apart up to 8 and up to 256."""
LARGEST_SIZE = 1 << 60


class NotProven(Exception):
    """Why a point cannot be told from others."""


class TooFewPoints(NotProven):
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
        self.points: dict[Point, TracedStream] = {}
        self._fitted: _Polynomials | None = None
        self._why_not: NotProven = TooFewPoints("no points")
        self._checked = 0

    def add(self, point: Point, traced: TracedStream) -> None:
        self.points[point] = traced._replace(stream=self.stream)

    def surrounds(self, point: Point) -> bool:
        return surrounds(self.points, point)

    def at(self, point: Point, ask: Ask) -> SizedStream:
        """Raises NotProven where that cannot be told."""
        fitted = self.fit(ask)
        if not self.surrounds(point):
            raise TooFewPoints("no traced points all around")
        return fitted.at(point)

    def fit(self, ask: Ask) -> _Polynomials:
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
            except NotProven as why:
                self._why_not = why
            else:
                self._fitted = fitted
        if self._fitted is None:
            raise self._why_not
        return self._fitted

    def _found(self) -> _Polynomials:
        points = list(self.points)
        varying = sum(len({p[axis] for p in points}) > 1 for axis in (0, 1))
        if len(points) < LEAST_POINTS[varying]:
            raise TooFewPoints(f"{len(points)} points")
        return _Polynomials(self.stream, Fits(points), list(self.points.values()))


class _Polynomials:
    """One stream's sizes and its rules' numbers as polynomials."""

    def __init__(self, stream: Stream, fits: Fits, traced: list[TracedStream]) -> None:
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
        found = self._fits.find(values)
        if found is None:
            raise NotProven("a size is no polynomial of batch size and length")
        return self._polynomials.setdefault(found, len(self._polynomials))

    def _call(self, form: Hashable, numbers: list[tuple[int, ...]]) -> int:
        polynomials = tuple(self._polynomial(list(values)) for values in zip(*numbers, strict=True))
        return self._calls.setdefault((form, polynomials), len(self._calls))

    def at(self, point: Point) -> SizedStream:
        values = [evaluate(coefficients, *point) for coefficients in self._polynomials]
        sizes = [values[polynomial] for polynomial in self._sizes]
        if min(sizes, default=0) < 0 or max(sizes, default=0) >= LARGEST_SIZE:
            raise NotProven("a size out of range")
        calls = [(form, tuple([values[p] for p in polynomials])) for form, polynomials in self._calls]
        return SizedStream(self.stream, np.array(sizes, dtype=np.int64)[self._size_of], calls, self._which)

    def check(self, point: Point, traced: TracedStream, ask: Ask) -> None:
        """What is told of a traced point is what was traced there."""
        sized = self.at(point)
        outlines, pool = answered(sized, ask)
        if fingerprint(filling(sized, outlines).trace(pool)) != traced.fingerprint:
            raise NotProven(f"batch size {point[0]}, length {point[1]} is not told as it was traced")


def filling(sized: SizedStream, outlines: tuple[Outline, ...]) -> FilledStream:
    """Raises NotProven if a kernel has other results there than at the traced points."""
    try:
        return filled(sized.stream, outlines, sized.which)
    except NotSeparable as why:
        raise NotProven(str(why)) from why
