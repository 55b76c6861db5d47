"""`memfit table`'s figures are those of `memfit plan`, and the guides' are beside them."""

from __future__ import annotations

import csv
import io
import json

import pytest

from memfit.advice import table as tables
from memfit.advice.guide_claims import DECISIONS, EXAMPLES, QUICK_REFERENCE
from memfit.advice.table import Table, make_table
from memfit.errors import UnknownName, UsageError
from memfit.gpus import find_gpu
from memfit.jobs.workload import Workload
from memfit.planning.predict import predict
from memfit.planning.whole_model_pruning import predict_whole_model_pruning
from memfit.render.table_terminal import show_table
from memfit.render.table_text import as_csv, as_markdown
from memfit.render.text import as_text

MODELS, CARDS = ("smollm2-135m", "llama-3.2-1b"), ("24GB", "2GiB", "6GiB")


@pytest.fixture(scope="module")
def made() -> Table:
    return make_table(MODELS, ("prune", "lora", "forward"), CARDS)


def test_totals_are_those_of_plan(made: Table) -> None:
    for row in made.rows:
        if row.way != tables.WHOLE:
            plan = predict(row.workload)
            line = row.to_json()
            assert line["total_bytes"] == plan.peak.device_bytes
            assert line["weights_bytes"] + line["activations_bytes"] == plan.peak.allocated_bytes


def test_every_verdict_is_that_of_plan_on_that_card_also_where_it_follows_from_another(made: Table) -> None:
    for row in made.rows:
        for label, cell in row.cells.items():
            card = find_gpu(label)
            whole = row.way == tables.WHOLE
            plan = predict_whole_model_pruning(row.workload, card) if whole else predict(row.workload, gpu=card)
            assert cell.verdict == plan.verdict, (row.workload, row.way, label)


def test_cards_go_from_small_to_large_and_the_smallest_is_the_first_that_does_not_fail(made: Table) -> None:
    assert list(made.cards) == ["2GiB", "6GiB", "24GB"]
    for row in made.rows:
        verdicts = [cell.verdict for cell in row.cells.values()]
        fits = [label for label, verdict in zip(made.cards, verdicts, strict=True) if verdict != "fails"]
        assert row.smallest == (fits[0] if fits else None)


def test_the_decision_matrix_names_the_largest_model_that_is_safe(made: Table) -> None:
    for line in made.to_json()["matrix"]:
        for row in made.rows:
            if row.way == tables.STREAMED and row.cells[line["gpu"]].verdict == "safe":
                best = next(other for other in made.rows if other.plan.model == line["largest"]["prune"])
                assert best.plan.parameters >= row.plan.parameters


@pytest.mark.parametrize(
    ("model", "measured"), [("llama-3.2-1b", 5_476_439_552), ("llama-2-7b", 20_015_927_808)]
)  # the public Wanda code on an H200, fp16, 128 x 2048 tokens
def test_the_whole_model_way_takes_what_the_public_code_was_measured_to_take(model: str, measured: int) -> None:
    plan = predict_whole_model_pruning(Workload(kind="prune", model=model, precision="fp16"), None)

    assert abs(plan.peak.allocated_bytes - measured) <= 16 * 1024


def test_streaming_takes_less_than_the_whole_model(made: Table) -> None:
    ways = {row.way: row.plan.peak.device_bytes for row in made.rows if row.plan.model == "llama-3.2-1b" and row.way}

    assert ways[tables.STREAMED] < ways[tables.WHOLE] / 2


def test_the_guides_rows_and_claims_stand_beside_the_models_that_they_are_about(made: Table) -> None:
    rows = {row.plan.model: row.guide for row in made.rows if row.way == tables.WHOLE}

    assert rows["smollm2-135m"] is None
    assert rows["llama-3.2-1b"] == QUICK_REFERENCE[0]
    assert [each.claim for each in made.decisions] == [DECISIONS[0]]
    assert {each.claim.model for each in made.examples} == {"1b"}


