"""Two traces, event by event: the tool with which errors of a prediction are hunted.

    difference = compare(predicted, recorded)
    difference.same, difference.hunks, difference.lifetimes

Addresses play no part. An allocation is known by its bytes and stream, a free by the allocation it ends; so the two
streams of allocations are aligned first, and then for each allocation found in both it is asked between which
others it ends. What comes out is of two kinds: allocations that only one side makes (`Hunk`), and allocations that
both make but that live longer in one (`Lifetime`).

Marks that both have are met exactly; between them, `align` does the work. Of 100,000 events nearly all are the same,
and twelve equal layers follow one another. A textbook diff is quadratic there, and one that trusts unique lines finds
none. So: run along while both agree; where they part, look for the cheapest edit that makes them agree for a good while
again (Myers, "An O(ND) difference algorithm", bounded); only if that fails, jump to the nearest long stretch that both
have. It is fast for any two sequences, and exact for those that differ in a few places at a time; for others it finds
many agreements, not the most there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from memfit.events import Action, Mark, Trace
from memfit.snapshots.schema import clean

# -- what is found ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Item:
    """An allocation, as one of the traces knows it."""

    event: int  # its ALLOC in that trace; -1 if it was live before
    block: int
    size: int
    stream: int
    op: str
    module: str
    category: str


@dataclass(frozen=True, slots=True)
class Hunk:
    """Allocations that only one side makes, at one place."""

    event_a: int
    event_b: int
    phase: str
    only_a: tuple[Item, ...]
    only_b: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class FreePlace:
    """Where in a trace something is freed: between which two allocations."""

    event: int | None  # None: never
    phase: str
    after: Item | None
    before: Item | None


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Allocations of both sides that one side frees earlier; all those freed at the same two places together."""

    event_a: int  # where the two begin to differ
    event_b: int
    pairs: tuple[tuple[Item, Item], ...]
    freed_a: FreePlace
    freed_b: FreePlace
    earlier: str  # a or b
    apart: int  # that many allocations of both sides lie between the two frees
    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Total:
    """All allocations of one op and size that only one side makes."""

    side: str
    op: str
    size: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.size * self.count


@dataclass(frozen=True, slots=True)
class Counts:
    both: int
    only_a: int
    only_b: int
    moved: int = 0  # frees in both, at different places


_NONE: tuple[Ints, Ints] = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Comparison:
    allocs: Counts
    frees: Counts
    hunks: tuple[Hunk, ...]
    lifetimes: tuple[Lifetime, ...]
    totals: tuple[Total, ...]  # largest first
    left_out: int = 0  # places beyond `detail`: counted above, not listed
    pairs: tuple[Ints, Ints] = field(default=_NONE, repr=False, compare=False)  # blocks that are one another's partner

    @property
    def same(self) -> bool:
        return self.allocs.only_a == self.allocs.only_b == 0 and not self.lifetimes and not self.frees.moved


# -- one trace, by birth ---------------------------------------------------------------------------------------


class _View:
    """The blocks of a trace in order of birth, with where each begins and ends."""

    def __init__(self, trace: Trace, marks: Sequence[tuple[int, Mark]] | None = None) -> None:
        self.trace = trace
        actions = np.frombuffer(trace.actions, dtype=np.uint8)
        subjects = np.frombuffer(trace.subjects, dtype=np.int64)
        blocks = len(trace.requested)
        allocs = np.flatnonzero(actions == Action.ALLOC)
        frees = np.flatnonzero((actions >= Action.FREE) & (actions <= Action.FREE_COMPLETED))
        birth = np.full(blocks, -1, dtype=np.int64)
        birth[subjects[allocs[::-1]]] = allocs[::-1]
        death = np.full(blocks, len(trace), dtype=np.int64)
        death[subjects[frees[::-1]]] = frees[::-1]  # backwards, so that the first of several stays
        size = np.frombuffer(trace.requested, dtype=np.int64)
        # in what order things came that were there before is not known: by size they can still be compared
        self.order: Ints = np.lexsort((np.where(birth < 0, size, 0), birth))
        self.birth: Ints = birth[self.order]
        self.death: Ints = death[self.order]
        self.size: Ints = size[self.order]
        self.keys = self._keys()
        if marks is None:
            marks = [(event, trace.marks[subjects[event]]) for event in np.flatnonzero(actions == Action.MARK).tolist()]
        self.mark_events = np.array([event for event, _ in marks], dtype=np.int64)
        self.marks = [mark for _, mark in marks]

    def _keys(self) -> Ints:
        """Bytes and stream in one number. Side streams are named by pointers, which differ: count them instead."""
        streams = np.frombuffer(self.trace.streams, dtype=np.int64)[self.order]
        names, first, which = np.unique(streams, return_index=True, return_inverse=True)
        rank = np.empty(len(names), dtype=np.uint64)
        rank[np.argsort(np.where(names == 0, -1, first), kind="stable")] = np.arange(len(names), dtype=np.uint64)
        shift = np.uint64(0 if (names == 0).any() else 1)
        keys: Ints = ((rank[which] + shift) * np.uint64(0x9E3779B97F4A7C15) + self.size.astype(np.uint64)).view(
            np.int64
        )
        return keys

    def phase(self, event: int) -> str:
        at = int(np.searchsorted(self.mark_events, event, side="right")) - 1
        if at < 0:
            return ""
        mark = self.marks[at]
        return clean(f"{mark.phase} {mark.step}" if mark.step else mark.phase)

    def item(self, place: int) -> Item:
        trace, block = self.trace, int(self.order[place])
        names = (clean(name) for name in (trace.op(block), trace.module(block), trace.category(block)))
        return Item(int(self.birth[place]), block, trace.requested[block], trace.streams[block], *names)

    def event_at(self, place: int) -> int:
        """Where the next allocation is, or would be."""
        return max(int(self.birth[place]), 0) if place < len(self.birth) else len(self.trace)

    def freed(self, place: int) -> FreePlace:
        event = int(self.death[place])
        after = int(np.searchsorted(self.birth, event, side="left"))
        return FreePlace(
            event=event if event < len(self.trace) else None,
            phase=self.phase(event),
            after=self.item(after - 1) if after else None,
            before=self.item(after) if after < len(self.birth) else None,
        )


