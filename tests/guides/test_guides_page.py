"""docs/guides.md is what its command writes: the five documents of `memfit/guides/`, with figures that still hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import memfit
from accuracy.guide_claims import BOTH_ALLOCATOR_SETTINGS, GSA_CLAIMS, LORA_CLAIMS, TrainingClaims
from accuracy.guide_steps import STEPS
from accuracy.guides import TARGET, advice_row, anchor, claims_of, steps_of
from memfit.fitting.forecast import Forecasts
from memfit.gpus import find_gpu
from memfit.guides.claims import DEBUGGING, DOCUMENTS, REQUIREMENTS, RUNGS, SAVINGS, Document, rule_of_thumb

pytestmark = pytest.mark.usefixtures("shared_traces")

LINES = TARGET.read_text(encoding="utf-8").splitlines()
ROOT = Path(__file__).parents[2]
DOCUMENT = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)


@DOCUMENT
def test_a_document_has_a_chapter_under_its_own_title_with_all_its_steps(document: Document) -> None:
    assert f"## {document.title}" in LINES
    assert any(f"[{document.title}](#{anchor(document)})" in line for line in LINES)
    assert set(steps_of(document)) <= set(LINES)


def test_the_titles_are_five_and_each_names_one() -> None:
    assert len({document.title for document in DOCUMENTS}) == len({each.name for each in DOCUMENTS}) == 5


@DOCUMENT
def test_each_document_is_answered_by_commands(document: Document) -> None:
    """Their flags are checked with those of all pages (tests/test_docs_code.py)."""
    assert sum(step.memfit.startswith(("memfit ", "torchrun ")) for step in STEPS[document.name]) >= 5
    assert all("\n" not in step.memfit and "|" not in step.asks + step.memfit for step in STEPS[document.name])


@pytest.mark.parametrize("claims", [LORA_CLAIMS, GSA_CLAIMS], ids=lambda claims: claims.document.name)
def test_every_advice_and_total_is_on_the_page(claims: TrainingClaims) -> None:
    for said, figure in [(each.said, each.saves) for each in claims.advice] + [
        (each.said, each.takes) for each in claims.totals
    ]:
        assert any(line.startswith(f"| {said} | {figure}") for line in LINES), said
    for why in claims.no_prediction:
        assert f"- {why}" in LINES


IN_FOUR_PROCESSES = pytest.param(GSA_CLAIMS, "micro-batch 2 to 1", marks=pytest.mark.slow)


@pytest.mark.parametrize(("claims", "said"), [(LORA_CLAIMS, f"`{BOTH_ALLOCATOR_SETTINGS}`"), IN_FOUR_PROCESSES])
def test_an_advice_on_the_page_is_what_is_predicted_now(claims: TrainingClaims, said: str) -> None:
    (tip,) = (each for each in claims.advice if each.said == said)

    assert advice_row(claims, Forecasts(find_gpu(claims.gpu), 0.1), tip) in LINES


def test_every_rung_and_saving_is_on_the_page() -> None:
    for name, rows, steps, length, said in RUNGS:
        assert any(line.startswith(f"| {name} | {rows} x {steps}, {length} tokens | {said} |") for line in LINES)
    for saving in SAVINGS:
        assert any(line.startswith(f"| {saving.said} | ") for line in LINES)


def test_a_claim_on_pruning_is_on_the_page_as_it_is_predicted_now() -> None:
    table = memfit.table("1b", "prune", "8GB").to_json()
    for document in (DEBUGGING, REQUIREMENTS):
        assert set(claims_of(document, table)) <= set(LINES)


def test_one_activation_of_the_residual_stream_is_worked_out() -> None:
    assert any(re.search(r"\(d\).* 4 x 512 x 2560 x 4 B = 20\.00", line) for line in LINES)


def test_the_formula_of_the_requirements_guide_is_as_it_stands_there() -> None:
    assert rule_of_thumb(1.2)["total"] == pytest.approx(5.8)


def test_the_makefile_has_the_command_that_writes_it() -> None:
    assert "-m accuracy.guides" in (ROOT / "Makefile").read_text(encoding="utf-8")
