"""Whether the engine serves every setting, and what of them is without effect or worth a second thought."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from memfit.advice.preflight.finding import CannotTell, Finding, Line
from memfit.advice.preflight.situation import Situation
from memfit.jobs.training.config import OptimizerConfig, ParallelConfig, TrainConfig
from memfit.jobs.training.levers import NEEDS_BITSANDBYTES, check_levers

SERVED = Line("config", "settings")


def served(situation: Situation) -> Iterator[Finding]:
    config, processes = situation.config, situation.asked.world_size
    here = config if situation.runs_here else without_gpu(config)
    here = dataclasses.replace(here, model=dataclasses.replace(here.model, attention="sdpa"))  # it has its own line
    _check_device(here)
    notes = [*config.notes(), *check_levers(here, world_size=processes)]
    notes += _of_data(situation)
    told = [note for note in notes if note not in config.remarks]  # those stand on the line of keys
    for note in told:
        yield SERVED.warning(note)
    if not told:
        yield SERVED.ok("each is served by the engine")


def _check_device(config: TrainConfig) -> None:
    from memfit.jobs.training.preparation import check_device

    check_device(config)


def _of_data(situation: Situation) -> list[str]:
    try:
        batch, data = situation.batch.needed(), situation.data.needed()
    except CannotTell:
        return []
    from memfit.jobs.training.preparation import notes_on_data

    return notes_on_data(situation.config, batch, data)


def without_gpu(config: TrainConfig) -> TrainConfig:
    """For a card that is not in this machine: what only a GPU can do is taken to be possible there."""
    optimizer = OptimizerConfig() if config.optimizer.name in NEEDS_BITSANDBYTES else config.optimizer
    precision = "fp32" if config.precision == "amp-fp16" else config.precision
    return dataclasses.replace(
        config, precision=precision, optimizer=optimizer, parallel=ParallelConfig(), device="auto"
    )
