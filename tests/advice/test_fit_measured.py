"""Sets that `fit` found, run on an H200 under the cap of the card they are for: what is predicted is what came about.

accuracy/measured/fits.jsonl: `-fits` is the answer, `-less` the answer without its last change, `-back` with the next
weaker one in its place, `-whole` the public pruning code beside memfit's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.advice.forecast import Forecasts
from memfit.gpus import find_gpu
from memfit.jobs.workload import Workload

MEASURED = Path(__file__).parents[2] / "accuracy" / "measured" / "fits.jsonl"
TOLERANCE = {"lora": 0.001, "train": 0.001, "prune": 0.04}
RUNS = [json.loads(line) for line in MEASURED.read_text(encoding="utf-8").splitlines()]


def named(run: dict[str, Any]) -> str:
    return str(run["id"])


@pytest.mark.parametrize("run", [run for run in RUNS if not run["id"].endswith("-whole")], ids=named)
def test_a_set_runs_under_the_cap_exactly_if_it_is_predicted_to(run: dict[str, Any]) -> None:
    forecast = Forecasts(find_gpu(run["gpu"]), 0.0).of(Workload.from_mapping(run["workload"]))

    assert forecast.runs == (not run["oom"])
    if not run["oom"] and not run["retries"]:
        assert forecast.reserved_bytes == pytest.approx(run["peak_reserved"], rel=TOLERANCE[forecast.workload.kind])


@pytest.mark.parametrize("run", [run for run in RUNS if run["id"].endswith("-whole")], ids=named)
def test_the_whole_model_runs_out_where_it_is_predicted_to(run: dict[str, Any]) -> None:
    from memfit.planning.whole_model_pruning import predict_whole_model_pruning

    plan = predict_whole_model_pruning(Workload.from_mapping(run["workload"]), find_gpu(run["gpu"]))

    assert (plan.verdict == "fails") == run["oom"]
