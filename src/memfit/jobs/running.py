"""Run a prepared job on a device: the same call for a GPU and for a trace."""

from __future__ import annotations

import torch

from memfit.jobs.forward import run_forward
from memfit.jobs.phases import Phases
from memfit.jobs.preparing import Prepared
from memfit.jobs.training.plain import run_training


def run_job(job: Prepared, device: torch.device | str, phases: Phases, *, steps: int = 3) -> None:
    if job.workload.kind == "forward":
        run_forward(job, device, phases, steps=steps)
    else:
        run_training(job, device, phases, steps=steps)
