"""What a process reads for each step of the optimizer: its share of the global batch, from any step on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from memfit.jobs.training.order import rows_of_step
from memfit.jobs.training.preparation import TrainJob

Rows = list[dict[str, Tensor]]


class StepRows(Sampler[list[int]]):
    """Its length is that of the whole run, wherever it starts: the Trainer takes it for the length of an epoch."""

    def __init__(self, job: TrainJob, *, rank: int, first_step: int) -> None:
        self.job, self.rank, self.first_step = job, rank, first_step

    def __len__(self) -> int:
        return self.job.total_steps

    def __iter__(self) -> Iterator[list[int]]:
        job, share = self.job, self.job.batch.rows_per_process
        for step in range(self.first_step, job.total_steps):
            rows = rows_of_step(
                step, samples=len(job.data), global_batch_size=job.batch.global_batch_size, seed=job.config.seed,
                shuffle=job.config.data.shuffle,
            )  # fmt: skip
            yield rows[self.rank * share : (self.rank + 1) * share].tolist()


def step_loader(job: TrainJob, *, rank: int, first_step: int, pin: bool) -> DataLoader[Any]:
    """Rows as they are: they are made a batch only when it is known how many go through the model at a time."""
    return DataLoader(
        job.data, batch_sampler=StepRows(job, rank=rank, first_step=first_step), collate_fn=_as_they_are,
        num_workers=job.config.data.num_workers, pin_memory=pin,
        generator=torch.Generator().manual_seed(job.config.seed),  # else it draws from the run's random numbers
    )  # fmt: skip


def _as_they_are(rows: Rows) -> Rows:
    return rows


def learned_tokens(rows: Rows, ignored: int = -100) -> int:
    """The first token of a row is never predicted."""
    return sum(int((each["labels"][1:] != ignored).sum()) for each in rows)
