"""The ladder: every rung exact in global batch, and what lies above it does not run."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from forecasts import forecast

import memfit
from memfit.errors import UsageError
from memfit.fitting.forecast import Forecast
from memfit.fitting.ladder import GuideRung, Ladder, guide_ladder
from memfit.jobs.workload import Workload
from memfit.render.fit import show_ladder
from memfit.render.plan import as_text

pytestmark = pytest.mark.usefixtures("shared_traces")

GPU = "5GiB"
SMALL = str(Path(__file__).with_name("gpt2_of_two_blocks"))


@cache
def climbed() -> Ladder:
    return memfit.ladder(kind="train", model=SMALL, seq_len=256, global_batch=24, gpu=GPU)


def test_every_rung_has_exactly_the_global_batch() -> None:
    assert {rung.workload.batch_size * rung.workload.grad_accum for rung in climbed().rungs} == {24}


def test_each_of_the_four_has_its_rung_and_they_climb() -> None:
    names = [name for rung in climbed().rungs for name in rung.names]
    sizes = [rung.workload.batch_size for rung in climbed().rungs]

    assert names == ["Safe", "Medium", "Aggressive", "Maximum"]
    assert sizes == sorted(set(sizes))


def test_a_rung_leaves_what_its_name_says() -> None:
    """That the next one does not: `test_ladder_rungs.py`, where it costs no predictions."""
    capacity = climbed().gpu.capacity_bytes
    leaves = {name: 1 - rung.forecast.device_bytes / capacity for rung in climbed().rungs for name in rung.names}

    assert list(leaves) == ["Safe", "Medium", "Aggressive", "Maximum"]
    assert leaves["Safe"] >= 0.3 and leaves["Medium"] >= 0.2 and leaves["Aggressive"] >= 0.1


def test_the_top_runs_and_the_rung_above_it_does_not() -> None:
    top, above = climbed().rungs[-1], climbed().above

    assert above is not None
    assert memfit.predict(top.workload, gpu=GPU).verdict != "fails"
    assert memfit.predict(above.workload, gpu=GPU).verdict == "fails"


def test_the_longest_rows_of_a_rung_run() -> None:
    top = climbed().rungs[-1]

    assert top.longest is not None
    longest = dataclasses.replace(top.workload, seq_len=top.longest)
    assert memfit.predict(longest, gpu=GPU).verdict != "fails"


def test_rows_of_a_lower_rung_may_be_at_least_as_long_as_those_of_a_higher_one() -> None:
    lengths = [rung.longest for rung in climbed().rungs if rung.longest is not None]

    assert len(lengths) == len(climbed().rungs)
    assert lengths == sorted(lengths, reverse=True)


class Alike:
    """Every job takes the same."""

    def ask(self, work: Workload) -> Forecast:
        return forecast(work, "safe", 30 << 30, 44 << 30, {"activations": 20 << 30})


@cache
def guide() -> tuple[GuideRung, ...]:
    """What is predicted of its rungs: `tests/guides`."""
    asked = Workload(kind="train", model="gsa-512m", seq_len=1024, batch_size=2, grad_accum=32, world_size=4)
    alike: Any = Alike()
    return guide_ladder(asked, alike)


def test_the_guides_252_rows_are_called_wrong_and_its_256_are_not() -> None:
    wrong = {rung.name: rung.wrong for rung in guide()}

    assert wrong["Medium"] == ("252 rows a step are not 256",)
    assert wrong["Safe"] == wrong["Aggressive"] == ()
    assert wrong["Maximum"] == ("1536 tokens are another experiment than 1024",)


def test_the_guides_ladder_is_shown_with_its_own_settings_and_only_for_its_own_job() -> None:
    shown = as_text(show_ladder, dataclasses.replace(climbed(), guide=guide()).to_json())

    assert "as its authors ran it: their attention, checkpointing" in " ".join(shown.split())
    assert "252 rows a step are not 256" in " ".join(shown.split())
    assert climbed().guide == ()
    assert "guide" not in str(climbed())


def test_a_ladder_is_for_training() -> None:
    with pytest.raises(UsageError, match="for training"):
        memfit.ladder(kind="forward", model="gpt2", gpu=GPU)
