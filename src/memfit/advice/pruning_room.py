"""What pruning may use of a card."""

from __future__ import annotations

import dataclasses

from memfit.core.alloc_config import AllocatorConfig
from memfit.gpus import Gpu
from memfit.jobs.workload import Workload
from memfit.planning.predict import capacity_for, context_of
from memfit.units import MiB, in_mib


def room_for_pruning(work: Workload, card: Gpu, margin: float) -> int:
    """The margin is left free from the start: pruning makes do with what it may use. In whole MiB, to be typed."""
    context = context_of(work, card).high_bytes
    capacity = capacity_for(card, AllocatorConfig.parse(work.alloc_conf), context)
    return max((int(capacity * (1 - margin)) - context) // MiB, 1) * MiB


def within(work: Workload, card: Gpu, margin: float) -> Workload:
    """A limit that was asked for stays."""
    if work.kind != "prune" or work.max_gpu_memory is not None:
        return work
    return with_room(work, room_for_pruning(work, card, margin))


def with_room(work: Workload, room: int) -> Workload:
    """Or up to a MiB more."""
    return dataclasses.replace(work, max_gpu_memory=in_mib(room + MiB - 1))
