"""What a viewer is answered: windows, filters and sums of a run say exactly what the run says."""

from __future__ import annotations

import base64
import itertools
from typing import Any

import numpy as np
import pytest
from made import DATA, random_trace

from memfit.analysis.labels import ALL_CATEGORIES
from memfit.analysis.page import Filter, RunView, Window, group_sums, only, sample, sum_up, window_of
from memfit.analysis.report import Report, report_file
from memfit.analysis.run import Run, run_of_trace
from memfit.errors import UsageError
from memfit.replay.timeline import BEFORE


@pytest.fixture(scope="module")
def run() -> Run:
    return run_of_trace(random_trace(5, events=3000))


@pytest.fixture(scope="module")
def recorded() -> RunView:
    return RunView(report_file(DATA / "snap-train.pickle"))


def column(text: str, kind: str) -> list[int]:
    return np.frombuffer(base64.b64decode(text), dtype=kind).tolist()


def alive_bytes(run: Run, event: int, category: int | None = None) -> int:
    """Counted block by block, in Python."""
    lives, total = run.timeline.lives, 0
    for block in range(len(run.timeline.size)):
        if lives.birth[block] <= event < lives.death[block]:
            total += int(run.timeline.size[block]) if category in (None, run.labels.category[block]) else 0
    return total


@pytest.mark.parametrize(("first", "last"), [(0, 3000), (1, 2), (700, 1900), (1500, 1500), (2999, 3000)])
def test_what_was_there_and_what_came_less_what_went_is_what_is_there_after(run: Run, first: int, last: int) -> None:
    sums = sum_up(run, Window(first, last))

    for row in (*sums["categories"], sums["total"]):
        for unit in ("bytes", "count"):
            came, went = row[f"allocated_{unit}"], row[f"freed_{unit}"]
            assert row[f"before_{unit}"] + came - went == row[f"after_{unit}"]
    assert sums["total"]["before_bytes"] == alive_bytes(run, first - 1)
    assert sums["total"]["after_bytes"] == alive_bytes(run, last - 1)


def test_sums_by_category_are_those_of_the_blocks(recorded: RunView) -> None:
    sums = recorded.sums({"axis": "time", "from": 0.02, "to": 0.05})
    run = recorded.reported.run
    assert run is not None and run.times is not None
    inside = np.flatnonzero((run.times >= 0.02) & (run.times <= 0.05))
    first, last = int(inside[0]), int(inside[-1]) + 1

    assert (sums["first_event"], sums["last_event"]) == (first, last)
    for row in sums["categories"]:
        number = ALL_CATEGORIES.index(row["category"])
        made = [
            int(size)
            for size, birth, kind in zip(
                run.timeline.size, run.timeline.lives.birth, run.labels.category, strict=True
            )
            if first <= birth < last and kind == number and size
        ]  # fmt: skip
        assert (row["allocated_bytes"], row["allocated_count"]) == (sum(made), len(made))
        assert row["after_bytes"] == alive_bytes(run, last - 1, number)
    assert sums["peak"]["allocated_bytes"] == int(run.timeline.allocated[first:last].max())


@pytest.mark.parametrize("columns", [1, 7, 200, 4000])
def test_every_column_of_a_window_shows_its_highest_moment(run: Run, columns: int) -> None:
    asked = {"axis": "event", "from": 500.0, "to": 2500.0, "columns": columns}
    drawn = RunView(Report({}, run)).stretch(asked)["timeline"]
    events = np.array(column(drawn["samples"]["event"], "<i4"))
    allocated = np.array(column(drawn["samples"]["allocated"], "<u4"))

    every = np.arange(499, 2500)
    edges = [*np.linspace(500, 2500, columns, endpoint=False).tolist(), 2501]
    for left, right in itertools.pairwise(edges):
        inside = every[(left <= every + 1) & (every + 1 < right)]
        if not len(inside):
            continue
        shown = allocated[(left <= events + 1) & (events + 1 < right)].tolist()
        held = allocated[events < inside[0]][-1:].tolist()
        assert max(shown + held) * drawn["unit"] >= int(run.timeline.allocated[inside].max())
    assert len(events) <= 2 * columns + len(run.labels.phases) + 3


