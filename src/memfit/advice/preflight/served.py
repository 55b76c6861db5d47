"""Whether the engine serves every setting, and what of them is without effect or worth a second thought."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from memfit.advice.preflight.finding import CannotTell, Finding, Line
from memfit.advice.preflight.situation import Situation
from memfit.jobs.training.levers import check_levers, missing_gpu, missing_packages

SERVED = Line("config", "settings")


def served(situation: Situation) -> Iterator[Finding]:
    """Where there is no GPU, what needs one is meant for another machine: it is said, and no failure."""
    config, processes = situation.config, situation.asked.world_size
    notes = [*config.notes(), *check_levers(config, world_size=processes), *_of_data(situation)]
    told = [SERVED.warning(note) for note in notes if note not in config.remarks]  # those stand on the line of keys
    here = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="sdpa"))  # it has its own line
    stops = SERVED.failed if situation.runs_here else SERVED.warning
    told += [stops(each.message, each.hint) for each in missing_packages(here)]
    if situation.runs_here:
        lacks = missing_gpu(here, world_size=processes)
        told += [SERVED.warning(f"to run it here: {each.message}", each.hint) for each in lacks]
    yield from told
    if not told:
        yield SERVED.ok("each is served by the engine")


def _of_data(situation: Situation) -> list[str]:
    try:
        batch, data = situation.batch.needed(), situation.data.needed()
    except CannotTell:
        return []
    from memfit.jobs.training.preparation import notes_on_data

    return notes_on_data(situation.config, batch, data)
