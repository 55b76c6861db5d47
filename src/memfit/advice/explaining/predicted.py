"""Fixes with their savings: every lever predicted on the job that failed, the best first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.advice.explaining.fix import Fix
from memfit.gpus import Gpu
from memfit.jobs.workload import Workload
from memfit.units import MiB

if TYPE_CHECKING:
    from memfit.planning.predict import Plan

WORTH = 16 * MiB
"""Levers that save less are left out."""


def predicted_fixes(workload: Workload, gpu: Gpu | None) -> tuple[Plan, list[Fix]]:
    """The job as it is, and every lever on it: the best saving first, of levers that replace each other the best."""
    from memfit.advice.fit import options
    from memfit.planning.predict import predict

    found = options(workload, gpu=gpu)
    before = found[0].before if found else predict(workload, gpu=gpu)
    made: dict[str, Fix] = {}
    for option in found:
        lever = option.lever
        if option.saved_bytes >= WORTH and lever.group not in made:
            made[lever.group] = Fix(
                name=lever.name, says=lever.says, basis="predicted", cost=lever.cost, price=lever.price,
                saved_bytes=option.saved_bytes, after_bytes=_held(option.after), verdict=option.after.verdict,
                changes=dict(lever.settings), how=dict(lever.how),
            )  # fmt: skip
    return before, list(made.values())


def streamed_pruning(workload: Workload, plan: Plan) -> Fix:
    """What failed was another program, which has the whole model on the GPU: memfit's own has one block at a time."""
    return Fix(
        name="prune it block by block", says="one block of the model and its windows on the GPU at a time",
        basis="predicted", cost="free", after_bytes=_held(plan), verdict=plan.verdict,
        how={"memfit": f"memfit prune --model {workload.model} --seqlen {workload.seq_len}"},
    )  # fmt: skip


def _held(plan: Plan) -> int:
    """Where it fits, with what it then really holds: cached memory is given back before anything fails."""
    return plan.fit.device_bytes if plan.fit and plan.fit.verdict != "fails" else plan.peak.device_bytes
