"""The text that a pruning job calibrates on: here, or to be had."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.advice.preflight.finding import CannotTell, Finding, Line
from memfit.advice.preflight.situation import Situation
from memfit.errors import InputError

CALIBRATION = Line("config", "calibration data")


def calibration(situation: Situation) -> Iterator[Finding]:
    from memfit.jobs.pruning.texts import check_packages, find_texts, is_on_this_machine

    workload = situation.asked.workload
    if workload is None or workload.method == "magnitude":
        raise CannotTell("nothing is calibrated")
    name = workload.dataset
    try:
        check_packages(name)
        if not is_on_this_machine(name):
            raise CannotTell(f"{name} is on the Hub, which a look does not ask")
        texts = find_texts(name, "calibration")
    except InputError as error:
        yield (CALIBRATION.failed if situation.runs_here else CALIBRATION.warning)(error.message, error.hint)
        return
    yield CALIBRATION.ok(f"{len(texts.documents):,} documents of {texts.name} from {texts.origin}")
