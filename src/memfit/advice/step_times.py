"""What a change does to one step: FLOPs, bytes, and by a roofline the least time on the card."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.errors import MemfitError
from memfit.gpus import Gpu
from memfit.jobs.workload import Workload

if TYPE_CHECKING:
    from memfit.advice.step_cost import StepCost


@dataclass(frozen=True, kw_only=True)
class StepTime:
    flops: int
    bytes_moved: int
    host_bytes: int
    seconds: float | None
    """At the least; None where the card's figures are unknown."""

    def times(self, number: int) -> StepTime:
        """Of so many passes, one after the other."""
        return StepTime(
            flops=number * self.flops, bytes_moved=number * self.bytes_moved, host_bytes=number * self.host_bytes,
            seconds=None if self.seconds is None else number * self.seconds,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {
            "flops": self.flops, "bytes_moved": self.bytes_moved, "host_bytes": self.host_bytes,
            "seconds": None if self.seconds is None else round(self.seconds, 6),
        }  # fmt: skip


def step_time(work: Workload, gpu: Gpu) -> StepTime | None:
    """None where the job's ops cannot be counted."""
    from memfit.advice.step_cost import seconds

    cost = step_cost_of(work)
    if cost is None:
        return None
    return StepTime(
        flops=cost.flops, bytes_moved=cost.bytes_moved, host_bytes=cost.host_bytes, seconds=seconds(cost, gpu)
    )


def step_cost_of(work: Workload) -> StepCost | None:
    """None where the job's ops cannot be counted."""
    from memfit.advice.step_cost import step_cost

    try:
        with warnings.catch_warnings():  # of the job's own code: a plan tells them
            warnings.simplefilter("ignore")
            return step_cost(work)
    except MemfitError:
        return None
