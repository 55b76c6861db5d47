"""Buffers that compiled code uses again: told use by use, to compare blocks of a model; played as one block.

torch's compiler gives a buffer that is no longer needed to whoever wants one of its size. Which one that is differs
from block to block of a model, while what is needed does not. So a trace has such a buffer freed and made anew, as an
op of its own name; what is replayed has it as the one block that it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.events import Action, Trace

REUSED = "a buffer used again"
SAID = "compiler"
"""Among the facts of a trace: what is to be known about the compiler's plan, in words."""
RANGE = "padded products"
"""Among the facts of a trace: bytes at the peak without and with them, where the card decides. The trace is of the
larger."""
COMPILED = "compiled"
"""Among the facts of a trace: the events between which compiled code ran."""


def say(trace: Trace, what: str) -> None:
    said = trace.facts.setdefault(SAID, [])
    if what not in said:
        said.append(what)


def frees_in_order(trace: Trace, ranges: Sequence[Sequence[int]]) -> None:
    """Which of several buffers of one size goes first is the compiler's choice, by names, and differs from block to
    block: here it is the one that was made last. What is let go at one time goes by size. What is allocated stays the
    same at every event; where the free places are, and so what is reserved, may change. `ranges`: the events between
    which compiled code ran."""
    inside = np.zeros(len(trace), dtype=bool)
    for start, end in ranges:
        inside[start:end] = True
    _sort_runs(trace, inside)
    _let_the_last_go_first(trace, inside)


def _sort_runs(trace: Trace, inside: npt.NDArray[np.bool_]) -> None:
    op = trace.name_id(REUSED)
    actions, subjects = trace.actions, trace.subjects
    start = 0
    for at in range(len(actions) + 1):
        if at < len(actions) and actions[at] == Action.FREE and inside[at]:
            continue
        passed_on = at < len(actions) and actions[at] == Action.ALLOC and trace.op_of[subjects[at]] == op
        end = at - 1 if passed_on else at
        if end - start > 1:
            run = sorted(subjects[start:end], key=lambda block: (trace.requested[block], block))
            subjects[start:end] = array("q", run)
        start = at + 1


def _let_the_last_go_first(trace: Trace, inside: npt.NDArray[np.bool_]) -> None:
    """Among those that compiled code makes and lets go itself."""
    born = {b for (action, b), here in zip(trace.events(), inside, strict=True) if here and action == Action.ALLOC}
    gone = {b for (action, b), here in zip(trace.events(), inside, strict=True) if here and action == Action.FREE}
    exchangeable = born & gone
    alive: dict[tuple[int, int], list[int]] = {}
    for at, (action, block) in enumerate(trace.events()):
        if action > Action.FREE or block not in exchangeable:
            continue
        same = alive.setdefault((trace.requested[block], trace.streams[block]), [])
        if action == Action.ALLOC:
            same.append(block)
        else:
            trace.subjects[at] = same.pop()


def joined(trace: Trace) -> Trace:
    """Every buffer one block, however often it is used, with the name of whom it was made for."""
    if REUSED not in trace.names:
        return trace
    op, first = trace.names.index(REUSED), list(range(len(trace.requested)))
    actions, subjects = array("B"), array("q")
    for action, subject in trace.events():
        if action == Action.ALLOC and trace.op_of[subject] == op and actions and actions[-1] == Action.FREE:
            before = subjects[-1]
            if trace.requested[before] == trace.requested[subject]:
                first[subject] = before
                actions.pop()
                subjects.pop()
                continue
        actions.append(action)
        subjects.append(first[subject] if action <= Action.FREE_COMPLETED else subject)
    return _renumbered(trace, actions, subjects, first)


def _renumbered(trace: Trace, actions: array[int], subjects: array[int], first: list[int]) -> Trace:
    kept = np.array([block for block, root in enumerate(first) if root == block], dtype=np.int64)
    number = {int(block): i for i, block in enumerate(kept)}
    made = trace.emptied()
    made.take_blocks(trace, kept)
    made.requested = array("q", np.frombuffer(trace.requested, dtype=np.int64)[kept].tobytes())
    made.actions = actions
    made.subjects = array(
        "q",
        [
            number[subject] if action <= Action.FREE_COMPLETED else subject
            for action, subject in zip(actions, subjects, strict=True)
        ],
    )
    made.facts = _facts(trace.facts, lambda block: number[first[block]])
    return made


def _facts(facts: dict[str, Any], number: Any) -> dict[str, Any]:
    """Those that name blocks."""
    made = dict(facts)
    if "lists" in facts:
        made["lists"] = {
            str(number(int(block))): [None if each is None else number(each) for each in members]
            for block, members in facts["lists"].items()
        }
    return made


def peak_of(trace: Trace) -> int:
    """The sum of what is requested, at its highest."""
    now = most = 0
    for action, subject in trace.events():
        if action == Action.ALLOC:
            now += trace.requested[subject]
            most = max(most, now)
        elif action in (Action.FREE, Action.FREE_REQUESTED):
            now -= trace.requested[subject]
    return most
