"""The two ways to prune, planned: memfit's own, which streams the model, and the public code's, with all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.errors import MemfitError
from memfit.gpus import Gpu
from memfit.guides.claims import pruning_formulas
from memfit.jobs.workload import Workload
from memfit.models.registry import load_config, resolve

if TYPE_CHECKING:
    from memfit.planning.predict import Plan

STREAMED, WHOLE = "streamed", "whole"


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    plan: Plan
    formulas: tuple[dict[str, Any], ...]
    """What people's rules of thumb say of it."""

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.plan.verdict,
            "device_bytes": self.plan.peak.device_bytes,
            "smallest_gpu_bytes": self.plan.smallest_gpu_bytes,
            "guides": list(self.formulas),
        }


def plan_whole_model(work: Workload, gpu: Gpu) -> WholeModel | None:
    """None for other jobs and for other methods than Wanda, whose public code is the one that is planned."""
    if work.kind != "prune" or work.method != "wanda":
        return None
    try:
        plan = _plan(work, WHOLE, gpu)
    except MemfitError:
        return None
    hidden = getattr(load_config(resolve(work.model)), "hidden_size", 0)
    return WholeModel(plan=plan, formulas=tuple(pruning_formulas(work.settings(), plan.parameters, hidden)))


class PlanMemo:
    """Each plan is made once. Jobs other than pruning have one way, None."""

    def __init__(self) -> None:
        self._made: dict[tuple[Workload, str | None, Gpu | None], Plan] = {}

    def plan(self, work: Workload, way: str | None, card: Gpu | None) -> Plan:
        key = (work, way, card)
        if key not in self._made:
            self._made[key] = _plan(work, way, card)
        return self._made[key]


def _plan(work: Workload, way: str | None, card: Gpu | None) -> Plan:
    if way == WHOLE:
        from memfit.planning.whole_model_pruning import predict_whole_model_pruning

        return predict_whole_model_pruning(work, card)
    from memfit.planning.predict import predict

    return predict(work, gpu=card)
