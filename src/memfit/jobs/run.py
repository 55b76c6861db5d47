"""Run a prepared job on a device, on random tokens: the same call for a GPU and for a trace.

    forward     passes without gradients, the output object kept until the next begins
    generate    prefill, then one token after the other with a KV cache
    train       the loop that everybody writes: forward, backward, maybe clip, step, zero, its variables kept until they
                are bound anew, or dropped; others: `training/loops`

A job says where it is, `with phases("forward", step=2):`; a trace marks it, a GPU run measures it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from memfit.jobs.build import DTYPES, Loop, Prepared, takes_labels
from memfit.jobs.inputs import beside_ids, model_inputs, token_ids, wanted
from memfit.jobs.training.optimizers import choose_optimizer
from memfit.jobs.training.parallel import one_process_of, to_device, without_reduction
from memfit.jobs.workload import Workload

LEARNING_RATE = 1e-4


def autocast(job: Prepared, device: torch.device | str) -> AbstractContextManager[None]:
    kind = torch.device(device).type
    wanted = job.workload.autocast
    region: AbstractContextManager[None] = torch.autocast(
        kind, dtype=DTYPES[wanted] if wanted else None, enabled=wanted is not None
    )
    return region


class Phases(Protocol):
    def __call__(self, name: str, step: int = 0) -> AbstractContextManager[None]: ...


def run_job(job: Prepared, device: torch.device | str, phases: Phases, *, steps: int = 3) -> None:
    """Of several processes that train together, one."""
    with one_process_of(job.workload.world_size if job.workload.trains else 1):
        job.loop(job, device, phases, steps=steps)


def choose_loop(work: Workload) -> Loop:
    if not work.trains:
        return run_generate if work.kind == "generate" else run_forward
    if work.loop == "plain":
        on_host = "optimizer" in (work.offload or ())
        return partial(run_training, choose_optimizer(str(work.optimizer), on_host=on_host))
    from memfit.jobs.training.loops import run_memfit, run_trainer

    return run_trainer if work.loop == "trainer" else run_memfit


def run_forward(job: Prepared, device: torch.device | str, phases: Phases, *, steps: int = 3) -> None:
    model = job.model
    with phases("load"):
        model.to(device)
    named = job.head is not None or takes_labels(model)
    for step in range(1, steps + 1):
        with phases("data", step):
            ids = token_ids(job, device)
            beside = beside_ids(job, ids)
        with torch.no_grad(), autocast(job, device), phases("forward", step):
            output = model(**model_inputs(job, ids), **beside) if named else model(ids)
        del output


def run_generate(job: Prepared, device: torch.device | str, phases: Phases, *, steps: int = 1) -> None:
    """Once, however many steps a training would have."""
    model, work = job.model, job.workload
    with phases("load"):
        model.to(device)
    with phases("data", 1):
        ids = token_ids(job, device)
        inputs = {"attention_mask": torch.ones_like(ids), **model_inputs(job, ids)}
    options: dict[str, Any] = {
        "max_new_tokens": work.new_tokens, "min_new_tokens": work.new_tokens, "do_sample": work.decoding == "sample",
        "pad_token_id": 0,
    }  # fmt: skip
    if work.decoding == "beam":
        options["num_beams"] = work.num_beams
    if work.cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    with torch.no_grad(), autocast(job, device), phases("generate", 1):
        model.generate(**inputs, **options)  # type: ignore[operator]


def run_training(
    make_optimizer: Callable[..., torch.optim.Optimizer],
    job: Prepared,
    device: torch.device | str,
    phases: Phases,
    *,
    steps: int = 3,
) -> None:
    model, work = job.model, job.workload
    with phases("load"):
        called = to_device(model, device, work)
    parameters = job.trainable
    optimizer = make_optimizer(parameters, lr=LEARNING_RATE)
    scaler = torch.amp.GradScaler(torch.device(device).type, enabled=work.precision == "amp-fp16")
    for step in range(1, steps + 1):
        for micro_step in range(1, work.grad_accum + 1):
            with phases("data", step):
                ids = token_ids(job, device)
                targets = wanted(job, ids)
            with without_reduction(called, work, last=micro_step == work.grad_accum):
                with phases("forward", step):
                    outputs, loss = outputs_and_loss(job, ids, targets, called)
                with phases("backward", step):
                    scaler.scale(loss).backward()
            if outputs is None:
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


def outputs_and_loss(
    job: Prepared, ids: torch.Tensor, targets: dict[str, torch.Tensor], called: nn.Module | None = None
) -> tuple[Any, torch.Tensor]:
    """`called` is the model, or what holds it. Outputs that are dropped go as soon as there is a loss."""
    model: Any = called or job.model
    with autocast(job, ids.device):
        if job.head is not None or takes_labels(job.model):
            outputs = model(**model_inputs(job, ids), **targets)
            loss: torch.Tensor = outputs.loss
        else:
            outputs = model(ids)
            loss = cross_entropy(outputs.flatten(0, 1).float(), ids.flatten())
        if job.workload.outputs == "dropped":
            outputs = None
    return outputs, loss