# -- comparing -------------------------------------------------------------------------------------------------


def compare(
    a: Trace,
    b: Trace,
    *,
    detail: int = 10_000,
    marks_a: Sequence[tuple[int, Mark]] | None = None,
    marks_b: Sequence[tuple[int, Mark]] | None = None,
) -> Comparison:
    """How two traces differ. At most `detail` allocations are listed in hunks; all are counted. Where phases begin is
    read off the traces' own marks, unless `marks_a` or `marks_b` say it: (event, mark), in order."""
    left, right = _View(a, marks_a), _View(b, marks_b)
    runs = list(_runs(left, right))
    pair_a = np.concatenate([np.arange(i, i + n) for i, _, n in runs] or [np.empty(0, dtype=np.int64)])
    pair_b = np.concatenate([np.arange(j, j + n) for _, j, n in runs] or [np.empty(0, dtype=np.int64)])
    only_a = np.setdiff1d(np.arange(len(left.order)), pair_a, assume_unique=True)
    only_b = np.setdiff1d(np.arange(len(right.order)), pair_b, assume_unique=True)
    hunks, hunks_left_out = _hunks(left, right, runs, detail)
    lifetimes, lifetimes_left_out = _lifetimes(left, right, pair_a, pair_b, detail)
    return Comparison(
        allocs=Counts(len(pair_a), len(only_a), len(only_b)),
        frees=_frees(left, right, pair_a, pair_b, only_a, only_b),
        hunks=hunks,
        lifetimes=lifetimes,
        totals=tuple(_totals(left, right, only_a, only_b)),
        left_out=hunks_left_out + lifetimes_left_out,
        pairs=(left.order[pair_a], right.order[pair_b]),
    )


def _runs(a: _View, b: _View) -> Iterator[Run]:
    """Stretches of equal allocations, section by section between the marks that both have."""
    names: dict[Mark, int] = {}
    marks = [np.array([names.setdefault(mark, len(names)) for mark in view.marks], dtype=np.int64) for view in (a, b)]
    edges = [(0, 0), (int((a.birth < 0).sum()), int((b.birth < 0).sum()))]
    for i, j, n in align(marks[0], marks[1], EditBudget()):
        at_a = np.searchsorted(a.birth, a.mark_events[i : i + n]).tolist()
        edges += zip(at_a, np.searchsorted(b.birth, b.mark_events[j : j + n]).tolist(), strict=True)
    edges.append((len(a.keys), len(b.keys)))
    budget = EditBudget()
    for (i, j), (end_i, end_j) in pairwise(edges):
        for x, y, n in align(a.keys[i:end_i], b.keys[j:end_j], budget):
            yield i + x, j + y, n


