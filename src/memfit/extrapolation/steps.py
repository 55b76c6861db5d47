"""More than was traced: steps of a training, and tokens of a generation.

From its second step on a job repeats itself, with new tensors: what lies between two like places of a trace is put in
again behind the second, as often as steps are missing.

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

Of a generation each decoding step does what the one before did; only the cache, the masks and the ids are longer. So
the stream of the first steps is extended in time (`extrapolation/blocks.py`), and with it the numbers that rules are
asked about: what a kernel takes for itself is then asked for each step, and may change from one to the next. The last
steps were traced, from a prompt that ends where the generation does: all that the first ones foretell of them must be
so.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.events import BLOCK_COLUMNS, LISTS, Action, Mark, Trace, between, step_begins
from memfit.extrapolation.blocks import UNITS, Extension, Ints, NotRepeating, extension_in_time, sizes_of, with_sizes
from memfit.extrapolation.reused import COMPILED
from memfit.extrapolation.streams import Ask, Outline, RuleAnswer, RuleCall, SizedStream, Stream, filled, stream_of
from memfit.units import MiB


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


# -- steps of a training -----------------------------------------------------------------------------------------------

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


# -- tokens of a generation --------------------------------------------------------------------------------------------

PAIR = 2
"""Some tensors live for two steps, so steps are taken in pairs."""
MARKER = "\0hole "
TOLERATED_BYTES = 1 * MiB
"""Lists of all new tokens, as a beam search keeps, are shorter in a generation that has only the last ones to make."""


def traced_tokens(new: int) -> int:
    return 1 + _skipped(new) + PAIR * UNITS


def _skipped(new: int) -> int:
    """The first steps still free what the prefill left."""
    return 3 + (new - 1 - 3) % PAIR


class GenerationExtension:
    """From the streams of the first and the last tokens to that of all `new` ones, whatever their sizes."""

    def __init__(self, near: Stream, far: Stream, new: int) -> None:
        self._marked, self._hole_of = _marked(near)
        frame = self._marked.frame
        done: list[int] = frame.facts.pop("tokens")
        skipped = _skipped(new)
        self._extension = extension_in_time(frame, done[skipped:-1:PAIR], units=(new - 1 - skipped) // PAIR)
        self.stream, self._blocks, markers = self._told_stream(near)
        assert self._extension.growth is not None
        times, later, earlier = self._extension.growth
        columns = (self._extension.chosen, later, earlier)
        first, after, before = (self._hole_of[blocks[markers]].tolist() for blocks in columns)
        self._of_hole = list(zip(first, times[markers].tolist(), after, before, strict=True))
        self._compare_with(far, skipped)

    def _told_stream(self, near: Stream) -> tuple[Stream, Ints, Ints]:
        """With the extension's blocks that are in it, and those that mark its holes."""
        frame, before = in_birth_order(self._extension.frame)
        is_marker = np.array([name.startswith(MARKER) for name in frame.names])[np.frombuffer(frame.op_of, np.int32)]
        born = np.flatnonzero(np.frombuffer(frame.actions, np.uint8) == Action.ALLOC)
        calls = []
        for event, block in zip(born[is_marker].tolist(), before[is_marker].tolist(), strict=True):
            hole = near.holes[self._hole_of[self._extension.chosen[block]]]
            end = event + 2 + len(hole.kept)
            calls.append(RuleCall(hole.form, (), event, end, hole.module, hole.category, hole.argument_modules))
        told = stream_of(with_sizes(frame, before), calls)
        return told.stream, told.sizes, before[is_marker]

    def _compare_with(self, far: Stream, skipped: int) -> None:
        """What is done in the last steps, and by whom; sizes and numbers are compared for each point."""
        events, holes = far.tokens[skipped]
        born = int((np.frombuffer(far.actions, np.uint8)[:events] == Action.ALLOC).sum())
        first = born + sum(len(hole.kept) for hole in far.holes[:holes])
        self._far_blocks, self._far_holes = range(first, far.blocks), range(holes, len(far.holes))
        self._last_blocks = range(self.stream.blocks - len(self._far_blocks), self.stream.blocks)
        self._last_holes = range(len(self.stream.holes) - len(self._far_holes), len(self.stream.holes))
        actions = far.actions[events:]
        if self.stream.actions[-len(actions) :] != actions or _done(
            self.stream, self._last_blocks, self._last_holes
        ) != _done(far, self._far_blocks, self._far_holes):
            raise NotRepeating("the last tokens are not as the first ones foretell")
        is_own = np.ones(far.blocks, dtype=bool)
        is_own[[block for hole in far.holes for block in hole.kept]] = False
        self._own = is_own[first:]

    def apply(self, near: SizedStream, far: SizedStream, ask: Ask) -> SizedStream:
        """Raises NotRepeating if what the first tokens foretell of the last ones is not so."""
        sizes = self._sizes(near)
        differences = sizes[self._last_blocks.start :] - far.sizes[self._far_blocks.start :]
        if (abs(differences[self._own]) > TOLERATED_BYTES).any():
            raise NotRepeating("the last tokens are not as the first ones foretell")
        calls, which, chains = self._asked(near)
        told = SizedStream(self.stream, sizes, calls, which, chains)
        asked_last = {(told.call(a), far.call(b)) for a, b in zip(self._last_holes, self._far_holes, strict=True)}
        if not all(told == traced or _alike(ask(*told), ask(*traced)) for told, traced in asked_last):
            raise NotRepeating("the last tokens are not as the first ones foretell")
        return told

    def _asked(self, near: SizedStream) -> tuple[list[Any], list[int], list[list[int]]]:
        """What is asked at every step: numbers grow by the same from one to the next."""
        found: dict[tuple[int, int, int, int], int] = {}
        calls: dict[Any, int] = {}
        chains: dict[tuple[int, int, int], list[int]] = {}
        which = []
        of = near.which
        for first, times, later, earlier in self._of_hole:
            key = of[first], times, of[later] if times else 0, of[earlier] if times else 0
            call = found.get(key)
            if call is None:
                form, numbers = near.calls[of[first]]
                steps = (
                    [b - a for b, a in zip(near.calls[key[2]][1], near.calls[key[3]][1], strict=True)] if times else ()
                )
                grown = (
                    tuple([n + times * step for n, step in zip(numbers, steps, strict=True)]) if any(steps) else numbers
                )
                before = len(calls)
                call = found[key] = calls.setdefault((form, grown), before)
                if call == before and any(steps):
                    chains.setdefault((key[0], key[2], key[3]), []).append(call)
            which.append(call)
        return list(calls), which, list(chains.values())

    def _sizes(self, near: SizedStream) -> Ints:
        own = len(near.sizes)
        of_blocks = np.where(self._marked.source < own, near.sizes[np.minimum(self._marked.source, own - 1)], 0)
        sizes: Ints = self._extension.sizes(of_blocks)[self._blocks]
        return sizes


