"""Fixes with their savings: every lever predicted on the job that failed, the best first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.advice.explaining.fix import Fix
from memfit.advice.explaining.smaller_job import USUAL_LENGTH
from memfit.advice.pruning_command import pruning_command
from memfit.gpus import Gpu
from memfit.jobs.workload import Workload
from memfit.units import MiB

if TYPE_CHECKING:
    from memfit.advice.fit import Option
    from memfit.planning.predict import Plan

WORTH = 16 * MiB
"""Levers that save less are left out."""


def predicted_fixes(workload: Workload, gpu: Gpu | None) -> tuple[Plan, list[Fix]]:
    """The job as it is, and every lever on it, the best saving first."""
    from memfit.advice.fit import options
    from memfit.planning.predict import predict

    found = options(workload, gpu=gpu)
    before = found[0].before if found else predict(workload, gpu=gpu)
    groups: dict[str, list[Option]] = {}
    for option in found:
        groups.setdefault(option.lever.group, []).append(option)
    fails = before.verdict == "fails"
    chosen = [_mildest(group) if fails else group[0] for group in groups.values()]
    chosen.sort(key=lambda option: -option.saved_bytes)
    return before, [_fix(option) for option in chosen if option.saved_bytes >= WORTH]


def _mildest(group: Sequence[Option]) -> Option:
    """Of levers that replace each other the mildest that is enough, or else the one that saves most."""
    return next((option for option in reversed(group) if option.after.verdict == "safe"), group[0])


def _fix(option: Option) -> Fix:
    lever = option.lever
    return Fix(
        name=lever.name, says=lever.says, basis="predicted", cost=lever.cost, price=lever.price,
        saved_bytes=option.saved_bytes, after_bytes=_held(option.after), verdict=option.after.verdict,
        changes=dict(lever.settings), how=dict(lever.how),
    )  # fmt: skip


def pruning_fixes(workload: Workload, gpu: Gpu | None) -> tuple[Plan | None, list[Fix]]:
    """Of a program that has the whole model and all windows on the GPU, as the public Wanda code does: the same at a
    usual length, and memfit's own way. The plan is that program's; None for a method that is not traced."""
    from memfit.planning.predict import predict
    from memfit.planning.whole_model_pruning import predict_whole_model_pruning

    capped = replace(workload, seq_len=min(workload.seq_len, USUAL_LENGTH))
    length = capped.seq_len if capped != workload else None
    before, fixes = None, []
    if workload.method == "wanda":
        before = predict_whole_model_pruning(workload, gpu)
        if length is not None:
            name, how = (
                f"cap the length at {USUAL_LENGTH:,}",
                {"wanda": f"--seqlen {USUAL_LENGTH}, in the same program"},
            )
            says = "the same program, with windows of a usual length"
            fixes.append(_pruned(name, says, before, predict_whole_model_pruning(capped, gpu), length, how))
    says = "one block of the model and its windows on the GPU at a time"
    after, how = predict(capped, gpu=gpu), {"memfit": pruning_command(capped)}
    return before, [*fixes, _pruned("prune it block by block", says, before, after, length, how)]


def _pruned(name: str, says: str, before: Plan | None, after: Plan, length: int | None, how: dict[str, str]) -> Fix:
    """`length`: another one than the program's, which makes it another experiment."""
    saved = None if before is None else before.peak.device_bytes - after.peak.device_bytes
    return Fix(
        name=name, says=says, basis="predicted", cost="experiment" if length else "free", saved_bytes=saved,
        after_bytes=_held(after), verdict=after.verdict, changes={"seq_len": length} if length else {}, how=how,
    )  # fmt: skip


def _held(plan: Plan) -> int:
    """Where it fits, with what it then really holds: cached memory is given back before anything fails."""
    return plan.fit.device_bytes if plan.fit and plan.fit.verdict != "fails" else plan.peak.device_bytes
