"""`memfit train`: what it shows, what it writes, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from training_folder import TINY_GSA, text_file

from memfit.cli.main import main
from memfit.jobs.training.events import TrainEvent
from memfit.jobs.training.out_of_memory import RanOut
from memfit.jobs.training.preparation import TrainJob


@pytest.fixture
def config(tmp_path: Path) -> str:
    document = {
        "model": {"name": "gsa", "tokenizer": "bytes", "settings": TINY_GSA}, "data": {"source": text_file(tmp_path)},
        "max_seq_len": 64, "max_steps": 2, "precision": "fp32", "output_dir": str(tmp_path / "out"),
    }  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(document))
    return str(tmp_path / "tiny.yaml")


@pytest.fixture(autouse=True)
def no_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.cli.train.PLANNER", "memfit.planning.not_there")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for the engine: two steps, then a result."""
    seen = SimpleNamespace(jobs=[], fails=None)

    def train(job: TrainJob, *, on_event: Callable[[TrainEvent], None], plan: Any = None) -> Any:
        seen.jobs.append(job)
        print("a library that prints")
        for step in (1, 2):
            on_event(TrainEvent(kind="step", step=step, total_steps=2, loss=3.0 / step))
        on_event(TrainEvent(kind="checkpoint", step=2, text="out/step_2"))
        if seen.fails is not None:
            raise seen.fails
        return SimpleNamespace(to_json=lambda: {"loss": 1.5}, in_lines=lambda: ["trained 2 steps"])

    monkeypatch.setitem(sys.modules, "memfit.jobs.training.runner", SimpleNamespace(train=train))
    return seen


def test_a_dry_run_shows_the_job_and_trains_nothing(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config", config, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "model: gsa, from scratch, full, fp32" in shown
    assert "batch: 1 row x 1 accumulation x 1 process = 1" in shown
    assert not (tmp_path / "out").exists()


def test_as_json_there_is_one_document_on_stdout(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", config, "--dry-run", "--json", "--set", "seed=7"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert (document["schema"], document["trained"], document["job"]["config"]["seed"]) == ("memfit.train/1", False, 7)
    assert "model: gsa" in captured.err


def test_a_run_leaves_its_log_and_its_config(
    config: str, tmp_path: Path, runner: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config", config, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["result"] == {"loss": 1.5}
    assert "step 2/2, loss 1.5000" in captured.err
    log = (tmp_path / "out" / "train.log").read_text()
    assert "step 1/2, loss 3.0000" in log
    assert "checkpoint: step 2, out/step_2" in log
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["data"]["max_seq_len"] == 64


def test_the_flags_of_the_guide_are_taken(config: str, tmp_path: Path, runner: SimpleNamespace) -> None:
    other = tmp_path / "it's elsewhere: here"
    assert main(["train", "--config", config, "--output_dir", str(other)]) == 0
    assert runner.jobs[0].output_dir == other
    assert main(["train", "--config", config, "--output_dir", str(other), "--resume_from", str(other / "step_5")]) == 2


def test_a_job_that_ran_out_of_memory_ends_with_1(
    config: str, tmp_path: Path, runner: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.fails = RanOut("one row is too much", hint="a shorter max_seq_len")
    assert main(["train", "--config", config]) == 1
    assert "error: one row is too much" in capsys.readouterr().err
    assert "one row is too much" in (tmp_path / "out" / "train.log").read_text()


def plan_of(verdict: str) -> SimpleNamespace:
    def plan_training(job: TrainJob) -> SimpleNamespace:
        return SimpleNamespace(
            job=job.with_micro_batch(1), verdict=verdict, in_lines=lambda: ["plan: 3 GiB"], to_json=lambda: {"peak": 3}
        )

    return SimpleNamespace(plan_training=plan_training, __spec__=SimpleNamespace())


def test_the_plan_comes_first_and_may_choose_the_micro_batch(
    config: str, monkeypatch: pytest.MonkeyPatch, runner: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("memfit.cli.train.PLANNER", "a_planner")
    monkeypatch.setitem(sys.modules, "a_planner", plan_of("safe"))
    assert main(["train", "--config", config, "--set", "micro_batch_size=4"]) == 0
    assert "plan: 3 GiB" in capsys.readouterr().out
    assert runner.jobs[0].batch.gradient_accumulation_steps == 4


def test_what_does_not_fit_is_not_started_unless_forced(
    config: str, monkeypatch: pytest.MonkeyPatch, runner: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("memfit.cli.train.PLANNER", "a_planner")
    monkeypatch.setitem(sys.modules, "a_planner", plan_of("fails"))
    assert main(["train", "--config", config, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["plan"] == {"peak": 3}
    assert runner.jobs == []
    assert main(["train", "--config", config, "--force"]) == 0


def test_of_many_processes_only_the_first_speaks(
    config: str, monkeypatch: pytest.MonkeyPatch, runner: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("memfit.cli.train.PATIENCE_SECONDS", 0.0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--config", config]) == 0
    assert main(["train", "--config", config, "--set", "rnak=3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error" not in captured.err


def test_allocator_settings_are_in_place_before_cuda_starts(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = "--set=memory.alloc_conf='expandable_segments:True'"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    assert main(["train", "--config", config, "--dry-run", wanted]) == 0
    assert "max_split_size_mb:128 is exported and wins" in capsys.readouterr().out
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert main(["train", "--config", config, "--dry-run", wanted]) == 0
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(("arguments", "said"), [
    (["--config", "gsa-512n"], "no config called 'gsa-512n'"), (["--config", "x.yaml"], "no config file 'x.yaml'"),
    (["--config", "gsa-512m", "--set", "rnak=3"], "unknown key 'rnak'"), ([], "missing option '--config'"),
    (["--config", "gsa-512m", "--output-dir", " "], "is not the name of a folder"),
])  # fmt: skip
def test_wrong_usage_ends_with_2_and_one_error(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err


def test_a_world_size_that_does_not_divide_is_found_under_torchrun_s_variables(config: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "train", "--config", config, "--set", "global_batch_size=8"],
        env={**os.environ, "WORLD_SIZE": "3", "RANK": "0"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: global_batch_size 8 cannot be shared equally by 3 processes")
