"""Where two long, nearly equal sequences of numbers agree: a diff made for streams of allocations.

Of 100,000 events nearly all are the same, and twelve equal layers follow one another. A textbook diff is quadratic
there, and one that trusts unique lines finds none. So: run along while both agree; where they part, look for the
cheapest edit that makes them agree for a good while again (Myers, "An O(ND) difference algorithm", bounded); only
if that fails, jump to the nearest long stretch that both have. It is fast for any two sequences, and exact for those
that differ in a few places at a time; for others it finds many agreements, not the most there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Run = tuple[int, int, int]  # where in a, where in b, how many in a row are equal

AGREE = 12  # that many equal allocations in a row: the two have met again
MAX_EDITS = 200  # at one place; beyond it, look for a long common stretch
MAX_STEPS = 3_000_000  # of Myers' inner loop in all, about two seconds
STRETCH = 24  # what is long, for a common stretch
REACH = 20_000  # how far ahead it is looked for first


@dataclass(slots=True)
class EditBudget:
    """One for a whole comparison: what keeps two sequences that have nothing in common from taking hours."""

    steps: int = MAX_STEPS

    @property
    def edits(self) -> int:
        return MAX_EDITS if self.steps > 0 else 8


def align(a: Ints, b: Ints, budget: EditBudget) -> Iterator[Run]:
    """The stretches that both have, in order."""
    i = j = 0
    stretches = True
    while i < len(a) and j < len(b):
        n = _agreement(a, b, i, j)
        if n:
            yield i, j, n
            i, j = i + n, j + n
            continue
        edit = _cheapest_edit(a[i : i + REACH], b[j : j + REACH], budget)
        if stretches and not edit.good:
            jump = _nearest_stretch(a, b, i, j)
            stretches = jump is not None  # none from here on: none later
            if jump is not None:
                i, j = jump
                continue
        for x, y, n in edit.runs:
            yield i + x, j + y, n
        i, j = i + edit.end[0], j + edit.end[1]


def _agreement(a: Ints, b: Ints, i: int, j: int) -> int:
    """How many tokens from here on are equal; looked at in pieces that double."""
    total, piece = 0, 64
    while True:
        n = min(piece, len(a) - i - total, len(b) - j - total)
        if n <= 0:
            return total
        unequal = a[i + total : i + total + n] != b[j + total : j + total + n]
        if unequal.any():
            return total + int(unequal.argmax())
        total, piece = total + n, piece * 2


@dataclass(frozen=True, slots=True)
class _Edit:
    runs: list[Run]
    end: tuple[int, int]  # how far it leads, in a and in b
    good: bool  # they agree from there on; or at least, most of the way was agreement


def _cheapest_edit(a: Ints, b: Ints, budget: EditBudget) -> _Edit:
    """Myers' greedy diff from the start of both, until they agree for a good while, both end, or the edits run out.

    `best[k]` is how far along a the cheapest path on diagonal k (place in a less place in b) has come.
    """
    n, m, edits = len(a), len(b), budget.edits
    tokens_a, tokens_b = a[: 8 * (edits + AGREE)].tolist(), b[: 8 * (edits + AGREE)].tolist()
    best = {1: 0}
    past: list[dict[int, int]] = []
    for d in range(edits + 1):
        past.append(dict(best))
        budget.steps -= d + 1
        for k in range(-d, d + 1, 2):
            x, _ = _step(best, k)
            y = x - k
            if x < 0 or x > n or y < 0 or y > m:
                best.pop(k, None)
                continue
            start = x
            while x < len(tokens_a) and y < len(tokens_b) and tokens_a[x] == tokens_b[y]:
                x, y = x + 1, y + 1
            best[k] = x
            if x - start >= AGREE or (x == n and y == m):
                return _Edit(_backtrack(past, k, x), (x, y), good=True)
    k = max((k for k in range(-edits, edits + 1, 2) if k in best), key=lambda k: 2 * best[k] - k)
    end = best[k], best[k] - k
    return _Edit(_backtrack(past, k, best[k]), end, good=sum(end) >= 2 * edits)


def _step(best: dict[int, int], k: int) -> tuple[int, int]:
    """One edit onto diagonal k: the place in a that it leads to, and the diagonal it comes from; -1 if from none."""
    skip_a, skip_b = best.get(k - 1, -1), best.get(k + 1, -1)
    if skip_b > skip_a:
        return skip_b, k + 1
    return (skip_a + 1, k - 1) if skip_a >= 0 else (-1, k)


def _backtrack(past: list[dict[int, int]], k: int, x: int) -> list[Run]:
    runs: list[Run] = []
    for best in reversed(past):
        start, before = _step(best, k)
        if x > start:
            runs.append((start, start - k, x - start))
        k, x = before, best[before]
    return runs[::-1]


def _nearest_stretch(a: Ints, b: Ints, i: int, j: int) -> tuple[int, int] | None:
    """Where the two next have `STRETCH` tokens in common, skipping as few as possible."""
    for reach in (REACH // 10, REACH, max(len(a), len(b))):
        grams_a, grams_b = _grams(a[i : i + reach]), _grams(b[j : j + reach])
        _, at_a, at_b = np.intersect1d(grams_a, grams_b, return_indices=True)  # of equal ones, the first
        if len(at_a):
            nearest = int(np.argmin(at_a + at_b))
            i, j = i + int(at_a[nearest]), j + int(at_b[nearest])
            return (i, j) if _agreement(a, b, i, j) else None  # the grams are only hashes
    return None


def _grams(tokens: Ints) -> Ints:
    """Each stretch of `STRETCH` tokens as one number."""
    count = max(len(tokens) - STRETCH + 1, 0)
    mixed = np.zeros(count, dtype=np.uint64)
    for offset in range(STRETCH):
        mixed = mixed * np.uint64(0x100000001B3) + tokens[offset : offset + count].view(np.uint64)
    return mixed.view(np.int64)
