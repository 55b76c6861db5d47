"""When each block of a trace is born and when it dies, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memfit.core.events import Action, Trace
from memfit.errors import InputError

Ints = npt.NDArray[np.int64]
BEFORE = -1


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Events, one entry a block. `BEFORE` is a birth that the trace does not show; its length, an end that it does not.

    >>> trace = Trace()
    >>> x, y = trace.alloc(1), trace.alloc(2)
    >>> trace.free(x)
    >>> lives = lifetimes(trace)
    >>> lives.birth.tolist(), lives.death.tolist(), lives.alive_at(2).tolist()
    ([0, 1], [2, 3], [1])
    """

    birth: Ints
    death: Ints  # no longer allocated: FREE, or FREE_REQUESTED
    gone: Ints  # its memory can be used again: FREE, or FREE_COMPLETED

    def alive_at(self, event: int) -> Ints:
        """Blocks that are allocated once an event has happened."""
        return np.flatnonzero((self.birth <= event) & (self.death > event))

    def held_at(self, event: int) -> Ints:
        """The same, and what still waits for another stream."""
        return np.flatnonzero((self.birth <= event) & (self.gone > event))


def lifetimes(trace: Trace) -> Lifetimes:
    actions = np.frombuffer(trace.actions, dtype=np.uint8)
    subjects = np.frombuffer(trace.subjects, dtype=np.int64)
    blocks, end = len(trace.requested), len(trace)
    allocs = np.flatnonzero(actions == Action.ALLOC)
    ends = np.flatnonzero((actions == Action.FREE) | (actions == Action.FREE_REQUESTED))
    completions = np.flatnonzero(actions == Action.FREE_COMPLETED)
    birth = np.full(blocks, BEFORE, dtype=np.int64)
    death = np.full(blocks, end, dtype=np.int64)
    gone = np.full(blocks, end, dtype=np.int64)
    birth[subjects[allocs]] = allocs
    death[subjects[ends]] = ends
    frees = ends[actions[ends] == Action.FREE]
    gone[subjects[frees]] = frees
    gone[subjects[completions]] = completions
    only_completed = (death == end) & (gone < end)  # its first half was before the trace began: it never counted
    death[only_completed] = BEFORE
    _check_once(allocs, subjects, blocks)
    _check_once(ends, subjects, blocks)
    _check_once(np.concatenate((frees, completions)), subjects, blocks)
    wrong = np.flatnonzero((death < birth) | (gone < death))
    if len(wrong):
        raise InputError(f"the trace frees block {wrong[0]} while it is not allocated")
    return Lifetimes(birth, death, gone)


def _check_once(events: Ints, subjects: Ints, blocks: int) -> None:
    twice = np.flatnonzero(np.bincount(subjects[events], minlength=blocks) > 1)
    if len(twice):
        raise InputError(f"the trace allocates or frees block {twice[0]} twice")
