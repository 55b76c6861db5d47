"""Where the rungs of a ladder end, on a job whose memory is written down here: shares, divisors, risks to the row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from forecasts import forecast

import memfit
from memfit.analysis.verdict import Verdict
from memfit.fitting import ladder as ladders
from memfit.fitting.forecast import Forecast, Forecasts
from memfit.fitting.ladder import Ladder
from memfit.gpus import Gpu
from memfit.jobs.workload import Workload
from memfit.units import GiB

CARD, USABLE = "120GiB", 100 * GiB
"""torch may use less than the card has."""
LENGTH = 1000


def climbed(monkeypatch: pytest.MonkeyPatch, *, fixed: int) -> Ladder:
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
    assert rows(climbed(monkeypatch, fixed=fixed)) == expected


def test_the_rung_above_is_the_next_divisor(monkeypatch: pytest.MonkeyPatch) -> None:
    above = climbed(monkeypatch, fixed=39).above

    assert above is not None
    assert (above.workload.batch_size, above.workload.grad_accum) == (72, 10)


def test_where_even_the_whole_share_fits_there_is_no_rung_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladders, "step_time", lambda *_: None)
    small = climbed(monkeypatch, fixed=-700)

    assert rows(small)["Maximum"] == 720
    assert small.above is None


def test_longer_rows_are_a_risk_where_they_end_before_twice_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    rungs = {rung.names[0]: rung for rung in climbed(monkeypatch, fixed=39).rungs}

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
    document = climbed(monkeypatch, fixed=39).to_json()

    told = [(rung["micro_batch"], rung["grad_accum"], rung["global_batch"]) for rung in document["rungs"]]
    assert told == [(30, 24, 720), (40, 18, 720), (48, 15, 720), (60, 12, 720)]
    assert [rung["use"] for rung in document["rungs"]] == [0.575, 0.6583, 0.725, 0.825]
    assert [rung["relative_step_time"] for rung in document["rungs"]] == [1.0, 0.75, 0.625, 0.5]
    assert (document["above"]["micro_batch"], document["above"]["verdict"]) == (72, "fails")
