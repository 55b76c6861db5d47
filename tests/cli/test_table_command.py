"""`memfit table`: one set of figures in four forms."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("shared_traces")

Memfit = Callable[..., Any]
SMALL = ("--models", "smollm2-135m", "--workloads", "forward,prune", "--gpus", "8GB,2GiB", "--seq-len", "128")


def test_json_is_one_document(memfit: Memfit) -> None:
    ended = memfit("table", *SMALL, "--nsamples", "8", "--json")

    document = json.loads(ended.out)
    assert ended.code == 0
    assert document["schema"] == "memfit.table/1"
    assert [row["workload"] for row in document["rows"]] == ["forward", "prune", "prune"]
    assert [gpu["label"] for gpu in document["gpus"]] == ["2GiB", "8GB"]
    assert {row["settings"]["seq_len"] for row in document["rows"]} == {128}


def test_format_json_is_the_same_as_json(memfit: Memfit) -> None:
    one, other = (json.loads(memfit("table", *SMALL, *form).out) for form in (["--json"], ["--format", "json"]))

    assert one | {"seconds": 0} == other | {"seconds": 0}


def test_csv_has_one_line_a_row(memfit: Memfit) -> None:
    ended = memfit("table", *SMALL, "--format", "csv")

    lines = list(csv.DictReader(io.StringIO(ended.out)))
    assert [line["way"] for line in lines] == ["", "streamed", "whole"]


def test_markdown_is_headings_and_tables(memfit: Memfit) -> None:
    ended = memfit("table", *SMALL, "--format", "markdown")

    assert ended.out.startswith("# What fits where\n")
    assert "| forward | smollm2-135m |" in ended.out


def test_the_terminal_says_what_was_planned_with_what(memfit: Memfit) -> None:
    ended = memfit("table", *SMALL)

    assert "forward: batch-size 1, seq-len 128, precision bf16" in ended.out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--format", "xml"], "--format 'xml' is not one of terminal, markdown, csv, json"),
        (["--models", ""], "--models is empty"),
        (["--workloads", ","], "--workloads is empty"),
        (["--gpus", ""], "--gpus is empty"),
        (["--models", "lama-7b"], "no model called 'lama-7b'"),
        (["--workloads", "prun"], "no workload called 'prun'"),
        (["--gpus", "2x80GB"], "--gpus '2x80GB' names several cards"),
        (["--seq-len", "0"], "--seq-len 0 is not a whole number"),
        (["--nsamples", "0", "--workloads", "prune"], "nsamples"),
        (["--nsamples", "128", "--workloads", "lora"], "--nsamples 128 has no effect: nothing is pruned"),
        (["--json", "--format", "csv"], "--json and --format csv both say what is written"),
    ],
)
def test_wrong_input_is_one_error_with_the_flag_in_it(memfit: Memfit, flags: list[str], said: str) -> None:
    ended = memfit("table", *flags)

    assert ended.code == 2
    assert said in ended.err
    assert not ended.out
