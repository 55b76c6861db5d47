"""Beside a pruning that streams blocks: the guides' way, with the whole model on the card.

The two ways to prune, planned: memfit's own, which streams the model, and the public code's, which has all of it on
the card. Other jobs have one way. Each plan is made once.
"""

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
    from memfit.guides.whole_model_pruning import predict_whole_model_pruning
    from memfit.planning.predict import pruning_guides

    try:
        plan = predict_whole_model_pruning(work, gpu)
    except MemfitError:  # a method that the public code does not have
        return None
    hidden = getattr(load_config(resolve(work.model)), "hidden_size", 0)
    return WholeModel(plan=plan, guides=tuple(pruning_guides(work.settings(), plan.parameters, hidden)))


STREAMED, WHOLE = "streamed", "whole"


class Plans:
    def __init__(self) -> None:
        self._made: dict[tuple[Workload, str | None, Gpu | None], Plan] = {}

    def of(self, work: Workload, way: str | None, card: Gpu | None) -> Plan:
        key = (work, way, card)
        if key not in self._made:
            self._made[key] = _planned(work, way, card)
        return self._made[key]


def _planned(work: Workload, way: str | None, card: Gpu | None) -> Plan:
    if way == WHOLE:
        from memfit.guides.whole_model_pruning import predict_whole_model_pruning

        return predict_whole_model_pruning(work, card)
    from memfit.planning.predict import predict

    return predict(work, gpu=card)
