"""`memory: auto`: the largest micro-batch that fits with the margin asked for, at the same global batch."""

from __future__ import annotations

from memfit.gpus import Gpu
from memfit.jobs.training.preparation import TrainJob
from memfit.planning.predict import Plan, predict
from memfit.planning.train_workload import workload_of
from memfit.units import gib

Rung = tuple[int, Plan]
"""A micro-batch, and the job with it."""


def largest_that_fits(job: TrainJob, card: Gpu | None) -> tuple[TrainJob, tuple[Rung, ...], tuple[str, ...]]:
    """The job to run, what was looked at, and why. From the smallest up: the first that does not fit ends it."""
    if card is None:
        return job, (), ("memory: auto: no GPU is used and memory.gpu names none: micro_batch_size stays as it is",)
    margin = job.config.memory.margin
    tried: list[Rung] = []
    best: int | None = None
    for rows in job.batch.rungs:
        plan = predict(workload_of(job.with_micro_batch(rows)), gpu=card)
        tried.append((rows, plan))
        if not has_margin(plan, margin):
            break
        best = rows
    return job.with_micro_batch(best or tried[0][0]), tuple(tried), (_why(best, tried, job, card),)


def has_margin(plan: Plan, margin: float) -> bool:
    """Without torch having to give back what it keeps, which is a pause each time."""
    fit, gpu = plan.fit, plan.gpu
    return (
        fit is not None and gpu is not None and fit.verdict != "fails" and not fit.retries
        and fit.device_bytes <= (1 - margin) * gpu.capacity_bytes
    )  # fmt: skip


def _why(best: int | None, tried: list[Rung], job: TrainJob, card: Gpu) -> str:
    margin, capacity = job.config.memory.margin, gib(card.capacity_bytes)
    last_rows, last = tried[-1]
    takes = gib(last.peak.device_bytes)
    if best is None:
        return f"memory: auto: not even a single row fits with a margin of {margin:.0%}: {takes} of {capacity}"
    used = gib(dict(tried)[best].peak.device_bytes)
    said = f"memory: auto: {job.batch.with_micro_batch(best).in_words()}, {used} of {capacity}"
    if last_rows == best:
        return f"{said}: all rows of a step at once"
    return f"{said}; the next rung, {last_rows} rows, takes {takes}, more than a margin of {margin:.0%} leaves"
