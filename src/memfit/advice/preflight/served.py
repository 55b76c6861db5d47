"""Whether the engine serves every setting, and what of them is without effect or worth a second thought."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from memfit.advice.preflight.finding import CannotTell, Finding, Line
from memfit.advice.preflight.situation import Situation
from memfit.jobs.training.levers import check_levers, unmet_needs

SERVED = Line("config", "settings")


def served(situation: Situation) -> Iterator[Finding]:
    """What the engine cannot do at all is an error; what it could not do on this machine is a warning."""
    config, processes = situation.config, situation.asked.world_size
    notes = [*config.notes(), *check_levers(config, world_size=processes), *_of_data(situation)]
    told = [SERVED.warning(note) for note in notes if note not in config.remarks]  # those stand on the line of keys
    here = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="sdpa"))  # it has its own line
    elsewhere = None if situation.runs_here else True
    unmet = unmet_needs(here, world_size=processes, gpu=elsewhere)
    told += [SERVED.warning(f"to run it here: {each.message}", each.hint) for each in unmet]
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
