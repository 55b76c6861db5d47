"""What generating tokens costs, from its first few: each later token reads a longer cache, by the same amount more.

The line through the third and the fourth token is held against the last one, counted after a prompt that ends where the
generation does. A cache that stops growing at its window shows there, and all tokens are counted.
"""

from __future__ import annotations

import dataclasses

from memfit.advice.step_cost import Ops, combined, counted_marks, summed
from memfit.jobs.workload import Workload

FEW = 4
PHASE = "generate"


def generation_cost(work: Workload, layers: int | None) -> dict[str, Ops]:
    if work.new_tokens > 2 * FEW:
        near = [_after(work, layers, tokens) for tokens in (FEW - 2, FEW - 1, FEW)]
        late = dataclasses.replace(work, seq_len=work.seq_len + work.new_tokens - FEW, new_tokens=FEW)
        far = [_after(late, layers, tokens) for tokens in (FEW - 1, FEW)]
        third, fourth, last = (combined([(b, 1), (a, -1)]) for a, b in ((near[0], near[1]), (near[1], near[2]), far))
        steps = work.new_tokens - FEW
        told = combined([(fourth, 1 + steps), (third, -steps)])
        if _totals(told) == _totals(last):
            more = steps * (steps + 1) // 2
            return {PHASE: combined([(near[2], 1), (fourth, steps + more), (third, -more)])}
    return {PHASE: _after(work, layers, None)}


def _after(work: Workload, layers: int | None, tokens: int | None) -> Ops:
    return summed(counted_marks(work, layers, tokens=tokens))[PHASE]


def _totals(ops: Ops) -> tuple[int, int, int]:
    return (
        sum(times * op.flops for op, times in ops.items()),
        sum(times * op.moved for op, times in ops.items()),
        sum(times * op.over_link for op, times in ops.items()),
    )
