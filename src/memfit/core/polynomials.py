"""Whole numbers as exact polynomials of batch size and length, found from a few points and held against others.

>>> points = [(2, 16), (3, 40), (5, 64), (7, 24), (4, 31)]
>>> fits = Fits(points)
>>> polynomial = fits.of([4 * batch * length + 256 for batch, length in points])
>>> evaluate(polynomial, 10, 100)
4256
>>> fits.of([batch * min(length, 50) for batch, length in points]) is None
True

The polynomial with the fewest terms is looked for. It is taken if no other with as many terms goes through all points
and there are at least two points more than terms. Coefficients are whole: nothing is rounded. Where it is needed, the
length rounded up to a multiple is one more letter: mem-efficient attention has masks with rows of a multiple of 8, and
statistics of 32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations

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

    def of(self, values: Sequence[int]) -> Coefficients | None:
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
            made = (_Solver.of(terms, self._rows) for terms in self._supports[number])
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
    def of(cls, terms: tuple[int, ...], rows: list[tuple[int, ...]]) -> _Solver | None:
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
