"""Beside a pruning that streams blocks: the guides' way, with the whole model on the card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.errors import MemfitError
from memfit.gpus import Gpu
from memfit.jobs.workload import Workload
from memfit.models.registry import load_config, resolve

if TYPE_CHECKING:
    from memfit.planning.predict import Plan


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    plan: Plan
    guides: tuple[dict[str, Any], ...]
    """What the guides' own formulas say of it."""

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.plan.verdict, "device_bytes": self.plan.peak.device_bytes,
            "smallest_gpu_bytes": self.plan.smallest_gpu_bytes, "guides": list(self.guides),
        }  # fmt: skip


def whole_model(work: Workload, gpu: Gpu) -> WholeModel | None:
    if work.kind != "prune":
        return None
    from memfit.planning.guides import pruning_guides
    from memfit.planning.whole_model_pruning import predict_whole_model_pruning

    try:
        plan = predict_whole_model_pruning(work, gpu)
    except MemfitError:  # a method that the public code does not have
        return None
    hidden = getattr(load_config(resolve(work.model)), "hidden_size", 0)
    return WholeModel(plan=plan, guides=tuple(pruning_guides(work.settings(), plan.parameters, hidden)))
