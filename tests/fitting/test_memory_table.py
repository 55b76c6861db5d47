"""`memfit table`'s figures are those of `memfit plan`, and the guides' are beside them."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
from support.rotary import ROTARY_TABLES_ARE_A_PRODUCT

import memfit
from memfit.errors import UnknownName, UsageError
from memfit.fitting.claims import STREAMED, WHOLE, check_claim, check_saving, difference, plan_way
from memfit.fitting.table import GPUS, Table, jobs_of, make_table
from memfit.gpus import find_gpu
from memfit.guides.claims import DECISIONS, EXAMPLES, QUICK_REFERENCE, SAVINGS, Claim
from memfit.jobs.workload import Workload
from memfit.planning.predict import predict
from memfit.planning.pruning import predict_whole_model_pruning
from memfit.render.plan import as_text
from memfit.render.table import as_csv, as_markdown, show_table

pytestmark = pytest.mark.usefixtures("shared_traces")

MODELS, CARDS = ("pythia-14m", "llama-3.2-1b"), ("24GB", "2GiB", "6GiB")


planned = cache(plan_way)
"""Most claims are about one model: it is traced once."""


@pytest.fixture(scope="module")
def made() -> Table:
    return make_table(MODELS, ("prune", "lora", "forward"), CARDS)


def test_totals_are_those_of_plan(made: Table) -> None:
    for row in made.rows:
        if row.way != WHOLE:
            plan = predict(row.workload)
            line = row.to_json()
            assert line["total_bytes"] == plan.peak.device_bytes
            assert line["weights_bytes"] + line["activations_bytes"] == plan.peak.allocated_bytes


def test_every_verdict_is_that_of_plan_on_that_card_also_where_it_follows_from_another(made: Table) -> None:
    assert [len(row.cells) for row in made.rows] == [3] * 8, "two models, pruned in two ways, trained and run"
    for row in made.rows:
        for label, cell in row.cells.items():
            card = find_gpu(label)
            whole = row.way == WHOLE
            plan = predict_whole_model_pruning(row.workload, card) if whole else predict(row.workload, gpu=card)
            assert cell.verdict == plan.verdict, (row.workload, row.way, label)


def test_cards_go_from_small_to_large_and_the_smallest_is_the_first_that_does_not_fail(made: Table) -> None:
    assert list(made.cards) == ["2GiB", "6GiB", "24GB"]
    for row in made.rows:
        verdicts = [cell.verdict for cell in row.cells.values()]
        fits = [label for label, verdict in zip(made.cards, verdicts, strict=True) if verdict != "fails"]
        assert row.smallest == (fits[0] if fits else None)


def test_the_decision_matrix_names_the_largest_model_that_is_safe(made: Table) -> None:
    matrix = made.to_json()["matrix"]
    assert [line["gpu"] for line in matrix] == ["2GiB", "6GiB", "24GB"]
    assert matrix[-1]["largest"]["prune"] == "llama-3.2-1b"
    for line in matrix:
        for row in made.rows:
            if row.way == STREAMED and row.cells[line["gpu"]].verdict == "safe":
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

    assert ways[STREAMED] < ways[WHOLE] / 2


def test_the_guides_rows_and_claims_stand_beside_the_models_that_they_are_about(made: Table) -> None:
    rows = {row.plan.model: row.guide for row in made.rows if row.way == WHOLE}

    assert rows["pythia-14m"] is None
    assert rows["llama-3.2-1b"] == QUICK_REFERENCE[0]
    assert [each.claim for each in made.decisions] == [DECISIONS[0]]
    assert {each.claim.model for each in made.examples} == {"1b"}


def test_a_difference_is_counted_from_the_nearer_end_of_the_guides_range() -> None:
    assert difference(650, (500, 600)) == 50
    assert difference(550, (500, 600)) == 0
    assert difference(400, (500, 600)) == -100
    assert difference(400, None) is None


def test_each_guides_gb_are_what_it_counts_in() -> None:
    """One divides by 1024**3, the other calls 2 x 1.24 billion bytes 2.5 GB."""
    by_formula, _, _, by_example, *_ = EXAMPLES

    assert by_formula.total_bytes == (round(4.31 * 2**30),) * 2
    assert by_example.total_bytes == (5_900_000_000,) * 2


def claim(said: str) -> Claim:
    return next(each for each in (*DECISIONS, *EXAMPLES) if each.said.startswith(said))


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("8-12 GB GPU: LLaMA 1B", "not needed: it fits as it is"),
        ("LLaMA 1B on 16 GB: ~5.9 GB", "right"),
        ("LLaMA 1B-3B on 16 GB", "right that it fits, its figure is too low"),
        ("RTX A6000 is the minimum", "too careful: 40GB is enough"),
        ("RTX 3060 is the minimum", "right, but it is tight"),
    ],
)
def test_a_claim_is_answered_in_words(said: str, answer: str) -> None:
    checked = check_claim(claim(said), planned)

    assert checked.answer == answer
    assert (checked.streamed_gpu, checked.streamed.verdict) == ("8GB", "safe")


@pytest.mark.parametrize(
    ("said", "found", "by_default", "answer"),
    [
        ("fails", "fails", "fails", "right"),
        ("fails", "tight", "tight", "wrong: it fits tightly"),
        ("fits", "fails", "fails", "wrong: it fails"),
        ("tight", "safe", "safe", "too careful: it is safe"),
        ("fits", "tight", "fails", "right, but it is tight"),
    ],
)
def test_a_claim_is_right_or_wrong_by_what_is_predicted(
    said: Literal["fits", "tight", "fails"], found: str, by_default: str, answer: str
) -> None:
    """Of a 1B, on cards on which its two plans come out so."""
    cards = {"safe": "80GB", "tight": "5.9GiB", "fails": "2GiB"}
    about = Claim(guide="", said="", model="1b", gpu=cards[found], verdict=said)
    if by_default != found:
        about = replace(about, gpu="4.9GiB", nsamples=64)

    checked = check_claim(about, planned)

    assert (checked.whole.verdict, checked.whole_by_default.verdict) == (found, by_default)
    assert checked.answer == answer


def test_half_the_length_saves_less_than_the_half_that_the_guide_says() -> None:
    """Two buffers of hidden states are halved; what sorting the scores of the largest matrix takes is not."""
    half, quarter, *_ = (check_saving(replace(saving, model="1b"), planned).to_json() for saving in SAVINGS[:2])

    assert 0.3 < half["share"] < half["guide_share"]
    assert half["share"] < quarter["share"] < quarter["guide_share"]


def test_every_model_and_card_that_the_guides_name_is_known() -> None:
    for each in (*DECISIONS, *EXAMPLES):
        find_gpu(each.gpu)
        jobs_of([each.model], ["prune"], seq_len=each.seq_len, nsamples=each.nsamples)


def test_the_guides_can_be_left_out() -> None:
    made = make_table(["llama-3.2-1b"], ["prune"], ["8GB"], guides=False)

    assert not made.decisions and not made.examples


def test_progress_counts_up_to_the_number_of_steps() -> None:
    steps: list[tuple[int, int]] = []
    make_table(
        ["pythia-14m"], ["forward", "prune"], ["8GB"], on_step=lambda _, done, total: steps.append((done, total))
    )

    assert steps == [(0, 3), (1, 3), (2, 3)]


def test_names_may_be_written_as_on_the_command_line() -> None:
    made = memfit.table("pythia-14m, gpt2", "forward", "8GB,24GB", seq_len=512)

    assert [row.plan.model for row in made.rows] == ["pythia-14m", "gpt2"]
    assert list(made.cards) == ["8GB", "24GB"]


def test_a_table_shows_itself_and_is_short_as_an_expression(made: Table) -> None:
    assert repr(made) == "<Table: 8 jobs on 2GiB, 6GiB, 24GB>"
    assert str(made).strip().startswith("Quick reference")
    assert made.to_markdown() == as_markdown(made.to_json())
    assert made.to_csv() == as_csv(made.to_json())


def test_the_cards_of_the_guides_table_are_among_the_default_ones() -> None:
    said = {row.smallest.replace(" ", "") for row in QUICK_REFERENCE if "x" not in row.smallest}

    assert said | {"24GB", "48GB"} <= set(GPUS)


def test_a_job_that_cannot_be_planned_is_left_out_with_the_reason() -> None:
    made = make_table(["gpt2", "pythia-14m"], ["forward"], ["8GB"])

    assert [row.plan.model for row in made.rows] == ["pythia-14m"]
    assert made.left_out == ("forward of gpt2: --seq-len 2048 is more than the 1024 positions that gpt2 has",)
    assert f"left out: {made.left_out[0]}" in made.to_json()["notes"]


def test_rows_that_are_not_modelled_in_part_are_marked_and_the_quantisation_is_named(tmp_path: Path) -> None:
    shape = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    packed = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    for name, more in (("plain", {}), ("packed", packed)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**shape, **more}))
    text = str(make_table(str(tmp_path / "plain"), "qlora", "24GB", seq_len=64, guides=False))
    assert "quant nf4, double-quant, quant-compute bf16, kbit-prepare" in " ".join(text.split())
    assert " *" not in text
    text = str(make_table(str(tmp_path / "packed"), "lora", "24GB", seq_len=64, guides=False))
    assert "packed *" in text and ": not modelled: how gptqmodel unpacks weights" in " ".join(text.split())


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
    assert sum(line.startswith("|") for line in as_markdown(made.to_json()).splitlines()) > 2 * len(made.rows)


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

    groups = {(row["workload"], row["way"]) for row in document["rows"]}
    assert len(first.strip().splitlines()) == 2 + len(groups) + len(document["rows"])
    assert "The guide's table" in text


def test_the_quick_reference_is_not_folded_in_a_terminal_of_80_columns(made: Table) -> None:
    head = as_text(show_table, made.to_json(), width=80).splitlines()[2]

    assert head.split() == ["model", "params", "weights", "activations", "total", "smallest", "recommended"]


def test_the_page_says_of_the_guides_what_is_predicted_now() -> None:
    page = (Path(__file__).parents[2] / "docs" / "table.md").read_text(encoding="utf-8")

    def total(model: str, gpu: str | None) -> int:
        card = find_gpu(gpu) if gpu else None
        return predict_whole_model_pruning(Workload(kind="prune", model=model), card).peak.device_bytes

    shares = [check_saving(saving, planned).to_json()["share"] for saving in SAVINGS[:3]]
    other = 0 if ROTARY_TABLES_ARE_A_PRODUCT else 0.01  # without it, what is reserved lies otherwise

    said = [
        re.search(r"72-75 GB \| ([\d.]+) GB", page),
        re.search(r"it is safe; ([\d.]+) GB, not 22.2", page),
        re.search(r"5-6 GB \| ([\d.]+) and ([\d.]+) GiB", page),
    ]
    figures = [float(figure) for found in said if found for figure in found.groups()]
    now = [total("30b", None) / 1e9, total("7b", "24GB") / 1e9]
    now += [total("1b", "16GB") / 2**30, total("3b", "16GB") / 2**30]
    for figure, total_now in zip(figures, now, strict=True):
        assert abs(total_now - figure) <= 0.0501 + other * figure  # the page rounds
    assert shares == pytest.approx([1 / 3, 1 / 2, 1 / 3], abs=0.02)
    assert "7B: a third less, half less; `--nsamples` does the same" in page


def test_windows_longer_than_the_model_can_take_are_cut_in_both_ways_and_the_notes_say_so() -> None:
    made = make_table("gpt2", "prune", "8GB", seq_len=4096, nsamples=8)

    assert [row["settings"]["seq_len"] for row in made.to_json()["rows"]] == [1024, 1024]
    assert "gpt2 is pruned with windows of 1024 tokens: it has no more positions" in made.to_json()["notes"]


@pytest.mark.parametrize("names", [("", "forward", "8GB"), ("gpt2", [], "8GB"), ("gpt2", "forward", ())])
def test_a_table_of_nothing_is_refused(names: tuple[str, str, str]) -> None:
    with pytest.raises(UsageError, match="is named"):
        make_table(*names)


def test_in_a_narrow_terminal_a_claim_is_a_line_and_its_answer_the_next(made: Table) -> None:
    narrow, wide = (as_text(show_table, made.to_json(), width=width) for width in (80, 160))
    said = DECISIONS[0].said

    below = narrow.split(said)[1].split("\n")
    assert below[0] == "" and below[1].startswith("    not needed: it fits as it is (card 8GB, its way ")
    assert re.search(rf"{re.escape(said)} +not needed: it fits as it is +8GB", wide)