def test_a_difference_is_counted_from_the_nearer_end_of_the_guides_range() -> None:
    assert tables._difference(6_500_000_000, (5, 6)) == 500_000_000
    assert tables._difference(5_500_000_000, (5, 6)) == 0
    assert tables._difference(4_000_000_000, (5, 6)) == -1_000_000_000
    assert tables._difference(4_000_000_000, None) is None


def test_every_model_and_card_that_the_guides_name_is_known() -> None:
    for claim in (*DECISIONS, *EXAMPLES):
        find_gpu(claim.gpu)
        tables.jobs_of([claim.model], ["prune"], seq_len=claim.seq_len, nsamples=claim.nsamples)


def test_the_guides_can_be_left_out() -> None:
    made = make_table(["llama-3.2-1b"], ["prune"], ["8GB"], guides=False)

    assert not made.decisions and not made.examples


def test_progress_counts_up_to_the_number_of_steps() -> None:
    steps: list[tuple[int, int]] = []
    make_table(
        ["smollm2-135m"], ["forward", "prune"], ["8GB"], on_step=lambda _, done, total: steps.append((done, total))
    )

    assert steps == [(0, 3), (1, 3), (2, 3)]


def test_a_job_that_cannot_be_planned_is_left_out_with_the_reason() -> None:
    made = make_table(["gpt2", "smollm2-135m"], ["forward"], ["8GB"])

    assert [row.plan.model for row in made.rows] == ["smollm2-135m"]
    assert made.left_out == ("forward of gpt2: --seq-len 2048 is more than the 1024 positions that gpt2 has",)
    assert f"left out: {made.left_out[0]}" in made.to_json()["notes"]


def test_where_nothing_can_be_planned_the_first_reason_is_the_error() -> None:
    with pytest.raises(UsageError, match="more than the 1024 positions"):
        make_table(["gpt2"], ["forward"], ["8GB"])


@pytest.mark.parametrize(
    ("models", "workloads", "gpus", "error"),
    [
        (["lama"], ["prune"], ["8GB"], UnknownName),
        (["1b"], ["prun"], ["8GB"], UnknownName),
        (["1b"], ["prune"], ["8XB"], UsageError),
        (["1b"] * 2000, ["prune"], ["8GB"], UsageError),
    ],
)
def test_a_wrong_name_is_told_before_anything_is_planned(
    models: list[str], workloads: list[str], gpus: list[str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        make_table(models, workloads, gpus, on_step=lambda *_: pytest.fail("it began to plan"))


def test_markdown_has_as_many_cells_in_each_line_as_its_header(made: Table) -> None:
    widths: set[int] = set()
    for line in as_markdown(made.to_json()).splitlines():
        if not line.startswith("|"):
            widths = set()
            continue
        widths.add(line.count(" | "))
        assert len(widths) == 1


def test_a_name_cannot_break_out_of_its_cell(made: Table) -> None:
    document = json.loads(json.dumps(made.to_json()))
    document["rows"][0]["model"] = "a|b<script>\n"

    text = as_markdown(document)

    assert "a\\|b&lt;script>" in text


def test_csv_gives_the_same_figures_in_bytes(made: Table) -> None:
    document = made.to_json()
    lines = list(csv.DictReader(io.StringIO(as_csv(document))))

    assert len(lines) == len(document["rows"])
    for line, row in zip(lines, document["rows"], strict=True):
        assert int(line["total_bytes"]) == row["total_bytes"]
        assert line["2GiB"] == row["cells"]["2GiB"]["verdict"]
        assert line["guide_smallest_gpu"] == ("8 GB" if row["guide"] else "")


def test_the_terminal_shows_every_row_once(made: Table) -> None:
    document = made.to_json()
    text = as_text(show_table, document)
    first = text.split("Decision matrix")[0]

    assert len(first.strip().splitlines()) == 2 + len(document["rows"])
    assert "The guide's table" in text
