"""Memory runs out in the middle of a step: the step is run again, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import close, run, same

from memfit.errors import RanOut
from memfit.jobs.training.engine import MemfitTrainer

SHARES = {"global_batch_size": 8, "micro_batch_size": 4, "max_steps": 3}


def runs_out(monkeypatch: pytest.MonkeyPatch, when: Callable[[str, int, int, int], bool]) -> list[tuple[Any, ...]]:
    """Memory runs out where `when(phase, step, micro_step, rows at a time)` says so."""
    seen: list[tuple[Any, ...]] = []

    def reached(self: MemfitTrainer, phase: str, step: int, micro_step: int) -> None:
        rows = self.recovery.batch.micro_batch_size
        seen.append((phase, step, micro_step, rows))
        if when(phase, step, micro_step, rows):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated")

    monkeypatch.setattr(MemfitTrainer, "reached", reached)
    return seen


@pytest.mark.parametrize("phase", ["forward", "backward", "end"])
def test_an_oom_in_the_middle_of_accumulation_loses_and_repeats_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    whole, _ = run(tmp_path, output_dir=str(tmp_path / "whole"), **SHARES)
    runs_out(monkeypatch, lambda at, step, micro, rows: (at, step, micro, rows) == (phase, 2, 1, 4))
    again, events = run(tmp_path, output_dir=str(tmp_path / "again"), **SHARES)
    assert again.losses == pytest.approx(whole.losses, rel=1e-5)
    assert close(tmp_path / "whole" / "step_3", tmp_path / "again" / "step_3")
    assert (again.micro_batch_size, again.gradient_accumulation_steps) == (2, 4)
    said = [event for event in events if event.kind == "out-of-memory"]
    assert len(said) == 1
    assert "step 2: CUDA out of memory. Tried to allocate 2.00 GiB.; the step is run again" in said[0].text


def test_dropout_is_drawn_from_the_step_s_own_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an OOM at the very first micro-step, the run is the one that had the smaller size from the start."""
    lora = {"method": {"kind": "lora", "rank": 2, "dropout": 0.5}, **SHARES}
    small, _ = run(tmp_path, output_dir=str(tmp_path / "small"), **(lora | {"micro_batch_size": 2}))
    runs_out(monkeypatch, lambda at, step, micro, rows: (at, micro, rows) == ("end", 0, 4))
    again, _ = run(tmp_path, output_dir=str(tmp_path / "again"), **lora)
    assert again.losses == small.losses
    assert same(tmp_path / "small" / "step_3", tmp_path / "again" / "step_3")


def test_memory_may_run_out_inside_the_backward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = run(tmp_path, output_dir=str(tmp_path / "whole"), **SHARES)
    plain = MemfitTrainer.compute_loss

    def compute_loss(self: MemfitTrainer, *args: Any, **kwargs: Any) -> Any:
        weight = self.model.model.layers[0].mlp.up_proj.weight
        if self.recovery.batch.micro_batch_size == 4 and self._place == (2, 1):

            def out(_: torch.Tensor) -> None:
                handle.remove()
                raise torch.OutOfMemoryError("no room")

            handle = weight.register_hook(out)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(MemfitTrainer, "compute_loss", compute_loss)
    again, _ = run(tmp_path, output_dir=str(tmp_path / "again"), **SHARES)
    assert again.losses == pytest.approx(whole.losses, rel=1e-5)
    assert len(again.out_of_memory) == 1


def test_the_smaller_size_stays_after_a_resume_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = runs_out(monkeypatch, lambda at, step, micro, rows: rows == 4)
    first, _ = run(tmp_path, output_dir=str(tmp_path / "first"), **SHARES)
    assert first.micro_batch_size == 2
    seen.clear()
    again, _ = run(
        tmp_path, output_dir=str(tmp_path / "again"), resume_from=str(tmp_path / "first" / "step_2"), **SHARES
    )
    assert {rows for *_, rows in seen} == {2}
    assert again.losses == first.losses
    assert same(tmp_path / "first" / "step_3", tmp_path / "again" / "step_3")


def test_where_a_single_row_is_too_much_the_run_ends_and_its_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_out(monkeypatch, lambda at, step, micro, rows: step == 3)
    with pytest.raises(RanOut, match="memory ran out with a single row at a time, 32 tokens long: CUDA out of memory"):
        run(tmp_path, **SHARES)
    assert [each.name for each in (tmp_path / "out").glob("step_*")] == ["step_2"]


def test_without_recovery_the_first_oom_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_out(monkeypatch, lambda at, step, micro, rows: step == 2)
    with pytest.raises(RanOut, match="memory ran out: CUDA out of memory"):
        run(tmp_path, **SHARES, **{"memory.oom_recovery": False})


def test_another_error_is_no_oom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(self: MemfitTrainer, *_: Any) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(MemfitTrainer, "reached", reached)
    with pytest.raises(RuntimeError, match="shapes differ"):
        run(tmp_path, **SHARES)
