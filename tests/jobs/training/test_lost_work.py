"""A full disk, Ctrl-C, kill -9 and two runs in one folder: what was trained is not lost."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.warm_python import warm_python
from tiny_run import document, run, same, tiny_job

from memfit.errors import InputError
from memfit.jobs.training import checkpoints as checkpointing
from memfit.jobs.training.checkpoints import CannotSave, why_not_written


def config(folder: Path, **changes: object) -> str:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(document(folder, **changes)))
    return str(path)


def started(config: str, *, limits: str = "pass") -> subprocess.Popen[str]:
    code = f"{limits}; from memfit.cli.main import run; run()"
    command = [warm_python(), "-c", code, "train", "--config", config]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir() if each.name.startswith((".", "step_", "checkpoint"))}


# -- a full disk -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB: a checkpoint of the tiny model takes a fifth of it."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    except FileNotFoundError:
        pytest.skip("no mount here")
    if made.returncode != 0:
        pytest.skip("only root may mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def filled(place: Path, *, leaving: int) -> None:
    (place / "filler").write_bytes(bytes(max(0, shutil.disk_usage(place).free - leaving)))


def test_a_full_disk_ends_the_run_with_the_step_to_go_on_from(small_disk: Path, tmp_path: Path) -> None:
    out = small_disk / "out"
    kept = {"output_dir": str(out), "save_total_limit": 9, "max_steps": 8, "lr_scheduler": "constant"}
    run(tmp_path, **(kept | {"max_steps": 2}))
    filled(small_disk, leaving=60_000)
    done = started(config(tmp_path, **kept, resume_from="latest"))
    _, said = done.communicate(timeout=300)
    assert done.returncode == 2
    assert "error: the checkpoint of step 4 could not be written: No space left on device" in said
    assert f"the checkpoint of step 2 is whole: make room, and go on with --resume_from {out / 'step_2'}" in said
    assert "Traceback" not in said and "bug" not in said
    assert names(out) == {"step_2"}
    (small_disk / "filler").unlink()
    again, _ = run(tmp_path, **(kept | {"max_steps": 4}), resume_from="latest")
    whole, _ = run(tmp_path, output_dir=str(tmp_path / "whole"), lr_scheduler="constant")
    assert again.losses == whole.losses


def test_older_checkpoints_make_room_for_the_new_one_where_they_would_go_anyway(
    small_disk: Path, tmp_path: Path
) -> None:
    settings = {"output_dir": str(small_disk / "out"), "save_total_limit": 2, "save_steps": 1}
    run(tmp_path, **settings, max_steps=2)
    filled(small_disk, leaving=60_000)
    result, events = run(tmp_path, **settings, max_steps=3, resume_from="latest")
    assert names(small_disk / "out") == {"step_2", "step_3"}
    assert result.steps == 3
    said = next(each.text for each in events if each.kind == "note")
    assert said.startswith("no room for step 3 (No space left on device): step_1 went")


def test_a_disk_without_room_for_the_first_checkpoint_says_so(small_disk: Path, tmp_path: Path) -> None:
    (small_disk / "out").mkdir()
    filled(small_disk, leaving=40_000)
    with pytest.raises(CannotSave, match="the checkpoint of step 2 could not be written: No space left") as found:
        run(tmp_path, output_dir=str(small_disk / "out"))
    assert found.value.hint == "no checkpoint had been written before it: make room, and start again"
    assert names(small_disk / "out") == set()


def test_a_limit_on_files_is_told_in_the_system_s_words(tmp_path: Path) -> None:
    limits = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, 8_000))"
    done = started(config(tmp_path), limits=limits)
    _, said = done.communicate(timeout=300)
    assert done.returncode == 2
    assert "error: the checkpoint of step 2 could not be written: File too large" in said
    assert names(tmp_path / "out") == set()


def test_torch_s_own_words_for_a_full_disk_are_understood(small_disk: Path) -> None:
    import torch

    filled(small_disk, leaving=20_000)
    with pytest.raises(RuntimeError) as found:
        torch.save({"a": torch.zeros(100_000)}, small_disk / "a.pt")
    assert why_not_written(found.value, small_disk) == "No space left on device"
    assert why_not_written(RuntimeError("a bug"), small_disk) is None


def test_a_log_that_cannot_be_written_does_not_end_a_run(small_disk: Path, tmp_path: Path) -> None:
    out = small_disk / "out"
    out.mkdir()
    filled(small_disk, leaving=0)
    done = started(config(tmp_path, output_dir=str(out), save_steps=None, max_steps=1))
    _, said = done.communicate(timeout=300)
    assert done.returncode == 2 and "Traceback" not in said
    assert "config.yaml' cannot be written: No space left on device" in said


# -- Ctrl-C and kill ---------------------------------------------------------------------------------------------------


def wait_for(process: subprocess.Popen[str], word: str) -> list[str]:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if word in line:
            return seen
    raise AssertionError("".join(seen))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_stop_saves_the_step_it_is_in(tmp_path: Path, number: signal.Signals) -> None:
    asked = started(config(tmp_path, max_steps=5000, save_steps=None, lr_scheduler="constant"))
    wait_for(asked, "step 3/5000")
    asked.send_signal(number)
    _, said = asked.communicate(timeout=300)
    assert asked.returncode == 130
    (saved,) = names(tmp_path / "out")
    step = int(saved.removeprefix("step_"))
    assert (
        f"stopped after step {step} of 5,000, which is saved: --resume_from {tmp_path / 'out' / saved} goes on" in said
    )
    whole, _ = run(tmp_path, output_dir=str(tmp_path / "whole"), max_steps=step + 1, lr_scheduler="constant")
    again, _ = run(tmp_path, max_steps=step + 1, lr_scheduler="constant", resume_from="latest")
    assert again.losses == whole.losses
    assert same(tmp_path / "whole" / f"step_{step + 1}", tmp_path / "out" / f"step_{step + 1}")


def test_what_a_killed_run_was_writing_is_gone_when_it_goes_on(tmp_path: Path) -> None:
    killed = started(config(tmp_path, max_steps=5000, save_steps=2))
    wait_for(killed, "step_2")
    killed.kill()
    killed.communicate(timeout=300)
    (tmp_path / "out" / "step_9999.writing").mkdir()
    last = max(int(each.name.removeprefix("step_")) for each in checkpointing.find_checkpoints(tmp_path / "out"))
    result, _ = run(tmp_path, max_steps=last + 1, save_steps=None, resume_from="latest")
    assert result.first_step == last
    assert not [each for each in names(tmp_path / "out") if each.endswith(".writing")]


# -- two runs in one folder --------------------------------------------------------------------------------------------


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    first = started(config(tmp_path, max_steps=5000, save_steps=None))
    wait_for(first, "step 1/5000")
    second = started(config(tmp_path))
    _, said = second.communicate(timeout=300)
    first.kill()
    first.communicate()
    assert second.returncode == 2
    assert f"error: another run is writing to output_dir '{tmp_path / 'out'}'" in said
    third = started(config(tmp_path))
    third.communicate(timeout=300)
    assert third.returncode == 0


def test_a_run_that_goes_back_is_not_counted_behind_the_steps_it_gave_up(tmp_path: Path) -> None:
    run(tmp_path, save_steps=1, save_total_limit=4)
    with pytest.raises(InputError, match="holds later checkpoints than step_1, up to step_4") as found:
        tiny_job(tmp_path, resume_from=str(tmp_path / "out" / "step_1"))
    assert "another --output_dir, or move them away" in str(found.value.hint)
    (tmp_path / "out" / "step_4" / "optimizer.pt").unlink()
    shutil.rmtree(tmp_path / "out" / "step_3")
    run(tmp_path, save_total_limit=2, max_steps=3, resume_from=str(tmp_path / "out" / "step_2"))
    assert names(tmp_path / "out") == {"step_2", "step_3"}


def test_the_folder_of_another_run_is_not_continued_into(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, output_dir=str(tmp_path / "other"))
    with pytest.raises(InputError, match="holds checkpoints of another run than"):
        tiny_job(tmp_path, output_dir=str(tmp_path / "other"), resume_from=str(tmp_path / "out" / "step_2"))


def test_a_folder_of_another_program_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out" / "step_2").mkdir(parents=True)
    (tmp_path / "out" / "step_2" / "model.pt").write_text("months of work")
    run(tmp_path)
    assert (tmp_path / "out" / "step_2.other-program" / "model.pt").read_text() == "months of work"
    assert json.loads((tmp_path / "out" / "step_2" / "trainer_state.json").read_text())["global_step"] == 2


@pytest.mark.parametrize(
    "said",
    [
        "Error while serializing: I/O error: No space left on device (os error 28)",
        'Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })',
    ],
)
def test_a_full_disk_is_understood_in_the_words_of_every_safetensors(said: str, tmp_path: Path) -> None:
    error = type("SafetensorError", (Exception,), {})(said)
    assert why_not_written(error, tmp_path) == "No space left on device"


def test_a_resumed_run_has_the_losses_and_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    whole, _ = run(tmp_path, output_dir=str(tmp_path / "whole"))
    again, events = run(tmp_path, output_dir=str(tmp_path / "again"), resume_from=str(tmp_path / "whole" / "step_2"))
    assert again.first_step == 2
    assert again.losses == whole.losses
    assert same(tmp_path / "whole" / "step_4", tmp_path / "again" / "step_4")
    assert [event.step for event in events if event.kind == "step"] == [3, 4]
