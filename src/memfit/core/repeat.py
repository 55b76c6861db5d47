"""From the stream of a model with few blocks to the stream of one with many, event by event.

Transformer blocks are alike: what the second does, the third does again, with its own tensors. So a model of four
units (a unit is one block, or one period of a pattern of blocks) tells the stream of any number of them. Peaks are not
linear in the number of blocks, so nothing is extrapolated: the whole stream is written out, to be replayed.

How: the stream is cut into passes over the units, upwards as in forward or downwards as in backward. In each pass the
two inner units must be the same, event for event: same sizes and ops, frees of tensors of the same unit, of the one
before or the one after. That is the proof, made anew for each trace; where it fails there is no extension, and the
caller traces the whole model. The first and the last unit are as they were traced.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.core.events import Action, Trace

UNITS = 4
FIRST, BEFORE, AFTER, LAST = range(UNITS)  # the traced units; BEFORE and AFTER are the inner ones
FREES = (Action.FREE, Action.FREE_REQUESTED, Action.FREE_COMPLETED)
NONE = -1
Ints = npt.NDArray[np.int64]


class NotRepeating(Exception):
    """Why a trace cannot be extended, for the notes of a plan."""


def extend(trace: Trace, blocks: str, *, period: int, units: int) -> Trace:
    """The trace of `units` units, from one of four. `blocks` is the path of the list of blocks: `model.layers`. Blocks
    left over when the pattern does not come out even belong to the last unit."""
    if units < UNITS:
        raise NotRepeating(f"fewer than {UNITS} units")
    unit_of = _units_of_blocks(trace, blocks, period)
    passes = list(_passes(trace, unit_of))
    for each in passes:
        each.claim(trace, unit_of)
    return _Extension(trace, unit_of, blocks, period, units).write(passes)


def extend_in_time(trace: Trace, starts: list[int], *, units: int) -> Trace:
    """The trace of `units` steps, from one of four that begin at the events `starts`: each step does what the one
    before did, with tensors that have grown by the same number of bytes."""
    if units < UNITS or len(starts) != UNITS:
        raise NotRepeating(f"fewer than {UNITS} steps")
    unit_of = [NONE] * len(trace.requested)
    for event in range(starts[0], len(trace)):
        if trace.actions[event] == Action.ALLOC:
            unit_of[trace.subjects[event]] = bisect_right(starts, event) - 1
    return _Extension(trace, unit_of, "", 1, units, grows=True).write([_Pass(0, len(trace), starts)])


def _units_of_blocks(trace: Trace, blocks: str, period: int) -> list[int]:
    pattern = re.compile(re.escape(blocks) + r"\.(\d+)(?:\.|$)")
    by_name = [min(int(m[1]) // period, LAST) if (m := pattern.match(name)) else NONE for name in trace.names]
    return [by_name[module] for module in trace.module_of]


# -- passes ------------------------------------------------------------------------------------------------------


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

    def claim(self, trace: Trace, unit_of: list[int]) -> None:
        """What is made inside an inner unit and names no unit (an optimizer's counter) is that unit's."""
        for i, (start, end) in enumerate(self.inner if self.bounds else ()):
            owner = i + 1 if self.upwards else UNITS - 2 - i
            for event in range(start, end):
                if trace.actions[event] == Action.ALLOC and unit_of[trace.subjects[event]] == NONE:
                    unit_of[trace.subjects[event]] = owner


def _passes(trace: Trace, unit_of: list[int]) -> Iterator[_Pass]:
    for start, end, only_frees in _stretches(trace, unit_of):
        yield from _split(trace, unit_of, start, end, only_frees)


def _stretches(trace: Trace, unit_of: list[int]) -> Iterator[tuple[int, int, bool]]:
    """Cut at marks, and around runs of frees that go over three units or more: those are passes of their own."""
    begin = 0
    run: int | None = None
    seen: set[int] = set()
    for i in range(len(trace) + 1):
        action = trace.actions[i] if i < len(trace) else None
        if action in FREES:
            if run is None:
                run, seen = i, set()
            seen.add(unit_of[trace.subjects[i]])
            continue
        if run is not None and len(seen - {NONE}) > 2:
            yield begin, run, False
            yield run, i, True
            begin = i
        run = None
        if action in (Action.MARK, Action.EMPTY_CACHE, None):
            yield begin, i, False
            begin = i


def _split(trace: Trace, unit_of: list[int], start: int, end: int, only_frees: bool) -> Iterator[_Pass]:
    """Into runs of units that go up, or down, by one."""
    kinds = FREES if only_frees else (Action.ALLOC,)
    firsts: list[tuple[int, int]] = []
    runs: list[list[tuple[int, int]]] = [firsts]
    for event in range(start, end):
        unit = unit_of[trace.subjects[event]] if trace.actions[event] in kinds else NONE
        if unit == NONE or (firsts and firsts[-1][1] == unit):
            continue
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


class _Extension:
    """New numbers for blocks: those of no unit, those of the first unit, of each inner one, of the last."""

    def __init__(
        self, trace: Trace, unit_of: list[int], blocks: str, period: int, units: int, *, grows: bool = False
    ) -> None:
        self.trace, self.unit_of, self.units, self.grows = trace, unit_of, units, grows
        self.path, self.period = blocks, period
        self.members: list[list[int]] = [[], [], [], []]
        self.free_standing: list[int] = []
        self.rank: list[int] = [0] * len(unit_of)
        for block, unit in enumerate(unit_of):
            mine = self.free_standing if unit == NONE else self.members[unit]
            self.rank[block] = len(mine)
            mine.append(block)
        self.each = len(self.members[BEFORE])
        if self.each != len(self.members[AFTER]):
            raise NotRepeating("inner units hold different numbers of tensors")
        self.base_first = len(self.free_standing)
        self.base_inner = self.base_first + len(self.members[FIRST])
        self.base_last = self.base_inner + (units - 2) * self.each
        self.total = self.base_last + len(self.members[LAST])

    def write(self, passes: list[_Pass]) -> Trace:
        actions, subjects = [], []
        for each in passes:
            for some_actions, some_subjects in self._written(each):
                actions.append(some_actions)
                subjects.append(some_subjects)
        out = Trace(origin=self.trace.origin, facts=dict(self.trace.facts))
        out.marks, out.names = list(self.trace.marks), list(self.trace.names)
        out._name_ids = {name: i for i, name in enumerate(out.names)}
        _fill(out.actions, np.concatenate(actions), np.uint8)
        _fill(out.subjects, np.concatenate(subjects), np.int64)
        self._write_blocks(out)
        return out

    def _written(self, each: _Pass) -> Iterator[tuple[Any, Ints]]:
        if not each.bounds:
            yield self._literal(each.start, each.end, None)
            return
        (first, second), trace = each.inner, self.trace
        kinds = np.frombuffer(trace.actions, dtype=np.uint8)[first[0] : first[1]]
        middle = self._middle(first, second, upwards=each.upwards)
        how_many = max(self.units - 4, 0)
        yield self._literal(each.start, first[1], each.upwards)
        if how_many:
            units = np.arange(2, self.units - 2) if each.upwards else np.arange(self.units - 3, 1, -1)
            shift = np.where(kinds == Action.MARK, 0, self.each)
            yield np.tile(kinds, how_many), (middle[None, :] + units[:, None] * shift[None, :]).ravel()
        yield self._literal(second[0], each.end, not each.upwards)

    def _literal(self, start: int, end: int, low: bool | None) -> tuple[Any, Ints]:
        kinds = np.frombuffer(self.trace.actions, dtype=np.uint8)[start:end]
        made = [
            self._number(subject, low) if kind <= Action.FREE_COMPLETED else subject
            for kind, subject in zip(kinds.tolist(), self.trace.subjects[start:end], strict=True)
        ]
        return kinds, np.array(made, dtype=np.int64)

    def _number(self, block: int, low: bool | None) -> int:
        """Seen from the first units the inner ones are the second and third; from the last, the two before it."""
        unit, rank = self.unit_of[block], self.rank[block]
        if unit == NONE:
            return rank
        if unit == FIRST:
            return self.base_first + rank
        if unit == LAST:
            return self.base_last + rank
        if low is None:
            raise NotRepeating("inner units are named outside of a pass over all of them")
        return self._inner(unit if low else self.units - UNITS + unit, rank)

    def _inner(self, unit: int, rank: int) -> int:
        return self.base_inner + (unit - 1) * self.each + rank

    def _middle(self, first: tuple[int, int], second: tuple[int, int], *, upwards: bool) -> Ints:
        """What an inner unit's events name, as an offset to which `unit * each` is added."""
        if first[1] - first[0] != second[1] - second[0]:
            raise NotRepeating("inner units have different numbers of events")
        own = (BEFORE, AFTER) if upwards else (AFTER, BEFORE)
        return np.array(
            [self._named(a, b, own) for a, b in zip(range(*first), range(*second), strict=True)], dtype=np.int64
        )

    def _named(self, a: int, b: int, own: tuple[int, int]) -> int:
        trace = self.trace
        kind = trace.actions[a]
        if kind != trace.actions[b] or kind > Action.FREE_COMPLETED:
            raise NotRepeating("inner units do different things")
        x, y = trace.subjects[a], trace.subjects[b]
        distance = self.unit_of[x] - own[0]
        if NONE in (self.unit_of[x], self.unit_of[y]) or distance != self.unit_of[y] - own[1] or abs(distance) > 1:
            raise NotRepeating("an inner unit frees what is not its own nor its neighbour's")
        if trace.op_of[x] != trace.op_of[y] or (trace.requested[x] != trace.requested[y] and not self.grows):
            raise NotRepeating("tensors of inner units differ")
        inner = [block for block in (x, y) if self.unit_of[block] in (BEFORE, AFTER)]
        if not inner or len({self.rank[block] for block in inner}) > 1:
            raise NotRepeating("tensors of inner units come in different orders")
        return self._inner(distance, self.rank[inner[0]])

    def _write_blocks(self, out: Trace) -> None:
        count = self.units - 2
        order = self.free_standing + self.members[FIRST] + self.members[BEFORE] * count + self.members[LAST]
        chosen = np.array(order, dtype=np.int64)
        for name, kind in (
            ("requested", np.int64), ("streams", np.int64), ("addresses", np.uint64), ("category_of", np.int32),
            ("op_of", np.int32), ("module_of", np.int32),
        ):  # fmt: skip
            _fill(getattr(out, name), np.frombuffer(getattr(self.trace, name), dtype=kind)[chosen], kind)
        if self.grows:
            self._grow(out)
        else:
            self._rename(out)
            self._count_tensors(out)

    def _grow(self, out: Trace) -> None:
        """Each tensor of a step is larger than that of the step before by the same bytes, traced twice."""
        sizes = [np.array([self.trace.requested[b] for b in members], dtype=np.int64) for members in self.members]
        step = sizes[AFTER] - sizes[BEFORE]
        alike = min(len(sizes[AFTER]), len(sizes[LAST]))
        requested = np.frombuffer(out.requested, dtype=np.int64).copy()
        inner = requested[self.base_inner : self.base_last].reshape(self.units - 2, self.each)
        inner += np.arange(self.units - 2)[:, None] * step[None, :]
        requested[self.base_last : self.base_last + alike] += (self.units - UNITS) * step[:alike]
        out.requested = array("q", requested.tobytes())

    def _rename(self, out: Trace) -> None:
        """`layers.1.mlp` of the unit that stands for all inner ones becomes `layers.17.mlp`."""
        pattern = re.compile(re.escape(self.path) + r"\.(\d+)(?=\.|$)")

        def renamed(module: int, unit: int, traced: int) -> int:
            def number(match: re.Match[str]) -> str:
                return f"{self.path}.{int(match[1]) + (unit - traced) * self.period}"

            return out.name_id(pattern.sub(number, out.names[module], count=1))

        modules = np.frombuffer(out.module_of, dtype=np.int32).copy()
        for unit in range(1, self.units):
            last = unit == self.units - 1
            start, end = (self.base_last, self.total) if last else (self._inner(unit, 0), self._inner(unit + 1, 0))
            known: dict[int, int] = {}
            for at in range(start, end):
                module = int(modules[at])
                if module not in known:
                    known[module] = renamed(module, unit, LAST if last else BEFORE)
                modules[at] = known[module]
        out.module_of = array("i", modules.tobytes())

    def _count_tensors(self, out: Trace) -> None:
        """Buffers with an entry for each tensor of a list grow with the number of blocks."""
        lists: dict[str, list[int | None]] = self.trace.facts.get("lists", {})
        for block, members in ((int(b), found) for b, found in lists.items()):
            if self.unit_of[block] != NONE:
                continue
            inner = sum(1 for member in members if member is not None and self.unit_of[member] == BEFORE)
            wanted = len(members) + (self.units - UNITS) * inner
            out.requested[self._number(block, None)] = self.trace.requested[block] // len(members) * wanted
        out.facts.pop("lists", None)


def _fill(column: array[int], values: Any, kind: Any) -> None:
    column.frombytes(np.ascontiguousarray(values, dtype=kind).tobytes())
