"""Forecasts as a test wants them, without a prediction."""

from __future__ import annotations

from memfit.analysis.summary import Moment
from memfit.analysis.verdict import Fit, Verdict
from memfit.fitting.forecast import Forecast
from memfit.gpus import Context
from memfit.jobs.workload import Workload
from memfit.planning.predict import Peak


def forecast(
    work: Workload, verdict: Verdict, total: int, capacity: int, breakdown: dict[str, int], *, phase: str = "backward",
    allocated: int | None = None, reserved: int | None = None,
) -> Forecast:  # fmt: skip
    """It takes `total` bytes of the card, all of them reserved unless it is said otherwise."""
    reserved = total if reserved is None else reserved
    return Forecast(
        workload=work,
        whole=True,
        peak=Peak(
            allocated_bytes=reserved if allocated is None else allocated,
            reserved_bytes=reserved,
            context_bytes=0,
            device_bytes=total,
        ),
        fit=Fit(capacity_bytes=capacity, verdict=verdict, device_bytes=total, retries=0),
        context=Context(0, 0, "measured"),
        at_peak=Moment(0, phase, 2, "", ""),
        breakdown=breakdown,
        parameters=1,
        trainable_parameters=1,
    )
