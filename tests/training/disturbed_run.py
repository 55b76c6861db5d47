"""`memfit train`, disturbed on purpose: `python disturbed_run.py train --config ...`, alone or under torchrun.

MEMFIT_TEST_KILL=rank:step     this process is killed with signal 9 in the middle of that step
MEMFIT_TEST_OOM=rank:step:rows  memory runs out in that step's second micro-step while so many rows go at a time
"""

from __future__ import annotations

import os
import signal
import sys

import torch

from memfit.cli.main import main
from memfit.jobs.training.trainer_engine import MemfitTrainer

torch.set_num_threads(1)
RANK = int(os.environ.get("RANK", "0"))


def said(name: str) -> list[int]:
    return [int(each) for each in os.environ.get(name, "").split(":") if each]


def reached(trainer: MemfitTrainer, phase: str, step: int, micro_step: int) -> None:
    if phase != "backward" or micro_step != 1:
        return
    if said("MEMFIT_TEST_KILL") == [RANK, step]:
        os.kill(os.getpid(), signal.SIGKILL)
    if said("MEMFIT_TEST_OOM") == [RANK, step, trainer.recovery.batch.micro_batch_size]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


MemfitTrainer.reached = reached  # type: ignore[method-assign]
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
