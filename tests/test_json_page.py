"""docs/json.md names every key of the documents that memfit prints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memfit
from memfit.cli.main import main

pytestmark = pytest.mark.usefixtures("shared_traces")

PAGE = (Path(__file__).parents[1] / "docs" / "json.md").read_text(encoding="utf-8")
FORWARD: dict[str, Any] = {"kind": "forward", "model": "smollm2-135m", "seq_len": 64}
BLOCKS = str(Path(__file__).parent / "fitting" / "gpt2_of_two_blocks")
LORA: dict[str, Any] = {"kind": "lora", "model": BLOCKS, "rank": 8, "seq_len": 64}
OOM = Path(__file__).parents[1] / "examples" / "oom.txt"


def section(schema: str) -> str:
    """From the heading, or the paragraph, that the schema stands in to the next heading."""
    at = PAGE.index(f"`{schema}`") if f"`{schema}`" in PAGE else PAGE.index(schema)
    begin = PAGE.rindex("\n## ", 0, at)
    return PAGE[begin : (PAGE + "\n## ").index("\n## ", at)]


def told(schema: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", section(schema)))


DOCUMENTS: list[Callable[[], Any]] = [
    lambda: memfit.predict(**FORWARD, gpu="8GB").to_json(),
    lambda: memfit.fit(**LORA, gpu="24GB").to_json(),
    lambda: memfit.ladder(**LORA, gpu="24GB", global_batch=2).to_json(),
    lambda: memfit.table("smollm2-135m", "forward", "8GB", seq_len=64).to_json(),
    lambda: memfit.explain(OOM).to_json(),
    lambda: memfit.check().to_json(),
]
LINES = [
    "models --json",
    "gpus --json",
    "watch --json --count 1",
    "profile --json --model-size small --context-length 32 --device predict --output {folder}/profile.pickle",
    "train --json --config smollm2-lora-demo --dry-run --set model.name=smollm2-135m --set model.from_scratch=true "
    "--set model.tokenizer=bytes",
    "report --json {folder}/trace.npz",
    "diff --json {folder}/trace.npz {folder}/trace.npz",
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split()[0])
def test_every_key_of_what_a_command_prints_is_on_the_page(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memfit.predict(**FORWARD).trace.save(tmp_path / "trace.npz")
    capsys.readouterr()

    assert main(line.format(folder=tmp_path).split()) == 0
    document = json.loads(capsys.readouterr().out)

    assert set(document) - told(document["schema"]) - {"schema"} == set()


@pytest.mark.parametrize("made", DOCUMENTS)
def test_every_key_of_a_document_is_on_the_page(made: Callable[[], Any]) -> None:
    document = made()

    assert set(document) - told(document["schema"]) - {"schema"} == set()
