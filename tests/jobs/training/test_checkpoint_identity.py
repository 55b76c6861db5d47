"""Whether a checkpoint is of this very run: each of the things that may differ is told, and by its name alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tiny_run import tiny_job

from memfit.errors import InputError
from memfit.jobs.training import checkpoints
from memfit.jobs.training.checkpoints import begin, check_checkpoint, finish, keep_last, make_room, write_identity


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    write_identity(folder, tiny_job(folder))
    return folder


def test_the_same_job_goes_on_without_a_word(saved: Path) -> None:
    assert check_checkpoint(saved, tiny_job(saved)) == ()


@pytest.mark.parametrize(("key", "changes"), [
    ("precision", {"precision": "bf16"}), ("global_batch_size", {"global_batch_size": 8}), ("seed", {"seed": 7}),
    ("shuffle", {"data.shuffle": False}), ("max_seq_len", {"max_seq_len": 16}), ("data", {}),
])  # fmt: skip
def test_each_of_six_settings_that_was_changed_is_told(
    saved: Path, tmp_path: Path, key: str, changes: dict[str, Any]
) -> None:
    if key == "data":
        (tmp_path / "other.txt").write_text("another play altogether. " * 200)
        changes = {"data.source": str(tmp_path / "other.txt")}
    (note,) = check_checkpoint(saved, tiny_job(saved, **changes))
    told = note.removeprefix("resumed with another ").partition(":")[0].split(", ")
    assert key in told
    assert set(told) <= {key, "data"}, "rows of another length are other data too"


@pytest.mark.parametrize("changes", [{"optimizer": "sgd"}, {"method": "lora"}])
def test_another_optimizer_or_method_does_not_go_on(saved: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"was trained with (optimizer|method) .*, and this config says"):
        check_checkpoint(saved, tiny_job(saved, **changes))


# -- on the disk -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        sync(descriptor)
        done.append(f"sync {Path(os.path.realpath(f'/proc/self/fd/{descriptor}')).relative_to(tmp_path)}")

    def renamed(source: Any, target: Any, **more: Any) -> None:
        rename(source, target, **more)
        done.append(f"rename {Path(source).name} {Path(target).name}")

    beside = begin(tmp_path, 4)
    (beside / "inner").mkdir()
    for name in ("model.safetensors", "inner/state"):
        (beside / name).write_text("x")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    assert finish(beside) == tmp_path / "step_4"
    at = done.index("rename step_4.writing step_4")
    assert set(done[:at]) == {
        "sync step_4.writing", "sync step_4.writing/inner", "sync step_4.writing/inner/state",
        "sync step_4.writing/model.safetensors",
    }  # fmt: skip
    assert done[at + 1 :] == ["sync ."]


def checkpoint(folder: Path, step: int) -> None:
    (folder / f"step_{step}").mkdir()
    (folder / f"step_{step}" / checkpoints.STATE).write_text("{}")


def steps(folder: Path) -> list[int]:
    return [checkpoints.step_of(each) or 0 for each in checkpoints.find_checkpoints(folder)]


@pytest.mark.parametrize(("count", "left"), [(1, [6]), (2, [6]), (3, [4, 6])])
def test_to_make_room_those_go_that_would_go_anyway_but_never_the_last(
    tmp_path: Path, count: int, left: list[int]
) -> None:
    for step in (2, 4, 6):
        checkpoint(tmp_path, step)
    make_room(tmp_path, count, newest=6)
    assert steps(tmp_path) == left
    keep_last(tmp_path, 1, newest=6)
    assert steps(tmp_path) == [6]


def test_a_checkpoint_that_is_being_deleted_has_no_name_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (2, 4):
        checkpoint(tmp_path, step)
    going: list[str] = []
    monkeypatch.setattr(checkpoints.shutil, "rmtree", lambda path, **_: going.append(Path(path).name))
    keep_last(tmp_path, 1, newest=4)
    assert set(going) == {"step_2.deleting"}
    assert steps(tmp_path) == [4]
