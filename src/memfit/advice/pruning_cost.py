"""What pruning costs: the engine's own passes over blocks and micro-batches, counted for few of each.

Weights come from the host and go back there while a plan looks on from another thread and without them, so each block
is counted once in and once out, over the link and in the GPU's memory.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memfit.advice.step_cost import Marked, Ops, by_mark, combined, on_line, summed
from memfit.core.events import OpCost
from memfit.jobs.workload import Workload

if TYPE_CHECKING:
    from memfit.tracing.op_costs import OpCosts
    from memfit.tracing.tracer import Tracer

MOVES_THE_BLOCK = ("load", "store")
FEW = 2
"""Micro-batches of the full size in the smaller of two counts: the first one may do more than the others."""


def pruning_cost(work: Workload, layers: int | None) -> dict[str, Ops]:
    counted, windows = _counted(work, layers, FEW)
    if -(-work.nsamples // windows) <= FEW + 1:  # all were counted
        return counted
    return on_line(counted, _counted(work, layers, FEW + 1)[0], work.nsamples // windows - FEW)


def _counted(work: Workload, layers: int | None, few: int) -> tuple[dict[str, Ops], int]:
    """And the windows of a micro-batch."""
    from memfit.planning.blocks import blocks_of
    from memfit.planning.pruning import traced_with
    from memfit.tracing.op_costs import OpCosts
    from memfit.tracing.platform import H200

    counters: list[OpCosts] = []

    def counting(tracer: Tracer) -> OpCosts:
        counters.append(OpCosts(tracer))
        return counters[-1]

    blocks, _ = blocks_of(work.model, work.attention) if layers else (None, 0)
    made, windows, block_bytes = traced_with(work, H200, blocks, layers=layers, few=few, beside=counting)
    moved = {OpCost(0, False, block_bytes, block_bytes): 1}

    def with_weights(mark: Marked) -> Marked:
        if mark.phase not in MOVES_THE_BLOCK:
            return mark
        return dataclasses.replace(mark, ops=combined([(mark.ops, 1), (moved, 1)]))

    return summed(with_weights(mark) for mark in by_mark(made, counters[-1])), windows
