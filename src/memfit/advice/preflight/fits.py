"""Whether the job fits: its plan on the card that it is meant for, and on what is free of the one that is here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memfit.advice.preflight.finding import CannotTell, Finding, Line
from memfit.advice.preflight.situation import NO_CARD, Situation, output_folder
from memfit.errors import MemfitError
from memfit.gpus import Gpu
from memfit.jobs.workload import Workload
from memfit.units import gib

if TYPE_CHECKING:
    from memfit.jobs.training.preparation import TrainJob
    from memfit.planning.predict import Plan

FITS = Line("plan", "fits")
WORDS = 2
"""Of a vocabulary of which only the length of rows is looked at."""
NEXT = {
    "fails": "`memfit fit` looks for the smallest change that fits",
    "tight": "little room for anything else on the card; `memfit fit` finds more",
}


def workload_of(situation: Situation) -> Workload:
    """The job as the predictor takes it, with the longest rows that the data have, or may have."""
    if situation.asked.workload is not None:
        return situation.asked.workload
    from memfit.planning.train_workload import workload_of as of_job

    try:
        return of_job(situation.job.needed())
    except CannotTell:
        return of_job(_with_full_rows(situation))


def _with_full_rows(situation: Situation) -> TrainJob:
    """Where the data cannot be read here: every row as long as they may be."""
    from memfit.jobs.source import Source
    from memfit.jobs.training.memfit_loop import training_job

    config, folder = situation.config, output_folder(situation.config)
    rows = Workload(
        kind="train", model=config.model.name, seq_len=config.data.max_seq_len, padding=config.data.packing is False
    )
    try:
        source = Source(folder=situation.folder.needed())
    except CannotTell:
        source = None
    job = training_job(rows, WORDS, steps=1, folder=folder)
    return dataclasses.replace(job, config=config, batch=situation.batch.needed(), source=source)


def fits(situation: Situation) -> Iterator[Finding]:
    from memfit.planning.predict import predict

    cards: list[tuple[Gpu | None, str | None]] = [*_cards(situation)] or [(None, None)]
    try:
        workload = workload_of(situation)
        for card, where in cards:
            yield of_plan(predict(workload, gpu=card), where)
    except MemfitError as error:
        yield FITS.skipped(f"cannot be predicted: {error.message}", error.hint)


def _steps(workload: dict[str, Any]) -> str:
    """The first step of the optimizer makes its state, the later ones run beside it."""
    if "grad_accum" not in workload:
        return ""
    several = ", gradients accumulated" if workload["grad_accum"] > 1 else ""
    return f" through three optimizer steps{several}"


def _cards(situation: Situation) -> Iterator[tuple[Gpu, str]]:
    if situation.named is not None:
        yield situation.named, situation.named.name
    if situation.here is not None:
        free = situation.here.with_what_is_free
        yield free, f"what is free of the {free.name} here"


def of_plan(plan: Plan, where: str | None) -> Finding:
    peak, work = plan.peak, plan.workload
    rows = f"{work.get('batch_size', 1)} x {work['seq_len']:,} tokens"
    sizes = f"{gib(peak.allocated_bytes)} allocated, {gib(peak.reserved_bytes)} reserved, {gib(peak.device_bytes)}"
    found = f"predicted for {rows}{_steps(work)}: {sizes} on the device"
    details: dict[str, Any] = {
        "verdict": plan.verdict, "peak": plan.to_json()["peak"], "workload": work,
        "smallest_gpu_bytes": plan.smallest_gpu_bytes,
        "card": None if plan.gpu is None else {"name": plan.gpu.name, "capacity_bytes": plan.gpu.capacity_bytes},
    }  # fmt: skip
    if plan.fit is None or plan.gpu is None:
        return FITS.skipped(f"{found}; {NO_CARD}", **details)
    room = f"{where}, {gib(plan.gpu.capacity_bytes)}"
    if plan.verdict == "fails":
        short = gib(-plan.fit.headroom_bytes)
        return FITS.failed(
            f"{found}: {short} more than {room}; stops at {plan.fit.failed_at}", NEXT["fails"], **details
        )
    left = f"{found}: {plan.verdict} on {room}, {gib(plan.fit.headroom_bytes)} left"
    return FITS.warning(left, NEXT["tight"], **details) if plan.verdict == "tight" else FITS.ok(left, **details)
