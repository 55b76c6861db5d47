"""Run a prepared job on a device: the same call for a GPU and for a trace."""

from __future__ import annotations

import torch

from memfit.jobs.phases import Phases
from memfit.jobs.preparing import Prepared
from memfit.jobs.training.one_process import one_process_of


def run_job(job: Prepared, device: torch.device | str, phases: Phases, *, steps: int = 3) -> None:
    """Of several processes that train together, one."""
    with one_process_of(job.workload.world_size if job.workload.trains else 1):
        _run(job, device, phases, steps)


def _run(job: Prepared, device: torch.device | str, phases: Phases, steps: int) -> None:
    if job.workload.kind == "forward":
        from memfit.jobs.forward import run_forward

        run_forward(job, device, phases, steps=steps)
    elif job.workload.kind == "generate":
        from memfit.jobs.generate import run_generate

        run_generate(job, device, phases)
    elif job.workload.loop == "trainer":
        from memfit.jobs.training.trainer import run_trainer

        run_trainer(job, device, phases, steps=steps)
    elif job.workload.loop == "memfit":
        from memfit.jobs.training.memfit_loop import run_memfit

        run_memfit(job, device, phases, steps=steps)
    else:
        from memfit.jobs.training.plain import run_training

        run_training(job, device, phases, steps=steps)
