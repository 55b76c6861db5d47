"""From the traces of a few blocks and a few tokens, filled for some batch size and length, to that of the whole job."""

from __future__ import annotations

from memfit.core.events import Trace
from memfit.core.holes import Filled
from memfit.core.last_step import last_step
from memfit.core.repeat import Extension, Ints, extension, with_sizes
from memfit.planning import categories
from memfit.planning.few_tokens import Foretold
from memfit.planning.recipe import Recipe
from memfit.planning.tracing_jobs import STEPS


class Whole:
    """The way from one to the other, for all traces that differ in sizes alone: the way that a fresh trace goes, on
    which NotRepeating is raised as it is there. Two traces are a generation's first tokens and its last ones."""

    def __init__(self, parts: list[Filled], recipe: Recipe, loss_modules: frozenset[str], new_tokens: int) -> None:
        self._sources = [part.source for part in parts]
        frames = [part.frame for part in parts]
        self._foretold = Foretold.from_few(frames[0], frames[1], new_tokens) if len(frames) == 2 else None
        self._extensions: list[Extension] = []
        frame = frames[0] if self._foretold is None else self._foretold.extension.frame
        frame = self._after(last_step(frame, STEPS), frame)
        categories.label(frame, loss_modules)
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

    def trace(self, pools: list[Ints]) -> Trace:
        parts = [pool[source] for pool, source in zip(pools, self._sources, strict=True)]
        sizes = parts[0] if self._foretold is None else self._foretold.sizes(parts[0], parts[1])
        for added in self._extensions:
            sizes = added.sizes(sizes)
        return with_sizes(self._frame, sizes)
