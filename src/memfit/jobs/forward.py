"""Forward passes without gradients, the output object kept until the next begins."""

from __future__ import annotations

import torch

from memfit.jobs.phases import Phases
from memfit.jobs.preparing import Prepared, takes_labels


def run_forward(job: Prepared, device: torch.device | str, phases: Phases, *, steps: int = 3) -> None:
    model, work = job.model, job.workload
    with phases("load"):
        model.to(device)
    named = takes_labels(model)
    for step in range(1, steps + 1):
        with phases("data", step):
            ids = torch.randint(0, job.vocab_size, (work.batch_size, work.seq_len), device=device)
        with torch.no_grad(), phases("forward", step):
            output = model(input_ids=ids) if named else model(ids)
        del output
