"""From the stream of a model with few blocks to the stream of one with many, event by event.

Transformer blocks are alike: what the second does, the third does again, with its own tensors. So a model of four
units (a unit is one block, or one period of a pattern of blocks) tells the stream of any number of them. Peaks are not
linear in the number of blocks, so nothing is extrapolated: the whole stream is written out, to be replayed.

How: the stream is cut into passes over the units, upwards as in forward or downwards as in backward. In each pass the
two inner units must be the same, event for event: same sizes and ops, frees of tensors of the same unit, of the one
before or the one after. That is the proof, made anew for each trace; where it fails there is no extension, and the
caller traces the whole model. The first and the last unit are as they were traced.

What is written does not depend on sizes, but for those that must be the same. So an `Extension` is found once, and
gives the sizes of the whole from those of the few blocks, as often as there are other batches and lengths.
"""

from __future__ import annotations

import dataclasses
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.events import Action, Trace
from memfit.extrapolation.reused import REUSED

UNITS = 4
FIRST, BEFORE, AFTER, LAST = range(UNITS)  # the traced units; BEFORE and AFTER are the inner ones
NONE = -1
Ints = npt.NDArray[np.int64]


class NotRepeating(Exception):
    """Why a trace cannot be extended, for the notes of a plan."""


def extend(trace: Trace, blocks: str, *, period: int, units: int, edge: int = 0) -> Trace:
    """The trace of `units` units, from one of four. `blocks` is the path of the list of blocks: `model.layers`. Blocks
    left over when the pattern does not come out even belong to the last unit; `edge` more periods belong to the first,
    and as many to the last."""
    return extension(trace, blocks, period=period, units=units, edge=edge).apply(trace)


def extension(trace: Trace, blocks: str, *, period: int, units: int, edge: int = 0) -> Extension:
    """As `extend`, for all traces that differ from this one in sizes alone."""
    if units < UNITS:
        raise NotRepeating(f"fewer than {UNITS} units")
    unit_of = _units_of_blocks(trace, blocks, period, edge)
    events = _Events.read(trace)
    passes = list(_passes(events, unit_of))
    counting = np.array([int(block) for block in trace.facts.get("lists", {})], dtype=np.int64)
    for each in passes:
        each.claim(events, unit_of, counting)
    return _Renumbering(trace, events, unit_of, blocks, period, units).write(passes)


def extension_in_time(trace: Trace, starts: list[int], *, units: int) -> Extension:
    """For the trace of `units` steps, from one of four that begin at the events `starts`: each step does what the one
    before did, with tensors that have grown by the same number of bytes."""
    if units < UNITS or len(starts) != UNITS:
        raise NotRepeating(f"fewer than {UNITS} steps")
    events = _Events.read(trace)
    unit_of = np.full(len(trace.module_of), NONE, dtype=np.int64)
    born = np.flatnonzero(events.actions == Action.ALLOC)
    unit_of[events.subjects[born]] = np.searchsorted(starts, born, side="right") - 1
    return _Renumbering(trace, events, unit_of, "", 1, units, grows=True).write([_Pass(0, len(trace), starts)])


