"""One more step of a training, from a trace of fewer.

From its second step on a training repeats itself, if a step leaves behind what it found. So what the last step found
and let go (the gradients of the step before, a batch) must be matched, tensor by tensor, by what it made and left: the
same size, op, module and stream, in the same order. That is the proof, made anew for each trace; where it fails there
is no further step, and the caller traces it.

Steps are cut where gradients are about to be dropped. The optimizer's state is there by then, so the second step is the
first that can be repeated; and what the job does after its last step, it does after the one that is added.

    |step w8 m8 g4 |zero -g |step h4 |zero -h        becomes
    |step w8 m8 g4 |zero -g |step h4 |zero -h |step i4 |zero -i
"""

from __future__ import annotations

import numpy as np

from memfit.core.events import Action, Mark, Trace
from memfit.core.repeat import Extension, Ints, NotRepeating

STEP_IS_DONE = "zero"
COLUMNS = {
    "streams": np.int64, "addresses": np.uint64, "category_of": np.int32, "op_of": np.int32, "module_of": np.int32,
}  # fmt: skip
LISTS = "lists"


def last_step(trace: Trace, steps: int) -> Extension | None:
    """What adds it to a training of one step less, for all traces that differ from this one in sizes alone; None where
    no step is missing. Raises NotRepeating where it is not proven."""
    actions = np.frombuffer(trace.actions, dtype=np.uint8)
    marks = np.flatnonzero(actions == Action.MARK).tolist()
    done = {mark.step: event for event, mark in zip(marks, trace.marks, strict=True) if mark.phase == STEP_IS_DONE}
    if not done or steps in done:
        return None
    if steps - 1 not in done or steps - 2 not in done:
        raise NotRepeating("more than one step is missing")
    return _Repetition(trace, done[steps - 2], done[steps - 1]).written()


class _Repetition:
    """Of the events from `start` to `end`. Blocks from `first` up to `after` are made there."""

    def __init__(self, trace: Trace, start: int, end: int) -> None:
        self.trace, self.start, self.end = trace, start, end
        self.actions = np.frombuffer(trace.actions, dtype=np.uint8)
        self.subjects = np.frombuffer(trace.subjects, dtype=np.int64)
        self.blocks = len(trace.module_of)
        births = self.actions == Action.ALLOC
        if not np.array_equal(self.subjects[births], np.arange(self.blocks)):
            raise NotRepeating("blocks are not numbered in the order of their birth")
        if np.setdiff1d(self.actions, (Action.ALLOC, Action.FREE, Action.EMPTY_CACHE, Action.MARK)).size:
            raise NotRepeating("a step does more than allocate and free")
        self.first, self.after = int(births[:start].sum()), int(births[:end].sum())
        self.dropped, self.left = self._matched()

    def _matched(self) -> tuple[Ints, Ints]:
        """What the step found and let go, and what it left in its place."""
        freed = self.subjects[self.start : self.end][self.actions[self.start : self.end] == Action.FREE]
        dropped = np.sort(freed[freed < self.first])
        left = np.setdiff1d(np.arange(self.first, self.after), freed)
        if len(dropped) != len(left):
            raise NotRepeating("a step does not leave behind what it found")
        for name, kind in COLUMNS.items():
            column = np.frombuffer(getattr(self.trace, name), dtype=kind)
            if (column[dropped] != column[left]).any():
                raise NotRepeating("a step leaves other tensors behind than it found")
        return dropped, left

    def written(self) -> Extension:
        trace, start, end = self.trace, self.start, self.end
        again, later = self._numbers()
        out = Trace(origin=trace.origin, facts=dict(trace.facts))
        out.names, out._name_ids = list(trace.names), dict(trace._name_ids)
        out.actions.frombytes(trace.actions[:end].tobytes() + trace.actions[start:].tobytes())
        parts = (self.subjects[:end], self._renumbered(start, end, again), self._renumbered(end, len(trace), later))
        out.subjects.frombytes(np.concatenate(parts).tobytes())
        before, inside = self._marks(0, start), self._marks(start, end)
        out.marks = trace.marks[: before + inside] + [Mark(m.phase, m.step + 1) for m in trace.marks[before:]]
        chosen: Ints = np.concatenate((np.arange(self.after), np.arange(self.first, self.blocks)))
        for name, kind in COLUMNS.items():
            getattr(out, name).frombytes(np.frombuffer(getattr(trace, name), dtype=kind)[chosen].tobytes())
        if LISTS in trace.facts:
            out.facts[LISTS] = self._lists(again, later)
        return Extension(frame=out, chosen=chosen, alike=np.stack((self.dropped, self.left), axis=1), counted=())

    def _numbers(self) -> tuple[Ints, Ints]:
        """New numbers of blocks, as the step that is added and as what comes after it name them."""
        later = np.arange(self.blocks, dtype=np.int64)
        later[self.first :] += self.after - self.first
        again = later.copy()
        again[self.dropped] = self.left
        return again, later

    def _renumbered(self, start: int, end: int, numbers: Ints) -> Ints:
        kinds, subjects = self.actions[start:end], self.subjects[start:end].copy()
        about_blocks = kinds <= Action.FREE
        subjects[about_blocks] = numbers[subjects[about_blocks]]
        subjects[kinds == Action.MARK] += self._marks(self.start, self.end)
        return subjects

    def _marks(self, start: int, end: int) -> int:
        return int((self.actions[start:end] == Action.MARK).sum())

    def _lists(self, again: Ints, later: Ints) -> dict[str, list[int | None]]:
        lists: dict[str, list[int | None]] = self.trace.facts[LISTS]
        made = {block: members for block, members in lists.items() if int(block) < self.after}
        for numbers, start, end in ((again, self.first, self.after), (later, self.after, self.blocks)):
            for block in (int(block) for block in lists if start <= int(block) < end):
                members = lists[str(block)]
                made[str(numbers[block])] = [None if m is None else int(numbers[m]) for m in members]
        return made
