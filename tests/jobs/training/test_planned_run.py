"""A run beside its plan: by phase in the result, and explained where memory ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_run import document, tiny_job

from memfit.cli.main import main
from memfit.jobs.training.engine import MemfitTrainer
from memfit.jobs.training.result import PhasePeaks, TrainResult, beside
from memfit.jobs.training.run import train
from memfit.planning.training import plan_training
from memfit.recording.growth import GrowthWatch
from memfit.units import GiB

FULL = (
    "CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.10 GiB is "
    "free. Including non-PyTorch memory, this process has 22.53 GiB memory in use. Of the allocated memory 21.93 GiB "
    "is allocated by PyTorch, and 150.41 MiB is reserved by PyTorch but unallocated."
)


def test_the_result_has_what_the_plan_said_of_each_phase(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    plan = plan_training(job)
    result = train(job, on_event=lambda event: None, plan=plan)
    written = json.loads((tmp_path / "out" / "result.json").read_text())["phases"]
    assert [each["phase"] for each in written] == ["load", "forward", "backward", "step"]
    assert list(result.phases) == written
    for each in written:
        allocated, reserved = plan.phases[each["phase"]]
        assert (each["predicted_allocated_bytes"], each["predicted_reserved_bytes"]) == (allocated, reserved)
        assert each["measured_allocated_bytes"] is None and each["measured_reserved_bytes"] is None


def test_without_a_plan_there_is_nothing_to_say_of_phases_on_the_cpu(tmp_path: Path) -> None:
    assert train(tiny_job(tmp_path), on_event=lambda event: None).phases == ()


class Counter:
    """torch's counter of a GPU that is not here: the peak since it was set back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.read)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.set_back)

    def use(self, most: int, then: int) -> None:
        self.now, self.peak = then, max(self.peak, most)

    def read(self, _: object) -> dict[str, Any]:
        counts = {"all": {"current": self.now, "peak": self.peak}}
        return {"allocated_bytes": counts, "reserved_bytes": counts}

    def set_back(self) -> None:
        self.peak = self.now


def test_each_phase_has_its_own_peak_and_the_run_keeps_the_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    counter, watch = Counter(monkeypatch), GrowthWatch(gpu=False)
    watch._gpu, watch.capacity_bytes = True, 100
    phases = PhasePeaks(gpu=True, tell=watch.counter_was_read)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    phases.begin()
    counter.use(10, 10)
    phases.reached("end")
    for most in (30, 20):
        phases.reached("forward")
        counter.use(most, 25)
        phases.reached("backward")
        counter.use(most + 20, 15)
        phases.reached("end")
    counter.use(70, 15)  # between two phases: clipping
    weight.grad = torch.ones(1)
    optimizer.register_step_pre_hook(lambda *_: counter.use(40, 15))
    optimizer.step()
    phases.end()
    assert {name: peak for name, (peak, _) in phases.peaks.items()} == {
        "load": 10, "forward": 30, "backward": 50, "step": 40,
    }  # fmt: skip
    assert watch.sample(1).peak_bytes == 70
    counter.use(12, 12)
    assert watch.sample(2).peak_bytes == 15
    assert watch.peak_bytes == 70
    optimizer.step()
    assert phases.peaks["step"] == (40, 40)


def result_with(**changes: Any) -> TrainResult:
    usual: dict[str, Any] = {
        "steps": 2, "first_step": 0, "losses": {}, "seconds": 1.0, "tokens": 1, "data_wait_share": 0.0,
        "micro_batch_size": 1, "gradient_accumulation_steps": 1, "world_size": 1, "trained_parameters": 1,
        "parameters": 1, "gpu_peak_bytes": 3 * GiB, "gpu_reserved_bytes": 4 * GiB, "host_peak_bytes": GiB,
        "checkpoint": Path("step_2"),
    }  # fmt: skip
    return TrainResult(**{**usual, **changes})


def test_predicted_and_measured_stand_side_by_side() -> None:
    phases = beside({"load": (GiB, 2 * GiB), "step": (GiB, GiB)}, {"load": (GiB, 3 * GiB)})
    lines = result_with(phases=tuple(phases)).in_lines()
    assert "  load                   1.00 GiB    1.00 GiB              2.00 GiB    3.00 GiB" in lines
    assert not any(line.startswith("  step") for line in lines)


def test_where_a_single_row_is_too_much_the_error_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reached(self: MemfitTrainer, *_: Any) -> None:
        if self.args.use_cpu:  # in the run, not in its plan
            raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(MemfitTrainer, "reached", reached)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(document(tmp_path)))
    assert main(["train", "--config", str(tmp_path / "tiny.yaml")]) == 1
    captured = capsys.readouterr()
    assert "error: memory ran out with a single row at a time" in captured.err
    assert "The GPU was full: 1.16 GiB was asked for and 1.10 GiB was free" in captured.err
    assert "micro_batch_size 1 instead of 2" in captured.err
