"""Predicted against measured on an H200: whole training runs, to the byte where that is possible.

A few runs that cover the kinds are predicted each time; `pytest -m slow` predicts the rest as well.
"""

from __future__ import annotations

from statistics import median

import pytest
from measured import Run, error, pair, peak, plan_of, runs

ALL = [run_id for run_id, run in runs().items() if run.is_planned]
QUICK = ["d01", "d04", "d05", "d06", "d07", "d08", "d10", "d14", "d15", "d16", "d22", "d23", "d24"]
"""Forward, full and LoRA; bf16, fp32 and autocast; fused, mem-efficient, math and eager attention; dropout;
checkpointing; AdamW foreach and fused, SGD; biased linears; tied heads; expandable segments; the Trainer."""


def each(ids: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "run_id", [pytest.param(i, marks=() if i in QUICK else pytest.mark.slow) for i in ids]
    )


EACH = each(ALL)

ALLOCATED, RESERVED, DEVICE = 0.0001, 0.003, 0.005
"""The largest share by which any run may be off."""
PHASE_ALLOCATED, PHASE_RESERVED = 0.0005, 0.003


@EACH
def test_the_peak_is_the_measured_one(run_id: str) -> None:
    run, plan = runs()[run_id], plan_of(run_id)
    allocated, reserved = peak(plan)
    assert error(allocated, run.peak[0]) <= ALLOCATED
    assert error(reserved, run.peak[1]) <= RESERVED


@EACH
def test_what_is_held_after_loading_is_exact(run_id: str) -> None:
    load = next(phase for phase in plan_of(run_id).report.phases if phase.name == "load")
    assert pair(load) == runs()[run_id].loaded


@each([i for i in ALL if runs()[i].has_steps])
def test_each_phase_peaks_where_it_was_measured(run_id: str) -> None:
    predicted = {(p.name, p.step): pair(p) for p in plan_of(run_id).report.phases if p.name != "load"}
    measured = runs()[run_id].phases()
    assert sorted(predicted) == sorted(measured)
    wrong = {
        key: (predicted[key], measured[key])
        for key in measured
        if error(predicted[key][0], measured[key][0]) > PHASE_ALLOCATED
        or error(predicted[key][1], measured[key][1]) > PHASE_RESERVED
    }
    assert wrong == {}


@each([i for i in ALL if "device_used_end" in runs()[i].spec])
def test_the_device_holds_what_was_measured_in_the_end(run_id: str) -> None:
    assert error(plan_of(run_id).peak.device_bytes, runs()[run_id].spec["device_used_end"]) <= DEVICE


@each([i for i in ALL if "params" in runs()[i].spec])
def test_parameters_are_counted_right(run_id: str) -> None:
    spec, plan = runs()[run_id].spec, plan_of(run_id)
    assert plan.parameters == spec["params"]
    trained = {"forward": 0, "full": spec["params"], "lora": spec.get("trainable")}
    assert plan.trainable_parameters == trained[spec["kind"]]


def off(ids: list[str]) -> tuple[list[float], list[float]]:
    pairs: list[tuple[Run, tuple[int, int]]] = [(runs()[i], peak(plan_of(i))) for i in ids]
    allocated = [error(predicted[0], run.peak[0]) for run, predicted in pairs]
    reserved = [error(predicted[1], run.peak[1]) for run, predicted in pairs]
    return allocated, reserved


def test_half_of_the_runs_are_exact() -> None:
    allocated, reserved = off(QUICK)
    assert (median(allocated), median(reserved)) == (0, 0)


@pytest.mark.slow
def test_half_of_all_runs_are_exact() -> None:
    allocated, reserved = off(ALL)
    assert (median(allocated), median(reserved)) == (0, 0)


def test_the_quick_runs_cover_what_the_others_do() -> None:
    def features(ids: list[str]) -> set[tuple[str, object]]:
        names = ("kind", "precision", "attn", "ckpt", "optim", "trainer", "alloc_conf")
        return {(name, runs()[i].spec.get(name)) for i in ids for name in names}

    assert features(ALL) - features(QUICK) == {("precision", "fp16"), ("kind", "generate")}
