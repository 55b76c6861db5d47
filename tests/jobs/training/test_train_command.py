"""`memfit train`: what it shows, what it writes, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from support.warm_python import warm_python
from training_folder import TINY_GSA, text_file

import memfit
from memfit.cli.main import main
from memfit.jobs.training.job import prepare_job


@pytest.fixture
def config(tmp_path: Path) -> str:
    document = {
        "model": {"name": "gsa", "tokenizer": "bytes", "settings": TINY_GSA}, "data": {"source": text_file(tmp_path)},
        "max_seq_len": 64, "max_steps": 2, "precision": "fp32", "output_dir": str(tmp_path / "out"), "device": "cpu",
    }  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(document))
    return str(tmp_path / "tiny.yaml")


@pytest.fixture(autouse=True)
def no_allocator_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


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


def test_a_dry_run_for_a_known_card_tells_how_long_it_would_take(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config", config, "--dry-run", "--json", "--set", "memory.gpu=H200"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["duration"]["steps"] == 2
    assert "s) for 2 steps; about" in captured.err and "time: estimated, by counted operations" in captured.err
    assert main(["train", "--config", config, "--dry-run", "--set", "memory.gpu=24GB"]) == 0
    assert "no time is told: a size has no speed, and" in capsys.readouterr().out


def test_a_run_leaves_its_log_and_its_config(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", config, "--json", "--set", "logging_steps=1"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    first, last = (document["result"]["losses"][step] for step in ("1", "2"))
    assert document["trained"] and first > last
    assert f"step 2/2, loss {last:.4f}" in captured.err
    log = (tmp_path / "out" / "train.log").read_text()
    assert f"step 1/2, loss {first:.4f}" in log
    assert f"checkpoint: step 2/2, {tmp_path / 'out' / 'step_2'}" in log
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["data"]["max_seq_len"] == 64


def test_in_python_it_is_the_same_run_and_the_same_document(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    events: list[str] = []
    listener = memfit.Listener(say=said.append, progress=lambda event: events.append(event.kind))

    trained = memfit.train(config, output_dir=str(tmp_path / "one"), listener=listener)

    assert main(["train", "--config", config, "--output-dir", str(tmp_path / "two"), "--json"]) == 0
    ours, theirs = json.loads(json.dumps(trained.to_json())), json.loads(capsys.readouterr().out)
    assert trained.fits and trained.result is not None and events[-1] == "end"
    assert [list(each) for each in (ours, ours["result"])] == [list(each) for each in (theirs, theirs["result"])]
    assert ours["result"]["losses"] == theirs["result"]["losses"]
    assert ours["job"]["batch"] == theirs["job"]["batch"] and ours["plan"]["budget"] == theirs["plan"]["budget"]
    assert str(trained).splitlines()[: len(said)] == said and str(trained).splitlines()[-1].startswith("checkpoint: ")
    assert repr(trained).startswith("<Trained: tiny, gsa: 2 steps, loss: ")


def test_in_python_a_config_may_be_a_dict_and_a_dry_run_trains_nothing(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = yaml.safe_load(Path(config).read_text())

    planned = memfit.train(document, sets=["seed=7"], dry_run=True)

    assert planned.result is None and planned.job.config.seed == 7 and not (tmp_path / "out").exists()
    assert main(["train", "--config", config, "--dry-run", "--set", "seed=7"]) == 0
    assert capsys.readouterr().out == f"{planned}\n"
    assert repr(planned) == "<Trained: train, gsa: not trained>"


def test_in_python_what_does_not_fit_is_an_answer(config: str, tmp_path: Path) -> None:
    refused = memfit.train(config, sets=["memory.gpu=300MiB"])

    assert not refused.fits and refused.result is None and not (tmp_path / "out").exists()


def test_a_config_that_lies_in_the_runs_own_folder_is_not_rewritten(config: str, tmp_path: Path) -> None:
    mine = tmp_path / "out" / "config.yaml"
    mine.parent.mkdir()
    mine.write_text("# mine\n" + Path(config).read_text())
    assert main(["train", "--config", str(mine), "--set", "seed=7"]) == 0
    assert mine.read_text().startswith("# mine\n")
    assert yaml.safe_load((tmp_path / "out" / "config-resolved.yaml").read_text())["seed"] == 7


def test_the_flags_of_the_guide_are_taken(config: str, tmp_path: Path) -> None:
    other = tmp_path / "it's elsewhere: here"
    assert main(["train", "--config", config, "--output_dir", str(other)]) == 0
    assert (other / "step_2").is_dir()
    assert main(["train", "--config", config, "--output_dir", str(other), "--resume_from", str(other / "step_5")]) == 2


def test_the_plan_comes_first_and_may_choose_the_micro_batch(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ("--set", "global_batch_size=4", "--set", "micro_batch_size=1")
    assert main(["train", "--config", config, *rows, "--set", "memory.auto=true", "--set", "memory.gpu=H200"]) == 0
    said = capsys.readouterr().out
    assert said.index("plan: ") < said.index("trained 2 steps")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["micro_batch_size"], result["gradient_accumulation_steps"]) == (4, 1)


def test_what_does_not_fit_is_not_started_unless_forced(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["train", "--config", config, "--set", "memory.gpu=100MiB", "--json"]
    assert main(asked) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["trained"], document["plan"]["verdict"]) == (False, "fails")
    assert not (tmp_path / "out").exists()
    assert main([*asked, "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["trained"]


def test_of_many_processes_only_the_first_speaks(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("memfit.running.train.PATIENCE_SECONDS", 0.0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    two = ("--set", "global_batch_size=2")
    assert main(["train", "--config", config, *two, "--dry-run"]) == 0
    assert main(["train", "--config", config, *two, "--set", "rnak=3"]) == 2
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
    seen: list[str | None] = []

    def note_what_is_exported(*given: object, **named: object) -> object:
        seen.append(os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
        return prepare_job(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("memfit.jobs.training.job.prepare_job", note_what_is_exported)
    assert main(["train", "--config", config, "--dry-run", wanted]) == 0
    assert seen == ["expandable_segments:True"]
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ  # no CUDA was started with it: the next job is free to choose


@pytest.mark.parametrize(("arguments", "said"), [
    (["--config", "gsa-512n"], "no config called 'gsa-512n'"), (["--config", "x.yaml"], "no config file 'x.yaml'"),
    (["--config", "gsa-512m", "--set", "rnak=3"], "unknown key 'rnak'"), ([], "missing option '--config'"),
    (["--config", "gsa-512m", "--output-dir", " "], "is not the name of a folder"),
    (["--config", "gsa-512m", "--set", "data.source="], "data.source is empty: nothing says what to train on"),
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
        [warm_python(), "-m", "memfit", "train", "--config", config, "--set", "global_batch_size=8"],
        env={**os.environ, "WORLD_SIZE": "3", "RANK": "0"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: global_batch_size 8 cannot be shared equally by 3 processes")