def _units_of_blocks(trace: Trace, blocks: str, period: int, edge: int) -> Ints:
    pattern = re.compile(re.escape(blocks) + r"\.(\d+)(?:\.|$)")
    matches = (pattern.match(name) for name in trace.names)
    by_name = [NONE if m is None else min(max(int(m[1]) // period - edge, FIRST), LAST) for m in matches]
    found: Ints = np.array(by_name, dtype=np.int64)[np.frombuffer(trace.module_of, dtype=np.int32)]
    return found


@dataclass(frozen=True, kw_only=True)
class Extension:
    frame: Trace
    """The whole, but for its sizes."""
    chosen: Ints
    """Of each block of the whole: the traced one whose size it has."""
    alike: Ints
    """Pairs of traced blocks that stand in for each other."""
    counted: tuple[tuple[int, int, int], ...]
    """Blocks with an entry for each tensor of a list: the block, how many were traced, how many there are."""
    growth: tuple[Ints, Ints, Ints] | None = None
    """How many times each block of the whole has grown, by the difference of which two traced ones."""

    def apply(self, trace: Trace) -> Trace:
        return with_sizes(self.frame, self.sizes(sizes_of(trace)))

    def sizes(self, traced: Ints) -> Ints:
        if (traced[self.alike[:, 0]] != traced[self.alike[:, 1]]).any():
            raise NotRepeating("tensors of inner units differ")
        sizes = traced[self.chosen]
        if self.growth is not None:
            times, later, earlier = self.growth
            sizes += times * (traced[later] - traced[earlier])
        for block, traced_entries, entries in self.counted:
            sizes[block] = sizes[block] // traced_entries * entries
        return sizes


def sizes_of(trace: Trace) -> Ints:
    return np.frombuffer(trace.requested, dtype=np.int64)


def with_sizes(frame: Trace, sizes: Ints) -> Trace:
    """Shares all else with the frame."""
    return dataclasses.replace(frame, requested=array("q", np.ascontiguousarray(sizes, dtype=np.int64).tobytes()))


# -- passes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Events:
    actions: npt.NDArray[np.uint8]
    subjects: Ints

    @classmethod
    def read(cls, trace: Trace) -> _Events:
        return cls(np.frombuffer(trace.actions, dtype=np.uint8), np.frombuffer(trace.subjects, dtype=np.int64))

    @property
    def frees(self) -> npt.NDArray[np.bool_]:
        return (self.actions >= Action.FREE) & (self.actions <= Action.FREE_COMPLETED)

    @property
    def about_blocks(self) -> npt.NDArray[np.bool_]:
        return self.actions <= Action.FREE_COMPLETED

    def units(self, unit_of: Ints, which: npt.NDArray[np.bool_]) -> Ints:
        """Of the blocks that the events are about, NONE for the other events."""
        found = np.full(len(self.actions), NONE, dtype=np.int64)
        found[which] = unit_of[self.subjects[which]]
        return found


@dataclass(slots=True)
class _Pass:
    """A stretch of events; if it runs over all units, where each of the four begins, in the order they come."""

    start: int
    end: int
    bounds: list[int] = field(default_factory=list)
    upwards: bool = True

    @property
    def inner(self) -> list[tuple[int, int]]:
        return [(self.bounds[1], self.bounds[2]), (self.bounds[2], self.bounds[3])]

    def claim(self, events: _Events, unit_of: Ints, counting: Ints) -> None:
        """What is made inside a unit and names none (an optimizer's counter) is that unit's. Of the units at the ends
        only the one that comes first, and not what counts tensors: the rest may as well be about all units."""
        order = range(UNITS) if self.upwards else range(LAST, FIRST - 1, -1)
        for unit, start, end in zip(order, self.bounds, self.bounds[1:], strict=False):
            made = events.subjects[start:end][events.actions[start:end] == Action.ALLOC]
            if unit in (FIRST, LAST):
                made = np.setdiff1d(made, counting)
            unit_of[made[unit_of[made] == NONE]] = unit


def _passes(events: _Events, unit_of: Ints) -> Iterator[_Pass]:
    made = events.units(unit_of, events.actions == Action.ALLOC)
    freed = events.units(unit_of, events.frees)
    for start, end, only_frees in _stretches(events, freed):
        yield from _split(freed if only_frees else made, start, end)


def _stretches(events: _Events, freed: Ints) -> Iterator[tuple[int, int, bool]]:
    """Cut at marks, and around runs of frees that go over all units: those are passes of their own."""
    edges = np.diff(events.frees.astype(np.int8), prepend=0, append=0)
    starts, ends = np.flatnonzero(edges > 0), np.flatnonzero(edges < 0)
    seen = np.zeros((UNITS, len(events.actions) + 1), dtype=np.int64)
    for unit in range(UNITS):
        np.cumsum(freed == unit, out=seen[unit, 1:])
    wide = ((seen[:, ends] - seen[:, starts]) > 0).all(axis=0)
    alone = set(starts[wide].tolist())
    marks = np.flatnonzero((events.actions == Action.MARK) | (events.actions == Action.EMPTY_CACHE))
    cuts = sorted({0, len(events.actions), *marks.tolist(), *alone, *ends[wide].tolist()})
    yield from ((start, end, start in alone) for start, end in pairwise(cuts))


def _split(units: Ints, start: int, end: int) -> Iterator[_Pass]:
    """Into runs of units that go up, or down, by one."""
    events = start + np.flatnonzero(units[start:end] != NONE)
    named = units[events]
    changes = np.diff(named, prepend=NONE) != 0
    firsts: list[tuple[int, int]] = []
    runs: list[list[tuple[int, int]]] = [firsts]
    for event, unit in zip(events[changes].tolist(), named[changes].tolist(), strict=True):
        if firsts and not _continues(firsts, unit):
            firsts = []
            runs.append(firsts)
        firsts.append((event, unit))
    bounds = [start, *(run[0][0] for run in runs[1:]), end]
    for run, begin, stop in zip(runs, bounds, bounds[1:], strict=False):
        yield _made(run, begin, stop)


def _continues(firsts: list[tuple[int, int]], unit: int) -> bool:
    step = unit - firsts[-1][1]
    return abs(step) == 1 and (len(firsts) < 2 or step == firsts[-1][1] - firsts[-2][1])


def _made(run: list[tuple[int, int]], start: int, end: int) -> _Pass:
    order = [unit for _, unit in run]
    if order in ([], [FIRST], [LAST]):
        return _Pass(start, end)
    if order not in ([0, 1, 2, 3], [3, 2, 1, 0]):
        raise NotRepeating(f"a pass over units {order}")
    return _Pass(start, end, [event for event, _ in run], upwards=order[0] == FIRST)


# -- writing -----------------------------------------------------------------------------------------------------


class _Renumbering:
    """New numbers for blocks: those of no unit, those of the first unit, of each inner one, of the last."""

    def __init__(
        self, trace: Trace, events: _Events, unit_of: Ints, blocks: str, period: int, units: int, *, grows: bool = False
    ) -> None:
        self.trace, self.events, self.unit_of, self.units, self.grows = trace, events, unit_of, units, grows
        self.path, self.period = blocks, period
        self.free_standing, *self.members = (np.flatnonzero(unit_of == unit) for unit in range(NONE, UNITS))
        self.rank = np.zeros(len(unit_of), dtype=np.int64)
        for mine in (self.free_standing, *self.members):
            self.rank[mine] = np.arange(len(mine))
        self.each = len(self.members[BEFORE])
        if self.each != len(self.members[AFTER]):
            raise NotRepeating("inner units hold different numbers of tensors")
        self.base_first = len(self.free_standing)
        self.base_inner = self.base_first + len(self.members[FIRST])
        self.base_last = self.base_inner + (units - 2) * self.each
        self.total = self.base_last + len(self.members[LAST])
        self.alike: list[Ints] = []

    def write(self, passes: list[_Pass]) -> Extension:
        actions, subjects = [], []
        numbers = {low: self._numbers(low) for low in (True, False)}
        for each in passes:
            for some_actions, some_subjects in self._written(each, numbers):
                actions.append(some_actions)
                subjects.append(some_subjects)
        out = self.trace.emptied()
        out.facts.pop("lists", None)  # they name traced blocks
        out.actions.frombytes(np.concatenate(actions).tobytes())
        out.subjects.frombytes(np.concatenate(subjects).tobytes())
        chosen = self._write_blocks(out)
        return Extension(
            frame=out,
            chosen=chosen,
            alike=self._pairs(),
            counted=self._counted(),
            growth=self._growth() if self.grows else None,
        )

    def _written(self, each: _Pass, numbers: dict[bool, Ints]) -> Iterator[tuple[Any, Ints]]:
        if not each.bounds:
            yield self._literal(each.start, each.end, None)
            return
        first, second = each.inner
        middle = self._middle(first, second, upwards=each.upwards)
        how_many = max(self.units - UNITS, 0)
        yield self._literal(each.start, first[1], numbers[each.upwards])
        if how_many:
            units = np.arange(2, self.units - 2) if each.upwards else np.arange(self.units - 3, 1, -1)
            kinds = self.events.actions[slice(*first)]
            yield np.tile(kinds, how_many), (middle[None, :] + units[:, None] * self.each).ravel()
        yield self._literal(second[0], each.end, numbers[not each.upwards])

    def _literal(self, start: int, end: int, numbers: Ints | None) -> tuple[Any, Ints]:
        """`numbers` of blocks as seen from one end of a pass; there are none for inner units outside of passes."""
        kinds, made = self.events.actions[start:end], self.events.subjects[start:end].copy()
        about_blocks = kinds <= Action.FREE_COMPLETED
        blocks = made[about_blocks]
        if numbers is None and np.isin(self.unit_of[blocks], (BEFORE, AFTER)).any():
            raise NotRepeating("inner units are named outside of a pass over all of them")
        made[about_blocks] = (self._numbers(True) if numbers is None else numbers)[blocks]
        return kinds, made

    def _numbers(self, low: bool) -> Ints:
        """Seen from the first units the inner ones are the second and third; from the last, the two before it."""
        numbers = self.rank.copy()
        numbers[self.members[FIRST]] += self.base_first
        numbers[self.members[LAST]] += self.base_last
        for unit in (BEFORE, AFTER):
            numbers[self.members[unit]] += self._inner(unit if low else self.units - UNITS + unit)
        return numbers

    def _inner(self, unit: int) -> int:
        return self.base_inner + (unit - 1) * self.each

    def _middle(self, first: tuple[int, int], second: tuple[int, int], *, upwards: bool) -> Ints:
        """What an inner unit's events name, as an offset to which `unit * each` is added."""
        if first[1] - first[0] != second[1] - second[0]:
            raise NotRepeating("inner units have different numbers of events")
        kinds = self.events.actions[slice(*first)]
        if (kinds != self.events.actions[slice(*second)]).any() or (kinds > Action.FREE_COMPLETED).any():
            raise NotRepeating("inner units do different things")
        x, y = (self.events.subjects[slice(*unit)] for unit in (first, second))
        own = (BEFORE, AFTER) if upwards else (AFTER, BEFORE)
        unit_x, unit_y = self.unit_of[x], self.unit_of[y]
        distance = unit_x - own[0]
        foreign = (unit_x == NONE) | (unit_y == NONE) | (distance != unit_y - own[1]) | (abs(distance) > 1)
        if foreign.any():
            raise NotRepeating("an inner unit frees what is not its own nor its neighbour's")
        ops = np.frombuffer(self.trace.op_of, dtype=np.int32)
        again = self.trace.names.index(REUSED) if REUSED in self.trace.names else NONE
        passed_on = (kinds != Action.ALLOC) & ((ops[x] == again) | (ops[y] == again))  # an end may have made it itself
        if ((ops[x] != ops[y]) & ~passed_on).any():
            raise NotRepeating("tensors of inner units differ")
        if not self.grows:
            self.alike.append(np.stack((x, y), axis=1))
        is_inner_x, is_inner_y = (np.isin(unit, (BEFORE, AFTER)) for unit in (unit_x, unit_y))
        rank_x, rank_y = self.rank[x], self.rank[y]
        if (~is_inner_x & ~is_inner_y).any() or (is_inner_x & is_inner_y & (rank_x != rank_y)).any():
            raise NotRepeating("tensors of inner units come in different orders")
        offsets: Ints = self._inner(0) + distance * self.each + np.where(is_inner_x, rank_x, rank_y)
        return offsets

    def _pairs(self) -> Ints:
        pairs = np.concatenate((np.zeros((0, 2), dtype=np.int64), *self.alike))
        count = max(len(self.unit_of), 1)
        return np.stack(np.divmod(np.unique(pairs[:, 0] * count + pairs[:, 1]), count), axis=1)

    def _write_blocks(self, out: Trace) -> Ints:
        count = self.units - 2
        first, before, _, last = self.members
        chosen: Ints = np.concatenate((self.free_standing, first, np.tile(before, count), last))
        out.take_blocks(self.trace, chosen)
        if not self.grows:
            self._rename(out)
        return chosen

    def _growth(self) -> tuple[Ints, Ints, Ints]:
        """Each tensor of a step is larger than that of the step before by the same bytes, traced twice."""
        times, later, earlier = (np.zeros(self.total, dtype=np.int64) for _ in range(3))
        before, after = self.members[BEFORE], self.members[AFTER]
        count, inner = self.units - 2, slice(self.base_inner, self.base_last)
        times[inner] = np.repeat(np.arange(count), self.each)
        later[inner], earlier[inner] = np.tile(after, count), np.tile(before, count)
        alike = min(self.each, len(self.members[LAST]))
        last = slice(self.base_last, self.base_last + alike)
        times[last] = self.units - UNITS
        later[last], earlier[last] = after[:alike], before[:alike]
        return times, later, earlier

    def _rename(self, out: Trace) -> None:
        """`layers.1.mlp` of the unit that stands for all inner ones becomes `layers.17.mlp`."""
        pattern = re.compile(rf"({re.escape(self.path)}\.)(\d+)(?=\.|$)")
        modules = np.frombuffer(out.module_of, dtype=np.int32).copy()
        ends = {LAST: slice(self.base_last, self.total), BEFORE: slice(self.base_inner, self.base_last)}
        for traced, where in ends.items():
            units = [self.units - 1] if traced == LAST else range(1, self.units - 1)
            found, which = np.unique(modules[where].reshape(len(units), -1)[0], return_inverse=True)
            parts = [(name, pattern.search(name)) for name in (out.names[module] for module in found.tolist())]
            table = [
                [
                    out.name_id(name if m is None else f"{name[: m.end(1)]}{int(m[2]) + shift}{name[m.end(2) :]}")
                    for name, m in parts
                ]
                for shift in ((unit - traced) * self.period for unit in units)
            ]
            modules[where] = np.array(table, dtype=np.int32).reshape(len(units), -1)[:, which].ravel()
        out.module_of = array("i", modules.tobytes())

    def _counted(self) -> tuple[tuple[int, int, int], ...]:
        """Buffers with an entry for each tensor of a list grow with the number of blocks."""
        lists: dict[str, list[int | None]] = self.trace.facts.get("lists", {})
        made = []
        for block, members in ((int(b), found) for b, found in lists.items()):
            if self.unit_of[block] != NONE or self.grows:
                continue
            inner = sum(1 for member in members if member is not None and self.unit_of[member] == BEFORE)
            wanted = len(members) + (self.units - UNITS) * inner
            made.append((int(self.rank[block]), len(members), wanted))
        return tuple(made)
