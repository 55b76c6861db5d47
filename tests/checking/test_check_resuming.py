"""A checkpoint that a real run wrote goes on; one of another run, or of which a file is missing or cut, is found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from check_jobs import document, only, situation

from memfit.checking import config
from memfit.checking.situation import Finding, guarded
from memfit.errors import InputError
from memfit.jobs.training.run import train


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of a LoRA run, with checkpoints after two and four."""
    folder = tmp_path_factory.mktemp("run")
    train(situation(folder, method="lora", **{"memory.probe": False}).job.get(), on_event=lambda event: None)
    return folder


@pytest.fixture
def copied(run_folder: Path, tmp_path: Path) -> Path:
    """Of the run, to be damaged."""
    shutil.copytree(run_folder / "out", tmp_path / "out")
    return tmp_path / "out"


def resumed(folder: Path, place: Path | str, **changes: Any) -> Finding:
    where = situation(folder, **{"method": "lora", "resume_from": str(place), **changes})
    (finding,) = guarded(config.RESUME, lambda: config.check_resume(where))
    return finding


def test_a_checkpoint_of_the_same_job_goes_on(run_folder: Path) -> None:
    finding = resumed(run_folder, run_folder / "out" / "step_2")
    assert (finding.status, finding.details["steps_done"], finding.details["total_steps"]) == ("ok", 2, 4)
    assert "to the host first" in finding.found


def test_a_run_that_has_ended_cannot_go_on_without_more_steps(run_folder: Path) -> None:
    assert "ends at step 4" in resumed(run_folder, "latest").found
    assert resumed(run_folder, "latest", max_steps=8).status == "ok"


def test_a_checkpoint_of_another_model_is_found(run_folder: Path) -> None:
    model = {**document(run_folder)["model"], "settings": {"hidden_size": 32}}
    finding = resumed(run_folder, run_folder / "out" / "step_2", model=model)
    assert (finding.status, "hidden_size 16 there and 32 here" in finding.found) == ("failed", True)


def test_a_checkpoint_of_another_rank_is_found(run_folder: Path) -> None:
    finding = resumed(run_folder, run_folder / "out" / "step_2", rank=4)
    assert (finding.status, "rank 16" in finding.found, "rank 4" in finding.found) == ("failed", True, True)


def test_data_that_begin_anew_are_said(run_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("another text. " * 300)
    finding = resumed(run_folder, run_folder / "out" / "step_2", **{"data.source": str(other)})
    assert (finding.status, "resumed with another data" in finding.found) == ("warning", True)


def test_another_number_of_processes_draws_other_random_numbers(run_folder: Path) -> None:
    where = situation(run_folder, world_size=2, method="lora", resume_from=str(run_folder / "out" / "step_2"))
    finding = only(config.check_resume, where)
    assert (finding.status, "random numbers of 1 process, and 2 processes" in finding.found) == ("warning", True)
    assert finding.next == "the very same run goes on with --nproc_per_node=1"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(("name", "damage", "said"), [
    ("optimizer.pt", Path.unlink, "it has no optimizer.pt: its state would begin anew"),
    ("optimizer.pt", cut, "optimizer.pt is cut off"), ("scheduler.pt", cut, "scheduler.pt is cut off"),
    ("rng_state.pth", cut, "rng_state.pth is cut off"), ("adapter_model.safetensors", cut, "was the file cut off"),
    ("adapter_model.safetensors", Path.unlink, "adapter_model.safetensors: No such file"),
    ("trainer_state.json", cut, "trainer_state.json"), ("memfit_progress.json", cut, "is damaged"),
])  # fmt: skip
def test_a_checkpoint_that_is_not_whole_is_found_and_the_whole_one_beside_it_named(
    run_folder: Path, copied: Path, name: str, damage: Callable[[Path], None], said: str
) -> None:
    damage(copied / "step_4" / name)
    finding = resumed(run_folder, copied / "step_4", max_steps=8)
    assert (finding.status, said in finding.found) == ("failed", True), finding.found
    assert finding.next == f"--resume_from {copied / 'step_2'}, which is whole"
    assert resumed(run_folder, copied / "step_2", max_steps=8).status == "ok"


def test_a_run_refuses_what_the_check_has_found(run_folder: Path, copied: Path) -> None:
    """Without its state the optimizer would begin anew, and nothing would say so."""
    (copied / "step_2" / "optimizer.pt").unlink()
    place = str(copied / "step_2")
    job = situation(run_folder, method="lora", resume_from=place, output_dir=str(copied.parent / "again")).job.get()
    with pytest.raises(InputError, match="it has no optimizer"):
        train(job, on_event=lambda event: None)


def test_lost_random_numbers_alone_do_not_stop_a_run(run_folder: Path, copied: Path) -> None:
    (copied / "step_2" / "rng_state.pth").unlink()
    finding = resumed(run_folder, copied / "step_2")
    assert (finding.status, "of no process" in finding.found) == ("warning", True)


def test_a_shard_of_the_whole_weights_that_was_cut_off_is_found(tmp_path: Path) -> None:
    job = situation(tmp_path, max_steps=2, save_steps=1, **{"memory.probe": False}).job.get()
    place = train(job, on_event=lambda event: None).checkpoint
    assert resumed(tmp_path, place, method="full", max_steps=4).status == "ok"
    cut(place / "model.safetensors")
    finding = resumed(tmp_path, place, method="full", max_steps=4)
    assert (finding.status, "is not whole" in finding.found) == ("failed", True)
    assert str(finding.next).endswith("step_1, which is whole")


def test_a_folder_that_holds_checkpoints_is_none_itself(run_folder: Path) -> None:
    finding = resumed(run_folder, run_folder / "out")
    assert (finding.status, finding.next) == ("failed", "it holds step_2, step_4: name one of them")
