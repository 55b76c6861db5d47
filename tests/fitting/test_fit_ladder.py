"""The ladder: every rung exact in global batch, what lies above it does not run, and where the rungs end."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forecasts import forecast

import memfit
from memfit.analysis.verdict import Verdict
from memfit.errors import UsageError
from memfit.fitting import ladder as ladders
from memfit.fitting.forecast import Forecast, Forecasts
from memfit.fitting.ladder import GuideRung, Ladder, guide_ladder
from memfit.gpus import Gpu
from memfit.jobs.workload import Workload
from memfit.render.fit import show_ladder
from memfit.render.plan import as_text
from memfit.units import GiB

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
    """That the next one does not: below, where it costs no predictions."""
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


CARD, USABLE = "120GiB", 100 * GiB
"""torch may use less than the card has."""
LENGTH = 1000


def climbed_with(monkeypatch: pytest.MonkeyPatch, *, fixed: int) -> Ladder:
    """So many GiB whatever the batch, and one GiB for each row of a thousand tokens; 720 rows a step."""

    class Written(Forecasts):
        def _predicted(self, work: Workload) -> Forecast:
            total = fixed * GiB + work.batch_size * work.seq_len * GiB // LENGTH
            verdict: Verdict = "tight" if total <= USABLE else "fails"
            return forecast(work, verdict, total, USABLE, {}, allocated=total - 2 * GiB)

    def seconds(work: Workload, card: Gpu) -> SimpleNamespace:
        return SimpleNamespace(seconds=7200 / work.batch_size)

    monkeypatch.setattr(ladders, "Forecasts", Written)
    monkeypatch.setattr(ladders, "step_time", seconds)
    return memfit.ladder(kind="train", model="gpt2", seq_len=LENGTH, global_batch=720, gpu=CARD)


def rows(ladder: Ladder) -> dict[str, int]:
    return {name: rung.workload.batch_size for rung in ladder.rungs for name in rung.names}


@pytest.mark.parametrize(("fixed", "expected"), [
    (40, {"Safe": 30, "Medium": 40, "Aggressive": 48, "Maximum": 60}),  # 70, 80, 88 and 100: each at most its share
    (39, {"Safe": 30, "Medium": 40, "Aggressive": 48, "Maximum": 60}),  # 36 rows would leave a quarter, 45 leave 16 %
    (34, {"Safe": 36, "Medium": 45, "Aggressive": 48, "Maximum": 60}),  # 60 rows leave 6 %
    (0, {"Safe": 60, "Medium": 80, "Aggressive": 90, "Maximum": 90}),
])  # fmt: skip
def test_a_rung_is_the_largest_divisor_that_leaves_30_20_10_or_0_percent_of_what_torch_may_use(
    monkeypatch: pytest.MonkeyPatch, fixed: int, expected: dict[str, int]
) -> None:
    assert rows(climbed_with(monkeypatch, fixed=fixed)) == expected


def test_the_rung_above_is_the_next_divisor(monkeypatch: pytest.MonkeyPatch) -> None:
    above = climbed_with(monkeypatch, fixed=39).above

    assert above is not None
    assert (above.workload.batch_size, above.workload.grad_accum) == (72, 10)


def test_where_even_the_whole_share_fits_there_is_no_rung_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladders, "step_time", lambda *_: None)
    small = climbed_with(monkeypatch, fixed=-700)

    assert rows(small)["Maximum"] == 720
    assert small.above is None


def test_longer_rows_are_a_risk_where_they_end_before_twice_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    rungs = {rung.names[0]: rung for rung in climbed_with(monkeypatch, fixed=39).rungs}

    assert {name: rung.longest for name, rung in rungs.items()} == {
        "Safe": 2000, "Medium": 1500, "Aggressive": 1250, "Maximum": 1000,
    }  # fmt: skip
    assert rungs["Safe"].risks()[0] == "another program that takes 31.00 GiB of the card"
    assert rungs["Medium"].risks()[:2] == (
        "rows longer than 1500 tokens", "another program that takes 21.00 GiB of the card",
    )  # fmt: skip
    assert rungs["Maximum"].risks()[0] == "rows longer than 1000 tokens"
    assert rungs["Maximum"].risks()[-1] == "fragmentation: 2.00 GiB of what is reserved already lies idle"


def test_a_document_has_every_rung_with_its_share_of_the_card_and_its_time_beside_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = climbed_with(monkeypatch, fixed=39).to_json()

    told = [(rung["micro_batch"], rung["grad_accum"], rung["global_batch"]) for rung in document["rungs"]]
    assert told == [(30, 24, 720), (40, 18, 720), (48, 15, 720), (60, 12, 720)]
    assert [rung["use"] for rung in document["rungs"]] == [0.575, 0.6583, 0.725, 0.825]
    assert [rung["relative_step_time"] for rung in document["rungs"]] == [1.0, 0.75, 0.625, 0.5]
    assert (document["above"]["micro_batch"], document["above"]["verdict"]) == (72, "fails")
