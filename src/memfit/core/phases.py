"""The phases of a run: as the trace marks them or, in a recording that has no marks, as its stacks show them.

A training step shows itself: memory asked for by Python code, then by autograd's thread, then by an optimizer. Only
what is seen is named. A recording without a backward pass has no phases: nothing tells a forward pass from other code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from memfit.core.events import Action, Trace
from memfit.core.stack_reading import Work

NOISE = 3  # that few allocations of one kind between many of another are a part of those
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    step: int
    begin: int  # its first event
    end: int  # and the first that is no longer in it


def marked_phases(trace: Trace) -> tuple[Phase, ...]:
    actions = np.frombuffer(trace.actions, dtype=np.uint8)
    begins = np.flatnonzero(actions == Action.MARK).tolist()
    found = []
    for begin, end in pairwise([*begins, len(trace)]):
        mark = trace.marks[trace.subjects[begin]]
        found.append(Phase(mark.phase, mark.step, begin, end))
    return tuple(found)


def derived_phases(birth: Ints, work: Ints, length: int, steps: Sequence[tuple[int, int]] = ()) -> tuple[Phase, ...]:
    """`birth` and `work` of the allocations that have an event; `steps`: where an optimizer is known to have run."""
    order = np.argsort(birth, kind="stable")
    birth, kind = birth[order], np.where(work[order] == Work.LOSS, Work.OTHER, work[order])
    for begin, end in steps:
        kind[np.searchsorted(birth, begin) : np.searchsorted(birth, end)] = Work.OPTIMIZER
    if not (kind == Work.BACKWARD).any() or (kind == Work.BACKWARD).all():
        return ()
    runs = _without_noise(_runs(kind))
    edges = [int(birth[first]) for _, first, _ in runs]
    edges[0] = 0
    names = [which for which, _, _ in runs]
    return tuple(_numbered(names, [*edges, length]))


def phase_numbers(phases: Sequence[Phase], events: Ints) -> Ints:
    """In which phase each event lies; -1 for before the first."""
    begins = np.array([phase.begin for phase in phases], dtype=np.int64)
    return np.searchsorted(begins, events, side="right") - 1


def _runs(kind: Ints) -> list[tuple[int, int, int]]:
    """(kind, first, how many)"""
    edges = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(kind)]
    return [(int(kind[a]), a, b - a) for a, b in pairwise(edges)]


def _without_noise(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    kept: list[tuple[int, int, int]] = []
    for i, (kind, first, count) in enumerate(runs):
        around = kept[-1] if kept else None
        inside = around is not None and i + 1 < len(runs) and runs[i + 1][0] == around[0] and count < NOISE
        if around is not None and (inside or around[0] == kind):
            kept[-1] = (around[0], around[1], around[2] + count)
        else:
            kept.append((kind, first, count))
    return kept


def _numbered(kinds: Sequence[int], edges: Sequence[int]) -> Iterator[Phase]:
    """A step ends with the optimizer; where none is seen, with the backward pass."""
    last = Work.OPTIMIZER if Work.OPTIMIZER in kinds else Work.BACKWARD
    step = 0 if kinds[0] == Work.LOADING else 1
    for i, kind in enumerate(kinds):
        if i and (kinds[i - 1] == last or (step == 0 and kind != Work.LOADING)):
            step += 1
        yield Phase(_NAMES[kind], step, edges[i], edges[i + 1])


_NAMES = {
    int(Work.OTHER): "forward", int(Work.BACKWARD): "backward", int(Work.OPTIMIZER): "step", int(Work.LOADING): "load",
}  # fmt: skip
