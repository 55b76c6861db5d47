"""Which rows each step of the optimizer sees: a matter of the seed and the step alone.

Epoch follows epoch without a seam, and global batches are cut from that stream. So a run continues exactly from any
step, and neither the number of processes nor the micro-batch changes what a step sees.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from memfit.jobs.training.config import ScheduleConfig


@lru_cache(maxsize=2)  # step after step asks for the same one
def epoch_order(samples: int, *, seed: int, epoch: int, shuffle: bool = True) -> Tensor:
    """Every sample once."""
    if not shuffle:
        return torch.arange(samples)
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
    return torch.randperm(samples, generator=generator)


def rows_of_step(step: int, *, samples: int, global_batch_size: int, seed: int, shuffle: bool = True) -> Tensor:
    """The rows of one step, the first step being 0; a process takes its equal share of them, in order of rank."""
    position, end = step * global_batch_size, (step + 1) * global_batch_size
    pieces = []
    while position < end:
        epoch, start = divmod(position, samples)
        stop = min(samples, start + end - position)
        pieces.append(epoch_order(samples, seed=seed, epoch=epoch, shuffle=shuffle)[start:stop])
        position += stop - start
    return torch.cat(pieces)


def total_steps(schedule: ScheduleConfig, *, samples: int, global_batch_size: int) -> int:
    """By epochs, the last batch is filled from the epoch after."""
    if schedule.max_steps is not None:
        return schedule.max_steps
    return max(1, math.ceil((schedule.epochs or 1.0) * samples / global_batch_size))
