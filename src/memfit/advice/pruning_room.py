"""What pruning may use of a card."""

from __future__ import annotations

import dataclasses

from memfit.gpus import Gpu
from memfit.jobs.workload import Workload
from memfit.planning.predict import context_of


def room_for_pruning(work: Workload, card: Gpu, margin: float) -> int:
    """The margin is left free from the start: pruning makes do with what it may use."""
    return max(int(card.capacity_bytes * (1 - margin)) - context_of(work, card), 1)


def within(work: Workload, card: Gpu, margin: float) -> Workload:
    """A limit that was asked for stays."""
    if work.kind != "prune" or work.max_gpu_memory is not None:
        return work
    return with_room(work, room_for_pruning(work, card, margin))


def with_room(work: Workload, room: int) -> Workload:
    return dataclasses.replace(work, max_gpu_memory=str(room))
