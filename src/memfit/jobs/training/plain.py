"""The training loop that everybody writes: forward, backward, maybe clip, step, zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from memfit.jobs.batches import autocast, model_inputs, token_ids, wanted
from memfit.jobs.phases import Phases
from memfit.jobs.preparing import Prepared, takes_labels
from memfit.jobs.training.optimizers import make_optimizer
from memfit.jobs.training.parallel import to_device, without_reduction


def run_training(job: Prepared, device: torch.device | str, phases: Phases, *, steps: int = 3) -> None:
    model, work = job.model, job.workload
    with phases("load"):
        called = to_device(model, device, work)
    parameters = job.trainable
    optimizer = make_optimizer(str(work.optimizer), parameters, on_host="optimizer" in (work.offload or ()))
    scaler = torch.amp.GradScaler(torch.device(device).type, enabled=work.precision == "amp-fp16")
    for step in range(1, steps + 1):
        for micro_step in range(1, work.grad_accum + 1):
            with phases("data", step):
                ids = token_ids(job, device)
                targets = wanted(job, ids)
            with without_reduction(called, work, last=micro_step == work.grad_accum):
                with phases("forward", step):
                    loss = loss_of(job, ids, targets, called)
                with phases("backward", step):
                    scaler.scale(loss).backward()
            del loss, targets
        if work.clip_grad:
            with phases("clip", step):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, 1.0)
        with phases("step", step):
            scaler.step(optimizer)
            scaler.update()
        with phases("zero", step):
            optimizer.zero_grad(set_to_none=True)


def loss_of(
    job: Prepared, ids: torch.Tensor, targets: dict[str, torch.Tensor], called: nn.Module | None = None
) -> torch.Tensor:
    """`called` is the model, or what holds it."""
    model: Any = called or job.model
    with autocast(job, ids.device):
        if job.head is not None or takes_labels(job.model):
            loss: torch.Tensor = model(**model_inputs(job, ids), **targets).loss
            return loss
        logits = model(ids)
        return cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
