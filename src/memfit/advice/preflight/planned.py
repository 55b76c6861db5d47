"""The job's plan: on the card that it is meant for, and on what is free of the one that is here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit.advice.preflight.finding import CannotTell
from memfit.advice.preflight.situation import Situation, output_folder
from memfit.core.alloc_config import exported
from memfit.errors import MemfitError
from memfit.gpus import Gpu
from memfit.jobs.workload import Workload

if TYPE_CHECKING:
    from memfit.jobs.training.preparation import TrainJob
    from memfit.planning.predict import Plan


@dataclass(frozen=True)
class Planned:
    workload: Workload
    plan: Plan
    where: str | None
    """The card, in words; None where there is none."""


def planned(situation: Situation) -> list[Planned]:
    from memfit.planning.predict import predict

    cards: list[tuple[Gpu | None, str | None]] = [*_cards(situation)] or [(None, None)]
    try:
        workload = workload_of(situation)
        return [Planned(workload, predict(workload, gpu=card), where) for card, where in cards]
    except MemfitError as error:
        if situation.asked.workload is not None and _can_be_built(situation):
            raise  # `memfit plan` refuses it too, and nothing else has said so
        raise CannotTell(f"cannot be predicted: {error.message}") from error


def _can_be_built(situation: Situation) -> bool:
    if not situation.asked.trains:
        return True
    try:
        situation.shapes.needed()
    except CannotTell:
        return False
    return True


def workload_of(situation: Situation) -> Workload:
    """The job as the predictor takes it, with the longest rows that the data have, or may have."""
    if situation.asked.workload is not None:
        return _with_exported_settings(situation.asked.workload)
    from memfit.planning.train_workload import workload_of as of_job

    try:
        job = situation.job.needed()
    except CannotTell:
        job = _with_full_rows(situation)
    return of_job(_as_chosen(job, situation))


def _with_exported_settings(workload: Workload) -> Workload:
    """Of the allocator: what is exported here is what a run from here would have."""
    said = workload.alloc_conf or next(iter(exported(os.environ).values()), "")
    return dataclasses.replace(workload, alloc_conf=said)


def _as_chosen(job: TrainJob, situation: Situation) -> TrainJob:
    """With the micro-batch that `memory: auto` would take."""
    cards = [card for card, _ in _cards(situation)]
    if not job.config.memory.auto or not cards:
        return job
    from memfit.planning.train_plan import plan_training

    memory = dataclasses.replace(job.config.memory, gpu=f"{cards[0].capacity_bytes}B")
    chosen = plan_training(dataclasses.replace(job, config=dataclasses.replace(job.config, memory=memory)))
    return dataclasses.replace(job, batch=chosen.job.batch)


def _with_full_rows(situation: Situation) -> TrainJob:
    """Where the data cannot be read here: every row as long as they may be."""
    from memfit.jobs.source import Source
    from memfit.jobs.training.data import rows_of_full_length
    from memfit.jobs.training.preparation import TrainJob

    config = situation.config
    try:
        source = Source(folder=situation.folder.needed())
    except CannotTell:
        source = None
    return TrainJob(
        config=config,
        batch=situation.batch.needed(),
        data=rows_of_full_length(config.data),
        tokenizer=None,
        pad_id=0,
        source=source,
        shape=None,
        output_dir=output_folder(config),
        resume_from=None,
        data_read=False,
    )


def _cards(situation: Situation) -> Iterator[tuple[Gpu, str]]:
    if situation.named is not None:
        yield situation.named, f"the {situation.named.name}"
    if situation.here is not None:
        free = situation.here.with_what_is_free
        yield free, f"what is free of the {free.name} here"
