"""From the trace of a few blocks, filled for some batch size and length, to that of the whole job."""

from __future__ import annotations

import dataclasses

from memfit.events import Trace
from memfit.extrapolation.blocks import Extension, Ints, extension, with_sizes
from memfit.extrapolation.steps import last_step
from memfit.extrapolation.streams import FilledStream
from memfit.planning.categories import label
from memfit.planning.on_trace import steps_of
from memfit.planning.traced import Recipe

COLUMNS = ("actions", "subjects", "streams", "addresses", "category_of", "op_of", "module_of")


class Whole:
    """The way from one to the other, for all traces that differ in sizes alone: the way that a fresh trace goes, on
    which NotRepeating is raised as it is there."""

    def __init__(self, short: FilledStream, recipe: Recipe, loss_modules: frozenset[str]) -> None:
        self._source = short.source
        self._extensions: list[Extension] = []
        frame = self._after(last_step(short.frame, steps_of(recipe.settings.get("loop", "plain"))), short.frame)
        label(frame, loss_modules)
        if recipe.blocks is not None:
            all_blocks = extension(frame, recipe.blocks, period=recipe.period, units=recipe.units)
            frame = self._after(all_blocks, frame)
        self._frame = frame

    def _after(self, added: Extension | None, frame: Trace) -> Trace:
        if added is None:
            return frame
        self._extensions.append(added)
        return added.frame

    @property
    def events(self) -> int:
        return len(self._frame)

    def trace(self, pool: Ints) -> Trace:
        """One of its own, for whoever gets it may change it."""
        sizes: Ints = pool[self._source]
        for added in self._extensions:
            sizes = added.sizes(sizes)
        return dataclasses.replace(
            with_sizes(self._frame, sizes),
            facts=dict(self._frame.facts),
            marks=list(self._frame.marks),
            names=list(self._frame.names),
            _name_ids=dict(self._frame._name_ids),
            **{name: getattr(self._frame, name)[:] for name in COLUMNS},
        )
