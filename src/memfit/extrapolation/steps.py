"""More steps than were traced: a step of the trace is put in again, as often as steps are missing.

From its second step on a job repeats itself, with new tensors: what lies between two like places of a trace is put in
again behind the second.

A step lets go what the step before it made (its gradients, a batch), so the step that is put in must be told which of
the tensors it finds stand for those. There are two proofs, made anew for each trace; where they fail, NotRepeating is
raised and no step is added.

- Left behind: what the step found and let go is matched, tensor by tensor, by what it made and left: the same op,
  module and stream, in the same order, and the same size. This needs no further step, but steps that leave behind
  exactly what they found. For a training it is cut where gradients are about to be dropped: the optimizer's state is
  there by then, so the second step is the first that can be repeated.
- Compared: the next step, which was traced too, does the same, event for event. It may end earlier, with the job. A
  step may then leave more behind than it found.

    |step w8 m8 g4 |zero -g |step h4 |zero -h        becomes
    |step w8 m8 g4 |zero -g |step h4 |zero -h |step i4 |zero -i
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from memfit.events import BLOCK_COLUMNS, LISTS, Action, Mark, Trace, between, step_begins
from memfit.extrapolation.blocks import Extension, Ints, NotRepeating, sizes_of, with_sizes
from memfit.extrapolation.reused import COMPILED


def in_birth_order(trace: Trace) -> tuple[Trace, Ints]:
    """The same trace with blocks numbered as they are born, without sizes; and of each block its number before. Facts
    are as they were: traces whose facts name blocks are in this order already."""
    actions, subjects = np.frombuffer(trace.actions, np.uint8), np.frombuffer(trace.subjects, np.int64)
    births: Ints = subjects[actions == Action.ALLOC]
    number = np.zeros(len(trace.op_of), dtype=np.int64)
    number[births] = np.arange(len(births))
    about_blocks = actions <= Action.FREE_COMPLETED
    out = trace.emptied()
    out.actions = trace.actions[:]
    out.subjects = array("q", np.where(about_blocks, number[np.where(about_blocks, subjects, 0)], subjects).tobytes())
    out.take_blocks(trace, births)
    return out, births


STEP_IS_DONE = "zero"


@dataclass(frozen=True, slots=True)
class Replacements:
    """The blocks that a step finds and lets go, and those that it makes for the next step to find in their place."""

    dropped: Ints
    left: Ints


def last_step(trace: Trace, steps: int) -> Extension | None:
    """What adds it to a training of one step less, for all traces that differ from this one in sizes alone; None where
    no step is missing."""
    actions = np.frombuffer(trace.actions, dtype=np.uint8)
    marks = np.flatnonzero(actions == Action.MARK).tolist()
    done = {mark.step: event for event, mark in zip(marks, trace.marks, strict=True) if mark.phase == STEP_IS_DONE}
    if not done or steps in done:
        return None
    if steps - 1 not in done or steps - 2 not in done:
        raise NotRepeating("more than one step is missing")
    step = _Step(trace, done[steps - 2], done[steps - 1])
    return step.repeated(1, step.left_behind())


def with_steps(trace: Trace, steps: int) -> Trace:
    """The trace of `steps` steps; of fewer if fewer are wanted than it has."""
    traced = max((mark.step for mark in trace.marks), default=0)
    if steps <= traced:
        return between(trace, 0, len(trace) if steps == traced else _begin(trace, steps + 1))
    numbered, before = in_birth_order(trace)
    trace = with_sizes(numbered, sizes_of(trace)[before])
    step = _Step(trace, _begin(trace, traced - 1), _begin(trace, traced))
    return step.repeated(steps - traced, step.compared()).apply(trace)


def _begin(trace: Trace, step: int) -> int:
    found = step_begins(trace, step)
    if found is None:
        raise NotRepeating(f"no step {step} in the trace")
    return found


class _Step:
    """The events from `start` to `end`. Blocks from `first` up to `after` are made there."""

    def __init__(self, trace: Trace, start: int, end: int) -> None:
        self.trace, self.start, self.end = trace, start, end
        self.actions = np.frombuffer(trace.actions, dtype=np.uint8)
        self.subjects = np.frombuffer(trace.subjects, dtype=np.int64)
        self.blocks = len(trace.module_of)
        if not np.array_equal(self.subjects[self.actions == Action.ALLOC], np.arange(self.blocks)):
            raise NotRepeating("blocks are not numbered in the order of their birth")
        if np.setdiff1d(self.actions, (Action.ALLOC, Action.FREE, Action.EMPTY_CACHE, Action.MARK)).size:
            raise NotRepeating("a step does more than allocate and free")
        self.first, self.after = self._count(Action.ALLOC, start), self._count(Action.ALLOC, end)

    def _count(self, action: Action, end: int) -> int:
        return int((self.actions[:end] == action).sum())

    # -- the two proofs ----------------------------------------------------------------------------------------------

    def left_behind(self) -> Replacements:
        freed = self.subjects[self.start : self.end][self.actions[self.start : self.end] == Action.FREE]
        dropped = np.sort(freed[freed < self.first])
        left = np.setdiff1d(np.arange(self.first, self.after), freed)
        if len(dropped) != len(left):
            raise NotRepeating("a step does not leave behind what it found")
        for name in BLOCK_COLUMNS:
            column = np.asarray(getattr(self.trace, name))
            if (column[dropped] != column[left]).any():
                raise NotRepeating("a step leaves other tensors behind than it found")
        return Replacements(dropped, left)

    def compared(self) -> Replacements:
        until = self.start + len(self.trace) - self.end  # as far as the next step goes
        if until > self.end:
            raise NotRepeating("the last step has more events than the one before")
        if (self.actions[self.start : until] != self.actions[self.end :]).any():
            raise NotRepeating("the last two steps do different things")
        sizes = sizes_of(self.trace)
        if (sizes[self.after :] != sizes[self.first :][: self.blocks - self.after]).any():
            raise NotRepeating("tensors of the last two steps differ")
        unfinished = self.actions[until : self.end], self.subjects[until : self.end]
        if (unfinished[0] != Action.FREE).any() or (unfinished[1] < self.first).any():
            raise NotRepeating("the last step ends before it is over")
        frees = self.actions[self.end :] == Action.FREE
        here, next_ = self.subjects[self.start : until][frees], self.subjects[self.end :][frees]
        own = here >= self.first
        if (next_[own] - here[own] != self.after - self.first).any():
            raise NotRepeating("the last two steps free different tensors")
        dropped, left = here[~own], next_[~own]
        if ((left < self.first) | (left >= self.after)).any():
            raise NotRepeating("a step frees what was made more than one step before")
        return Replacements(dropped, left)

    # -- the longer trace --------------------------------------------------------------------------------------------

    def repeated(self, times: int, stand_ins: Replacements) -> Extension:
        """What puts it in again, so many times."""
        out = self.trace.emptied()
        out.marks.clear()
        out.facts.pop(LISTS, None)
        if COMPILED in out.facts:
            out.facts[COMPILED] = self._ranges(out.facts[COMPILED], times)
        made: list[range] = []
        again = [(self.start, self.end, n) for n in range(1, times + 1)]
        for start, end, steps_before in ((0, self.end, 0), *again, (self.end, len(self.trace), times)):
            made.append(self._put(out, start, end, steps_before, stand_ins))
        chosen: Ints = np.concatenate([np.arange(each.start, each.stop) for each in made])
        out.take_blocks(self.trace, chosen)
        return Extension(
            frame=out, chosen=chosen, alike=np.stack((stand_ins.dropped, stand_ins.left), axis=1), counted=()
        )

    def _ranges(self, ranges: list[list[int]], times: int) -> list[list[int]]:
        length = self.end - self.start
        again = [
            [start + n * length, end + n * length]
            for n in range(1, times + 1)
            for start, end in ranges
            if self.start <= start < self.end
        ]
        shifts = [(start, end, times * length if start >= self.end else 0) for start, end in ranges]
        return [[start + by, end + by] for start, end, by in shifts] + again

    def _put(self, out: Trace, start: int, end: int, steps_before: int, stand_ins: Replacements) -> range:
        """A stretch of the trace, so many steps later than it was. Returns the blocks that are made there."""
        numbers = self._numbers(steps_before, stand_ins)
        first_mark, last_mark = self._count(Action.MARK, start), self._count(Action.MARK, end)
        actions, subjects = self.actions[start:end], self.subjects[start:end].copy()
        about_blocks = actions <= Action.FREE
        subjects[about_blocks] = numbers[subjects[about_blocks]]
        subjects[actions == Action.MARK] += len(out.marks) - first_mark
        out.actions.frombytes(actions.tobytes())
        out.subjects.frombytes(subjects.tobytes())
        out.marks += [Mark(mark.phase, mark.step + steps_before) for mark in self.trace.marks[first_mark:last_mark]]
        made = range(self._count(Action.ALLOC, start), self._count(Action.ALLOC, end))
        self._put_lists(out, made, numbers)
        return made

    def _numbers(self, steps_before: int, stand_ins: Replacements) -> Ints:
        """New numbers of blocks, as events so many steps later name them."""
        numbers = np.arange(self.blocks, dtype=np.int64)
        numbers[self.first :] += steps_before * (self.after - self.first)
        if steps_before:
            numbers[stand_ins.dropped] = stand_ins.left + (steps_before - 1) * (self.after - self.first)
        return numbers

    def _put_lists(self, out: Trace, made: range, numbers: Ints) -> None:
        for block, members in self.trace.facts.get(LISTS, {}).items():
            if made.start <= int(block) < made.stop:
                named = [None if member is None else int(numbers[member]) for member in members]
                out.facts.setdefault(LISTS, {})[str(numbers[int(block)])] = named
