"""The training loop that everybody writes: forward, backward, maybe clip, step, zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from memfit.jobs.phases import Phases
from memfit.jobs.preparing import Prepared, takes_labels


def run_training(job: Prepared, device: torch.device | str, phases: Phases, *, steps: int = 3) -> None:
    model, work = job.model, job.workload
    with phases("load"):
        model.to(device)
    parameters = job.trainable
    optimizer = make_optimizer(work.optimizer, parameters)
    for step in range(1, steps + 1):
        for _ in range(work.grad_accum):
            with phases("data", step):
                ids = torch.randint(0, job.vocab_size, (work.batch_size, work.seq_len), device=device)
            with phases("forward", step):
                loss = loss_of(model, ids)
            with phases("backward", step):
                loss.backward()
            del loss
        if work.clip_grad:
            with phases("clip", step):
                nn.utils.clip_grad_norm_(parameters, 1.0)
        with phases("step", step):
            optimizer.step()
        with phases("zero", step):
            optimizer.zero_grad(set_to_none=True)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    if takes_labels(model):
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return loss
    logits = model(ids)
    return cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def make_optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    variants: dict[str, dict[str, Any]] = {
        "adamw": {"foreach": True},
        "adamw-fused": {"fused": True},
        "adamw-single": {"foreach": False},
    }
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4)
    return torch.optim.AdamW(parameters, lr=1e-4, **variants[name])
