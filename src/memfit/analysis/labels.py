"""What each block of a run is (category, module, op, line of code), and in which phase an event lies.

A prediction says it itself, as do the phases that its marks begin. What a recording without marks shows by its stacks
is derived in `stacks.py`. Labels are columns of numbers into lists of names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from memfit.events import CATEGORIES, Action, Trace
from memfit.replay.timeline import Ints, Timeline

UNKNOWN = "unknown"
ALL_CATEGORIES = (*CATEGORIES, UNKNOWN)
QUIET_PHASES = ("data", "zero", "")
"""Between the phases people think in: batches are made and gradients dropped there."""
MODULES_REMEMBERED = 1 << 16
Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    step: int
    begin: int  # its first event
    end: int  # and the first that is no longer in it


@dataclass(frozen=True, slots=True)
class Labels:
    """Columns have one entry a block, a number in the list of the same kind."""

    categories: Names  # what `category` counts in
    category: Ints
    module: Ints
    op: Ints
    line: Ints
    modules: Names
    ops: Names
    lines: Names
    phases: tuple[Phase, ...]
    source: str  # of categories: "labels", "derived", "both" or "none"
    phase_source: str  # "marks", "derived" or "none"
    stacks: bool  # whether stacks were recorded at all

    def phase_at(self, event: int) -> Phase | None:
        at = int(phase_numbers(self.phases, np.array([event], dtype=np.int64))[0]) if self.phases else -1
        return self.phases[at] if at >= 0 else None

    def modules_anywhere(self, blocks: Ints | None = None) -> tuple[Names, Ints]:
        """Modules without the number of their layer: their names, and of each block its number in these. Where only
        some blocks matter, the others have any number."""
        names: dict[str, int] = {}
        table = np.zeros(len(self.modules), dtype=np.int64)
        for i in np.unique(self.module if blocks is None else self.module[blocks]).tolist():
            table[i] = names.setdefault(any_layer(self.modules[i]), len(names))
        return tuple(names), table[self.module]


def make_labels(
    timeline: Timeline,
    derived: Ints | None,
    line: Ints,
    lines: Names,
    phases: tuple[Phase, ...],
    *,
    stacks: bool,
    categories: Names = ALL_CATEGORIES,
) -> Labels:
    """`derived`: what stacks say of the blocks' categories, where the trace does not."""
    trace = timeline.trace
    names = tuple(trace.names)
    given = _given_categories(trace)
    missing, labelled = given < 0, bool((given >= 0).any())
    if derived is None:
        category = np.where(missing, categories.index("other") if labelled else len(categories) - 1, given)
        source = _SOURCES[labelled, False]
    else:
        category = np.where(missing, derived, given)
        source = _SOURCES[labelled, bool((derived[missing] != ALL_CATEGORIES.index(UNKNOWN)).any())]
    return Labels(
        categories=categories,
        category=category,
        module=np.frombuffer(trace.module_of, dtype=np.int32).astype(np.int64),
        modules=names,
        op=np.frombuffer(trace.op_of, dtype=np.int32).astype(np.int64),
        ops=names,
        line=line,
        lines=lines,
        phases=phases,
        source=source,
        phase_source="none" if not phases else "marks" if derived is None else "derived",
        stacks=stacks,
    )


_SOURCES = {(True, True): "both", (True, False): "labels", (False, True): "derived", (False, False): "none"}


def _given_categories(trace: Trace) -> Ints:
    """The category that a block carries; -1 for none, or one that is not known."""
    known = {name: i for i, name in enumerate(CATEGORIES)}
    table = np.array([known.get(name, -1) for name in trace.names], dtype=np.int64)
    return table[np.frombuffer(trace.category_of, dtype=np.int32)]


def marked_phases(trace: Trace) -> tuple[Phase, ...]:
    begins = np.flatnonzero(np.frombuffer(trace.actions, dtype=np.uint8) == Action.MARK).tolist()
    marks = [trace.marks[trace.subjects[begin]] for begin in begins]
    edges = pairwise([*begins, len(trace)])
    return tuple(Phase(mark.phase, mark.step, *edge) for mark, edge in zip(marks, edges, strict=True))


def phase_numbers(phases: Sequence[Phase], events: Ints) -> Ints:
    """In which phase each event lies; -1 for before the first."""
    begins = np.array([phase.begin for phase in phases], dtype=np.int64)
    return np.searchsorted(begins, events, side="right") - 1


@lru_cache(maxsize=MODULES_REMEMBERED)
def any_layer(module: str) -> str:
    """`model.layers.7.mlp` is `model.layers.*.mlp`: what repeats in every block is one thing."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)
