"""The callbacks in a real Hugging Face Trainer, on the CPU."""

from __future__ import annotations

import csv
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import memfit
from memfit.recording.growth import MemoryGrowth, trainer_growth

KEPT_BYTES = 4 << 20


class Keeping(torch.nn.Module):
    """A model that forgets nothing: what it is given at each step stays, four MiB at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        fresh = mmap.mmap(-1, KEPT_BYTES)  # of the system: an allocator might give what another test has freed
        self.kept.append(torch.frombuffer(fresh, dtype=torch.uint8).fill_(1))
        return {"loss": (self.weight * x).sum()}


def train(folder: Path, callback: object, **settings: Any) -> None:
    arguments = TrainingArguments(
        str(folder / "out"), per_device_train_batch_size=1, report_to=[], use_cpu=True, disable_tqdm=True, **settings
    )
    rows = [{"x": torch.ones(4)} for _ in range(8)]
    Trainer(Keeping(), arguments, train_dataset=rows, eval_dataset=rows[:1], callbacks=[callback]).train()


def test_a_trainer_s_memory_log_has_the_first_steps_then_every_so_many_and_what_lies_around_them(
    tmp_path: Path,
) -> None:
    log = tmp_path / "memory_log.csv"
    train(
        tmp_path, memfit.trainer_memory(log, every=5), max_steps=6, eval_strategy="steps", eval_steps=4,
        save_strategy="steps", save_steps=4,
    )  # fmt: skip
    rows = list(csv.DictReader(log.read_text().splitlines()))
    assert [row["Checkpoint"] for row in rows] == [
        "train_begin", "step_1", "step_2", "step_3", "step_4_after_eval", "step_4_after_save", "step_5",
        "step_6_after_eval", "step_6_after_save", "train_end",
    ]  # fmt: skip
    assert all(float(row["CPU_Used_GB"]) > 0 for row in rows)


def test_a_log_every_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="every 0 steps is never"):
        memfit.trainer_memory(every=0)


def test_a_trainer_that_keeps_what_it_was_given_is_told_once(tmp_path: Path) -> None:
    told: list[MemoryGrowth] = []
    train(tmp_path, trainer_growth(told.append, every=10), max_steps=60, save_strategy="no")
    (growth,) = told
    assert growth.kind == "host-growth"
    assert growth.bytes_per_step == pytest.approx(KEPT_BYTES, rel=0.2)
