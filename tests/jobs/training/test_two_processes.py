"""Two processes under torchrun are one run: same losses and weights, and no hanging when one of them fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from launched import SIZES, launch, losses
from tiny_run import LLAMA, close, run, same


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run of two processes."""
    folder = tmp_path_factory.mktemp("two")
    done = launch(folder, "both")
    assert done.returncode == 0, done.stderr
    return folder


def test_two_processes_are_one_at_the_same_global_batch(tmp_path: Path, both: Path) -> None:
    run(tmp_path, output_dir=str(tmp_path / "alone"), **SIZES)
    assert losses(both, "both") == pytest.approx(losses(tmp_path, "alone"), rel=1e-5)
    assert close(tmp_path / "alone" / "step_4", both / "both" / "step_4")


def test_an_oom_in_one_process_makes_all_of_them_smaller_and_changes_nothing_else(tmp_path: Path, both: Path) -> None:
    halved = launch(tmp_path, "halved", env={"MEMFIT_TEST_OOM": "1:2:2"})
    assert halved.returncode == 0, halved.stderr
    assert losses(tmp_path, "halved") == pytest.approx(losses(both, "both"), rel=1e-5)
    assert close(both / "both" / "step_4", tmp_path / "halved" / "step_4")
    result = json.loads((tmp_path / "halved" / "result.json").read_text())
    assert (result["micro_batch_size"], result["world_size"]) == (1, 2)
    assert "Tried to allocate 2.00 GiB" in (tmp_path / "halved" / "train.log").read_text()


def test_after_kill_9_of_one_of_two_processes_the_resumed_run_ends_with_the_same_weights(
    tmp_path: Path, both: Path
) -> None:
    killed = launch(tmp_path, "killed", env={"MEMFIT_TEST_KILL": "1:3"})
    assert killed.returncode != 0
    assert [each.name for each in (tmp_path / "killed").glob("step_*")] == ["step_2"]
    again = launch(tmp_path, "killed", resume=True)
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path, "killed") == losses(both, "both")
    assert same(both / "both" / "step_4", tmp_path / "killed" / "step_4")


def test_after_kill_9_of_the_run_the_resumed_one_ends_with_the_same_weights(tmp_path: Path) -> None:
    run(tmp_path, output_dir=str(tmp_path / "whole"), **SIZES)
    killed = launch(tmp_path, "killed", processes=1, env={"MEMFIT_TEST_KILL": "0:4"})
    assert killed.returncode == -9
    run(tmp_path, output_dir=str(tmp_path / "killed"), resume_from="latest", **SIZES)
    assert losses(tmp_path, "killed") == losses(tmp_path, "whole")
    assert same(tmp_path / "whole" / "step_4", tmp_path / "killed" / "step_4")


@pytest.mark.slow
def test_sharded_over_two_processes_the_run_is_the_same_and_resumes_exactly(tmp_path: Path, both: Path) -> None:
    shard = {"MEMFIT_TEST_SHARD": "1"}
    whole = launch(tmp_path, "whole", env=shard, parallel="fsdp2")
    assert whole.returncode == 0, whole.stderr
    assert losses(tmp_path, "whole") == pytest.approx(losses(both, "both"), rel=1e-5)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "step_4")
    again = launch(tmp_path, "again", env=shard, parallel="fsdp2", resume=True)
    assert again.returncode == 0, again.stderr
    assert same(tmp_path / "whole" / "step_4", tmp_path / "again" / "step_4")


def test_processes_that_keep_weights_on_the_host_train_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LLAMA, "num_hidden_layers", 3)
    levers = {
        "method": {"kind": "lora", "rank": 2}, "memory.gradient_checkpointing": "full",
        "memory.offload": ["optimizer", "activations", "weights"], "max_steps": 2,
    }  # fmt: skip
    run(tmp_path, output_dir=str(tmp_path / "alone"), **(SIZES | levers | {"memory.offload": []}))
    done = launch(tmp_path, "both", **levers)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path, "both") == pytest.approx(losses(tmp_path, "alone"), rel=1e-5)
    assert close(tmp_path / "alone" / "step_2", tmp_path / "both" / "step_2")