def test_a_window_says_what_the_whole_says(run: Run) -> None:
    window = Window(800, 1700, np.arange(800, 1700, 9))
    samples = sample(run.timeline, window=window)

    assert samples.event[0] == 799
    assert samples.allocated.tolist() == [run.timeline.allocated_at(event) for event in samples.event.tolist()]
    sums = group_sums(run.timeline, samples, run.labels.category, len(ALL_CATEGORIES))
    assert sums.sum(axis=0).tolist() == samples.allocated.tolist()


def test_a_filter_lets_through_what_it_names(recorded: RunView) -> None:
    run = recorded.reported.run
    assert run is not None
    labels, size = run.labels, run.timeline.size

    big = Filter.read({"least_bytes": 1 << 20, "most_bytes": 10 << 20}).mask(run)
    assert big.tolist() == [1 << 20 <= each <= 10 << 20 for each in size.tolist()]
    kinds = Filter.read({"categories": ["gradients"]}).mask(run)
    assert kinds.sum() == (labels.category == ALL_CATEGORIES.index("gradients")).sum() > 0
    text = Filter.read({"text": "ADAM"}).mask(run)
    lines = [labels.lines[labels.line[block]] for block in range(len(size))]
    ops = [labels.ops[labels.op[block]] for block in range(len(size))]
    modules = [labels.modules[labels.module[block]] for block in range(len(size))]
    named = ["adam" in " ".join(names).lower() for names in zip(lines, modules, ops, strict=True)]
    assert text.tolist() == [found and each > 0 for found, each in zip(named, size.tolist(), strict=True)]
    assert 0 < text.sum() < len(size)
    assert not Filter.read({"text": "adam", "categories": ["weights"]}).mask(run).any()


def test_what_is_filtered_adds_up_at_every_event(run: Run) -> None:
    chosen = Filter(least_bytes=1 << 20).mask(run)
    some = only(run, chosen)

    for event in (BEFORE, 0, 7, 1234, 2999):
        alive = run.timeline.lives.alive_at(event)
        assert some.timeline.allocated_at(event) == int(run.timeline.size[alive[chosen[alive]]].sum())
    assert some.timeline.reserved is None


def test_a_page_has_a_bound_and_says_how_many_blocks_are_left_out(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr("memfit.analysis.page.VIEW_BLOCKS", 50)
    blocks = RunView(Report({}, run)).page()["timeline"]["blocks"]

    assert (blocks["count"], blocks["left_out"]) == (50, int((run.timeline.size > 0).sum()) - 50)


def test_blocks_that_can_be_seen_come_before_larger_ones_that_cannot(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr("memfit.analysis.page.VIEW_BLOCKS", 20)
    drawn = RunView(Report({}, run)).stretch({"axis": "event", "from": 0, "to": 3000, "columns": 2})["timeline"]
    samples, chosen = column(drawn["samples"]["event"], "<i4"), column(drawn["blocks"]["number"], "<i4")
    lives = run.timeline.lives
    seen = [block for block in chosen if any(lives.birth[block] <= event < lives.death[block] for event in samples)]

    assert seen == chosen
    assert len(chosen) == 20


@pytest.mark.parametrize(
    "asked",
    [
        {"from": "1"}, {"from": float("nan")}, {"from": 5, "to": 4}, {"columns": [1]},
        {"filter": {"categories": ["x"]}}, {"filter": {"categories": "weights"}}, {"filter": {"least_bytes": "1"}},
    ],
)  # fmt: skip
def test_a_question_that_makes_no_sense_is_refused_in_words(run: Run, asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RunView(Report({}, run)).stretch(asked)


def test_questions_beyond_the_run_are_answered_with_what_there_is(run: Run) -> None:
    viewed = RunView(Report({}, run))

    assert viewed.stretch({"from": -5, "to": 1e300, "columns": 1e300})["timeline"]["last"] == 3000
    assert viewed.stretch({"from": 1e200, "to": 1e300})["timeline"]["samples"]["count"] == 1
    assert window_of(run, {"axis": "time", "from": 10})[0].first == 9  # a prediction has no times: by events


def test_a_memory_log_has_no_timeline_and_says_so() -> None:
    with pytest.raises(UsageError, match="no timeline"):
        RunView(Report({"peak": {}}, None)).sums({})
