"""Runs whose models, shapes and settings were drawn at random: the predicted peaks are the measured ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from measured import assert_measured, peak

from memfit.jobs.workload import Workload
from memfit.planning.predict import predict

ROOT = Path(__file__).parents[2]
RUNS = {
    run["id"]: run
    for run in map(json.loads, (ROOT / "accuracy" / "measured" / "unseen.jsonl").read_text().splitlines())
}
QUICK = {
    "z18": "queries and keys of a fused projection, each normed: with gaps in between",
    "z16": "experts of another family",
    "z30": "attention that is a recurrence",
    "z37": "Adafactor over checkpointed blocks, padded, the loss in odd chunks",
    "z55": "more is alive while DDP is set up than in any step",
    "z62": "allocator settings by size",
    "z72": "a static cache of experts under autocast, drawn tokens",
    "z48": "two beams of padded rows, expandable segments and rounded sizes",
}


@pytest.mark.parametrize("run_id", QUICK)
def test_a_run_that_was_drawn_peaks_where_it_was_measured(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = RUNS[run_id]
    known = {field.name for field in dataclasses.fields(Workload)}
    made = predict(**{name: value for name, value in run.items() if name in known}, trace_cache=False)
    assert_measured(peak(made), (run["peak_allocated"], run["peak_reserved"]))
