"""What a training run writes beside its checkpoints: the memory log, TensorBoard's events; and how it says that memory
ran out where a smaller micro-batch would not help."""

from __future__ import annotations

import csv
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import run

from memfit.errors import InputError, RanOut, UsageError
from memfit.jobs.training.config_file import config_from
from memfit.jobs.training.result import in_a_line, ran_out
from memfit.recording.memory_log import CSV_HEADER

SHORT = {"max_steps": 4, "logging_steps": 2}


def rows_of(path: Path) -> list[dict[str, str]]:
    text = path.read_text()
    assert text.startswith(f"{CSV_HEADER}\n")
    return list(csv.DictReader(text.splitlines()))


# -- the memory log ----------------------------------------------------------------------------------------------------


def test_the_memory_log_has_a_row_at_every_logging_step(tmp_path: Path) -> None:
    run(tmp_path, **SHORT, **{"logging.memory_log": True})

    rows = rows_of(tmp_path / "out" / "memory_log.csv")

    names = [row["Checkpoint"] for row in rows]
    assert names == ["01_start", "02_model_built", "03_model_loaded", "step_2", "step_4", "end"]
    assert all(float(row["CPU_Used_GB"]) > 0.01 for row in rows)
    assert {row["GPU_Allocated_GB"] for row in rows} == {""}  # no GPU: unknown, not 0


def test_the_memory_log_goes_where_it_is_told(tmp_path: Path) -> None:
    place = tmp_path / "logs" / "memory.csv"
    run(tmp_path, **SHORT, **{"logging.memory_log": str(place)})

    assert rows_of(place)[-1]["Checkpoint"] == "end"
    assert not (tmp_path / "out" / "memory_log.csv").exists()


def test_nobody_gets_a_memory_log_who_did_not_ask(tmp_path: Path) -> None:
    run(tmp_path, **SHORT)

    assert not list((tmp_path / "out").glob("memory_log*"))


def test_a_run_that_goes_on_goes_on_with_its_memory_log(tmp_path: Path) -> None:
    settings = {"logging_steps": 2, "logging.memory_log": True}
    run(tmp_path, max_steps=4, **settings)
    run(tmp_path, max_steps=6, resume_from=str(tmp_path / "out" / "step_4"), **settings)

    names = [row["Checkpoint"] for row in rows_of(tmp_path / "out" / "memory_log.csv")]
    assert [name for name in names if name.startswith("step")] == ["step_2", "step_4", "step_6"]
    assert names.count("01_start") == 2


def test_another_file_is_not_written_over(tmp_path: Path) -> None:
    place = tmp_path / "notes.csv"
    place.write_text("mine\n")

    with pytest.raises(InputError, match="is not a memory log"):
        run(tmp_path, **SHORT, **{"logging.memory_log": str(place)})
    assert place.read_text() == "mine\n"


@pytest.mark.parametrize("value", [3, "", " "])
def test_what_is_no_path_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"logging\.memory_log"):
        config_from({"model": "gpt2", "data.source": "builtin", "logging": {"memory_log": value}})


def test_the_report_of_a_run_s_folder_reads_its_memory_log(tmp_path: Path) -> None:
    from memfit.analysis.report import report_file

    run(tmp_path, **SHORT, **{"logging.memory_log": True})

    assert report_file(tmp_path / "out") is not None


# -- TensorBoard -------------------------------------------------------------------------------------------------------


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """By tag and step. An event file is a row of records: length, checksum, message, checksum."""
    from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]

    found: dict[str, dict[int, float]] = {}
    for file in folder.glob("events.out.*"):
        for message in _records(file.read_bytes()):
            event = Event.FromString(message)
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def _records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + length]
        at += length + 16


def test_tensorboard_gets_the_losses_of_the_run_each_in_its_own_folder(tmp_path: Path) -> None:
    one, _ = run(tmp_path, **SHORT, output_dir=str(tmp_path / "one"), **{"logging.tensorboard": True})
    two, _ = run(tmp_path, **SHORT, output_dir=str(tmp_path / "two"), seed=7, **{"logging.tensorboard": True})

    for result, name in ((one, "one"), (two, "two")):
        seen = scalars(tmp_path / name / "tensorboard")
        expected = {step: (result.losses[step - 1] + result.losses[step]) / 2 for step in (2, 4)}
        assert seen["train/loss"] == pytest.approx(expected, rel=1e-3)
        assert sorted(seen["train/learning_rate"]) == [2, 4]


def test_no_tensorboard_where_it_is_switched_off(tmp_path: Path) -> None:
    run(tmp_path, **SHORT, **{"logging.tensorboard": False})

    assert not (tmp_path / "out" / "tensorboard").exists()


