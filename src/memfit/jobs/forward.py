"""Forward passes without gradients, the output object kept until the next begins."""

from __future__ import annotations

import torch

from memfit.jobs.batches import autocast, model_inputs, token_ids
from memfit.jobs.phases import Phases
from memfit.jobs.preparing import Prepared, takes_labels


def run_forward(job: Prepared, device: torch.device | str, phases: Phases, *, steps: int = 3) -> None:
    model = job.model
    with phases("load"):
        model.to(device)
    named = job.head is not None or takes_labels(model)
    for step in range(1, steps + 1):
        with phases("data", step):
            ids = token_ids(job, device)
        with torch.no_grad(), autocast(job, device), phases("forward", step):
            output = model(**model_inputs(job, ids)) if named else model(ids)
        del output