def _hunks(a: _View, b: _View, runs: list[Run], detail: int) -> tuple[tuple[Hunk, ...], int]:
    found, left_out = [], 0
    i = j = 0
    for next_i, next_j, n in [*runs, (len(a.order), len(b.order), 0)]:
        count = (next_i - i) + (next_j - j)
        if count and detail > 0:
            event_a, event_b = a.event_at(i), b.event_at(j)
            only_a = tuple(a.item(place) for place in range(i, min(next_i, i + detail)))
            only_b = tuple(b.item(place) for place in range(j, min(next_j, j + detail)))
            phase = (a.phase(event_a) if only_a else b.phase(event_b)) or a.phase(event_a)
            found.append(Hunk(event_a, event_b, phase, only_a, only_b))
            detail -= count
        elif count:
            left_out += 1
        i, j = next_i + n, next_j + n
    return tuple(found), left_out


def _ends(a: _View, b: _View, pair_a: Ints, pair_b: Ints) -> tuple[Ints, Ints]:
    """When each pair ends on either side, as the number of pairs born by then; never = one more than there are."""
    ends = []
    for view, pair in ((a, pair_a), (b, pair_b)):
        born = np.searchsorted(view.birth[pair], view.death[pair], side="left")
        ends.append(np.where(view.death[pair] == len(view.trace), len(pair) + 1, born))
    return ends[0], ends[1]


def _frees(a: _View, b: _View, pair_a: Ints, pair_b: Ints, only_a: Ints, only_b: Ints) -> Counts:
    end_a, end_b = _ends(a, b, pair_a, pair_b)
    never = len(pair_a) + 1
    freed_a, freed_b = end_a != never, end_b != never
    return Counts(
        both=int((freed_a & freed_b & (end_a == end_b)).sum()),
        only_a=int((freed_a & ~freed_b).sum()) + int((a.death[only_a] < len(a.trace)).sum()),
        only_b=int((freed_b & ~freed_a).sum()) + int((b.death[only_b] < len(b.trace)).sum()),
        moved=int((freed_a & freed_b & (end_a != end_b)).sum()),
    )


def _lifetimes(a: _View, b: _View, pair_a: Ints, pair_b: Ints, detail: int) -> tuple[tuple[Lifetime, ...], int]:
    end_a, end_b = _ends(a, b, pair_a, pair_b)
    first = np.minimum(end_a, end_b)
    differ = np.flatnonzero(end_a != end_b)
    differ = differ[np.lexsort((differ, end_b[differ], end_a[differ], first[differ]))]
    change = np.flatnonzero((np.diff(end_a[differ]) != 0) | (np.diff(end_b[differ]) != 0)) + 1
    edges = [0, *change.tolist(), len(differ)] if len(differ) else []
    found: list[Lifetime] = []
    for start, end in pairwise(edges):
        if detail <= 0:
            break
        group = differ[start:end]
        ends = int(end_a[group[0]]), int(end_b[group[0]])
        found.append(_lifetime(a, b, pair_a[group], pair_b[group], ends, detail, (pair_a, pair_b)))
        detail -= len(group)
    return tuple(found), max(len(edges) - 1, 0) - len(found)


def _lifetime(
    a: _View, b: _View, group_a: Ints, group_b: Ints, ends: tuple[int, int], detail: int, pairs: tuple[Ints, Ints]
) -> Lifetime:
    early, late = sorted(ends)
    then_a, then_b = (  # the first allocation of both that comes after the earlier free
        view.event_at(int(pair[early])) if early < len(pair) else len(view.trace)
        for view, pair in zip((a, b), pairs, strict=True)
    )
    freed_a, freed_b = a.freed(int(group_a[0])), b.freed(int(group_b[0]))
    in_a = ends[0] < ends[1]
    return Lifetime(
        event_a=freed_a.event if in_a and freed_a.event is not None else then_a,
        event_b=freed_b.event if not in_a and freed_b.event is not None else then_b,
        pairs=tuple((a.item(int(p)), b.item(int(q))) for p, q in zip(group_a[:detail], group_b[:detail], strict=True)),
        freed_a=freed_a,
        freed_b=freed_b,
        earlier="a" if in_a else "b",
        apart=min(late, len(pairs[0])) - early,
        count=len(group_a),
        nbytes=int(a.size[group_a].sum()),
    )


def _totals(a: _View, b: _View, only_a: Ints, only_b: Ints) -> list[Total]:
    counts: dict[tuple[str, int, int], int] = defaultdict(int)
    for side, view, only in (("a", a, only_a), ("b", b, only_b)):
        for block in view.order[only].tolist():
            counts[side, view.trace.op_of[block], view.trace.requested[block]] += 1
    names = {"a": a.trace.names, "b": b.trace.names}
    totals = [Total(side, clean(names[side][op]), size, count) for (side, op, size), count in counts.items()]
    return sorted(totals, key=lambda total: (-total.nbytes, total.side, total.op, -total.size))


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