def _done(stream: Stream, blocks: range, holes: range) -> tuple[Any, ...]:
    """What was made in that order, by which op of which module, and what was asked of which rules."""
    labels = np.frombuffer(stream.labels, np.int32).reshape(-1, 3)[max(blocks.start, 0) : blocks.stop]
    made = [tuple([stream.names[name] for name in block]) for block in labels.tolist()]
    asked = [(each.form, each.module, len(each.kept)) for each in (stream.holes[hole] for hole in holes)]
    return made, asked


def _alike(told: RuleAnswer, traced: RuleAnswer) -> bool:
    sizes = zip(told.sizes, traced.sizes, strict=False)
    return told.outline == traced.outline and all(abs(a - b) <= TOLERATED_BYTES for a, b in sizes)


def _marked(stream: Stream) -> tuple[Any, Ints]:
    """Each hole as a block that is made and freed, before the results of its rule; and the hole of each such block."""
    forms: dict[Any, int] = {}
    outlines: dict[Outline, int] = {}
    which = []
    for hole in stream.holes:
        results = len(hole.kept)
        form = forms.setdefault((hole.form, results), len(forms))
        outline = Outline(
            actions=(Action.ALLOC, Action.FREE, *(Action.ALLOC,) * results),
            subjects=(0, 0, *range(1, results + 1)),
            ops=(f"{MARKER}{form}", *("",) * results),
            modules=(-1,) * (results + 1),
        )
        which.append(outlines.setdefault(outline, len(outlines)))
    made = filled(stream, list(outlines), which)
    names = np.array([name.startswith(MARKER) for name in made.frame.names])
    markers = np.flatnonzero(names[np.frombuffer(made.frame.op_of, np.int32)])
    hole_of = np.full(len(made.source), -1, dtype=np.int64)
    hole_of[markers] = np.arange(len(markers))
    return made, hole_of
