"""The same trace, with blocks numbered as they are born."""

from __future__ import annotations

from array import array

import numpy as np

from memfit.core.events import Action, Trace
from memfit.core.repeat import Ints


def in_birth_order(trace: Trace) -> tuple[Trace, Ints]:
    """Without sizes; and of each block its number before. Facts are as they were: traces whose facts name blocks are
    in this order already."""
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
