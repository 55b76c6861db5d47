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
from memfit.replay.timeline import allocated_changes

REUSED = "a buffer used again"
FLUSH = "autotuning: a buffer as large as the L2 cache"
WORKSPACE_BY_RULE = "convolution workspace of cuDNN, by rule"
SAID = "compiler"
"""Among the facts of a trace: what is to be known about the plans of a compiler or of cuDNN, in words."""
COPIES = "padded copies"
"""Among the facts of a trace: bytes that padding takes, of the product that takes most and of all that are timed."""
Ranges = Sequence[Sequence[int]]
COMPILED = "compiled"
"""Among the facts of a trace: the events between which compiled code ran."""


def say(trace: Trace, what: str) -> None:
    said = trace.facts.setdefault(SAID, [])
    if what not in said:
        said.append(what)


def sort_frees(trace: Trace, ranges: Ranges) -> None:
    """What is let go at one time goes by size: that is the same to an allocator. `ranges`: the events between which
    compiled code ran."""
    inside = _inside(trace, ranges)
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


def let_the_last_go_first(trace: Trace, ranges: Ranges) -> None:
    """Which of several buffers of one size goes first is the compiler's choice, by names, and differs from block to
    block: here it is the one that was made last, among those that compiled code makes and lets go itself. What is
    allocated stays the same at every event; where the free places are, and so what is reserved, may change."""
    inside = _inside(trace, ranges)
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


def _inside(trace: Trace, ranges: Ranges) -> npt.NDArray[np.bool_]:
    inside = np.zeros(len(trace), dtype=bool)
    for start, end in ranges:
        inside[start:end] = True
    return inside


def joined(trace: Trace) -> Trace:
    """Every buffer one block, however often it is used, named for who has it at the peak, or had it last."""
    if REUSED not in trace.names:
        return trace
    op, peak, born = trace.names.index(REUSED), _peak_event(trace), dict[int, int]()
    first = list(range(len(trace.requested)))
    user = list(first)
    actions, subjects = array("B"), array("q")
    for at, (action, subject) in enumerate(trace.events()):
        if action == Action.ALLOC and trace.op_of[subject] == op and actions and actions[-1] == Action.FREE:
            before = subjects[-1]
            if trace.requested[before] == trace.requested[subject]:
                first[subject] = before
                if at <= peak or born[before] > peak:
                    user[before] = subject
                actions.pop()
                subjects.pop()
                continue
        if action == Action.ALLOC:
            born[subject] = at
        actions.append(action)
        subjects.append(first[subject] if action <= Action.FREE_COMPLETED else subject)
    return _renumbered(trace, actions, subjects, first, user)


def _peak_event(trace: Trace) -> int:
    """The first event at which most is allocated."""
    sizes = -(-np.frombuffer(trace.requested, np.int64) // 512) * 512
    return int(allocated_changes(trace, sizes).cumsum().argmax())


def _renumbered(trace: Trace, actions: array[int], subjects: array[int], first: list[int], user: list[int]) -> Trace:
    kept = np.array([block for block, root in enumerate(first) if root == block], dtype=np.int64)
    number = {int(block): i for i, block in enumerate(kept)}
    made = trace.emptied()
    made.take_blocks(trace, np.array(user, dtype=np.int64)[kept])
    made.op_of = array("i", np.frombuffer(trace.op_of, dtype=np.int32)[kept].tobytes())
    made.requested = array("q", np.frombuffer(trace.requested, dtype=np.int64)[kept].tobytes())
    made.actions = actions
    pairs = zip(actions, subjects, strict=True)
    made.subjects = array("q", [number[of] if action <= Action.FREE_COMPLETED else of for action, of in pairs])
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
