"""A generation from its first tokens, held against its last ones.

Each decoding step does what the one before did; only the cache, the masks and the ids are longer. So the stream of the
first steps is extended in time (`extrapolation/blocks.py`), and with it the numbers that rules are asked about: what a
kernel takes for itself is then asked for each step, and may change from one to the next. The last steps were traced,
from a prompt that ends where the generation does: all that the first ones foretell of them must be so.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memfit.events import Action
from memfit.extrapolation.blocks import UNITS, Ints, NotRepeating, extension_in_time, with_sizes
from memfit.extrapolation.steps import in_birth_order
from memfit.extrapolation.streams import Ask, Outline, RuleAnswer, RuleCall, SizedStream, Stream, filled, stream_of
from memfit.units import MiB

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