# -- memory that runs out elsewhere ------------------------------------------------------------------------------------


def no_room(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[[int], bool]) -> None:
    """Memory runs out in the so-many-eth call."""
    plain, calls = getattr(owner, name), []

    def out_of_memory(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if when(len(calls)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated")
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, out_of_memory)


def test_memory_that_runs_out_in_the_optimizer_s_step_ends_the_run_and_leaves_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room(monkeypatch, torch.optim.AdamW, "step", lambda call: call == 3)

    with pytest.raises(RanOut, match=r"in the optimizer's step \(it keeps .* beside the weights\): CUDA") as found:
        run(tmp_path, **{**SHORT, "save_steps": 2, "logging.memory_log": True})

    assert "memory.offload: [optimizer]" in str(found.value.hint)
    assert "a smaller micro_batch_size would not help" in str(found.value.hint)
    assert [each.name for each in (tmp_path / "out").glob("step_*")] == ["step_2"]
    assert (tmp_path / "out" / "step_2" / "optimizer.pt").is_file()
    assert rows_of(tmp_path / "out" / "memory_log.csv")[-1]["Checkpoint"] == "out_of_memory ERROR!"


def test_the_probe_finds_it_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_room(monkeypatch, torch.optim.AdamW, "step", lambda call: call == 1)

    with pytest.raises(RanOut, match=r"in the optimizer's step of the probe, before the run began"):
        run(tmp_path, **SHORT, **{"memory.probe": True})
    assert not list((tmp_path / "out").glob("step_*"))


def test_memory_that_runs_out_while_the_model_is_put_in_its_place_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memfit.jobs.training import run as runner

    no_room(monkeypatch, runner, "build_for_training", lambda call: True)

    with pytest.raises(RanOut, match="before the first step, while the model was put in its place"):
        run(tmp_path, **SHORT)


def test_memory_that_runs_out_while_a_checkpoint_is_written_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memfit.jobs.training.engine import MemfitTrainer

    no_room(monkeypatch, MemfitTrainer, "_save_checkpoint", lambda call: call == 2)

    with pytest.raises(RanOut, match="between two steps, while a checkpoint was written"):
        run(tmp_path, **SHORT)
    assert [each.name for each in (tmp_path / "out").glob("step_*")] == ["step_2"]


@pytest.mark.parametrize(("settings", "advised", "not_advised"), [
    ({"optimizer": "adamw"}, "adamw-fused", "[weights]"), ({"optimizer": "adamw-fused"}, "method: lora", "adamw-fused"),
    ({"method": {"kind": "lora", "rank": 2}}, "[optimizer]", "method: lora"),
    ({"memory.offload": ["optimizer"], "optimizer": "adamw"}, "method: lora", "[optimizer]"),
])  # fmt: skip
def test_only_what_can_help_is_advised(settings: dict[str, Any], advised: str, not_advised: str) -> None:
    config = config_from({"model": "gpt2", "data.source": "builtin", **settings})

    hint = str(ran_out("optimizer", "no room", config, trained_bytes=1, probing=False).hint)

    assert advised in hint
    assert not_advised not in hint


def test_the_losses_that_are_told_are_means_of_several_steps(tmp_path: Path) -> None:
    result, _ = run(tmp_path, max_steps=8, logging_steps=8, save_steps=8)

    one_by_one = [result.losses[step] for step in range(1, 9)]
    assert result.first_loss == pytest.approx(sum(one_by_one[:2]) / 2)
    assert result.final_loss == pytest.approx(sum(one_by_one[-2:]) / 2)
    assert f"loss: {result.first_loss:.4f} at first, {result.final_loss:.4f} at the end" in result.in_lines()


def test_every_logged_step_but_the_first_says_how_much_time_is_left(tmp_path: Path) -> None:
    _, events = run(tmp_path, max_steps=4)
    first, *later, last = [event for event in events if event.kind == "step"]
    assert first.seconds_left is None
    assert all(event.seconds_left is not None and event.seconds_left > 0 for event in later)
    assert last.seconds_left == 0
    assert re.search(r"s a step, [\d.]+ s left", in_a_line(later[0]))


def test_a_folder_that_a_live_run_writes_to_is_not_taken_for_an_earlier_run_s(tmp_path: Path) -> None:
    from memfit.errors import InputError
    from memfit.jobs.training.job import check_output
    from memfit.jobs.training.result import RunLog

    alive = RunLog(tmp_path)
    with pytest.raises(InputError, match="another run is writing"):
        check_output(tmp_path, resume_from=None)
    alive.close()
    check_output(tmp_path, resume_from=None)
