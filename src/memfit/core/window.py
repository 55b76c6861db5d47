"""A stretch of a trace, as a recording that was switched on and off at its ends would show it.

>>> trace = Trace()
>>> weights = trace.alloc(100)
>>> gone = trace.alloc(200)
>>> trace.free(gone)
>>> later = between(trace, 3, 3)
>>> len(later), list(later.requested)
(0, [100])
"""

from __future__ import annotations

import numpy as np

from memfit.core.events import Action, Trace

FREES = (Action.FREE, Action.FREE_COMPLETED)


def between(trace: Trace, start: int, end: int) -> Trace:
    """Events from `start` to `end`. What was live at the start has no beginning in it; what had died, and what was not
    yet born at the end, is not in it at all."""
    kept = kept_blocks(trace, start, end)
    new_number = np.full(len(trace.requested), -1, dtype=np.int64)
    new_number[kept] = np.arange(len(kept))
    actions = np.frombuffer(trace.actions, dtype=np.uint8)[start:end]
    subjects = np.frombuffer(trace.subjects, dtype=np.int64)[start:end].copy()
    of_blocks = actions <= Action.FREE_COMPLETED
    subjects[of_blocks] = new_number[subjects[of_blocks]]
    out = trace.emptied()
    out.actions.frombytes(actions.tobytes())
    out.subjects.frombytes(subjects.tobytes())
    out.requested.frombytes(np.frombuffer(trace.requested, dtype=np.int64)[kept].tobytes())
    out.take_blocks(trace, kept)
    for name in ("range_addresses", "range_sizes", "range_streams"):
        getattr(out, name).extend(getattr(trace, name))
    return out


def kept_blocks(trace: Trace, start: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Blocks that live in that stretch, in the order of their old numbers."""
    actions = np.frombuffer(trace.actions, dtype=np.uint8)
    subjects = np.frombuffer(trace.subjects, dtype=np.int64)
    kept = np.ones(len(trace.requested), dtype=bool)
    kept[subjects[:start][np.isin(actions[:start], FREES)]] = False
    kept[subjects[end:][actions[end:] == Action.ALLOC]] = False
    return np.flatnonzero(kept)


def step_begins(trace: Trace, step: int) -> int | None:
    """The event at which a step's first phase begins."""
    for event, (action, subject) in enumerate(trace.events()):
        if action == Action.MARK and trace.marks[subject].step == step:
            return event
    return None
