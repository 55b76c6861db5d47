"""The two ways to prune, planned: memfit's own, which streams the model, and the public code's, which has all of it on
the card. Other jobs have one way. Each plan is made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.gpus import Gpu
from memfit.jobs.workload import Workload

if TYPE_CHECKING:
    from memfit.planning.predict import Plan

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
        from memfit.planning.whole_model_pruning import predict_whole_model_pruning

        return predict_whole_model_pruning(work, card)
    from memfit.planning.predict import predict

    return predict(work, gpu=card)
