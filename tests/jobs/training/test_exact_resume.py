"""A run that was broken off goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path

from tiny_run import run, same


def test_a_resumed_run_has_the_losses_and_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    whole, _ = run(tmp_path, output_dir=str(tmp_path / "whole"))
    again, events = run(tmp_path, output_dir=str(tmp_path / "again"), resume_from=str(tmp_path / "whole" / "step_2"))
    assert again.first_step == 2
    assert again.losses == whole.losses
    assert same(tmp_path / "whole" / "step_4", tmp_path / "again" / "step_4")
    assert [event.step for event in events if event.kind == "step"] == [3, 4]
