"""Run a prepared job on a device, on random tokens, texts, pictures: the same call for a GPU and for a trace.

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

from memfit.errors import UsageError
from memfit.jobs.build import Loop, Prepared, takes_labels
from memfit.jobs.loading import load
from memfit.jobs.quantised import DTYPES
from memfit.jobs.training.optimizers import optimizer_of
from memfit.jobs.training.parallel import one_process_of, to_device, without_reduction
from memfit.jobs.workload import Workload
from memfit.models.heads import picture
from memfit.models.registry import block_list

LEARNING_RATE = 1e-4
PLAIN_WORDS = 1000
"""Beside pictures the text is of the first words only: special ones stand at the end of a vocabulary."""


def token_ids(job: Prepared, device: torch.device | str) -> torch.Tensor:
    """Of a batch; where a model reads no text, the pictures."""
    work = job.workload
    if job.reads == "pictures":
        _, *pixels = picture(job.config, work.image_size).pixels
        return torch.rand((work.batch_size, *pixels), device=device)
    if job.reads == "pictures and text":
        return torch.cat([_row(job)] * work.batch_size).to(device)
    return torch.randint(0, job.vocab_size, (work.batch_size, work.seq_len), device=device)


def _row(job: Prepared) -> torch.Tensor:
    """On the host, as a processor makes it: the places of the pictures, a word after each, then text."""
    work, one = job.workload, picture(job.config, job.workload.image_size)
    token = image_token(job.config)
    ids = torch.randint(0, min(PLAIN_WORDS, token), (1, work.seq_len), device="cpu")
    for first in range(0, (one.tokens + 1) * int(work.images or 0), one.tokens + 1):
        ids[0, first : first + one.tokens] = token
    return ids


def image_token(config: Any) -> int:
    return int(getattr(config, "image_token_id", None) or config.image_token_index)


def model_inputs(job: Prepared, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """With padding, half of the last row is not there: its end, or its beginning where text is to be continued."""
    if job.reads == "pictures":
        return {"pixel_values": ids}
    if not job.workload.padding:
        return {"input_ids": ids}
    mask, half = torch.ones_like(ids), ids.shape[1] // 2
    if job.workload.kind == "generate":
        mask[-1, :half] = 0
    else:
        mask[-1, half:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def beside_ids(job: Prepared, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What else a forward pass without labels is given."""
    if job.reads == "text to text":
        return {"decoder_input_ids": _target(job, ids)}
    return _pictures(job, ids) if job.reads == "pictures and text" else {}


def _target(job: Prepared, ids: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, job.vocab_size, (*ids.shape[:-1], int(job.workload.target_len or 0)), device=ids.device)


def _pictures(job: Prepared, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of all rows, one after the other."""
    one = picture(job.config, job.workload.image_size)
    count = ids.shape[0] * int(job.workload.images or 0)
    if not count:
        return {}
    first, *rest = one.pixels
    made = {"pixel_values": torch.rand((count * first, *rest), device=ids.device)}
    if one.grid is None:
        return made
    grid = torch.tensor([one.grid] * count, device="cpu").to(ids.device)
    of_pictures = (_row(job) == image_token(job.config)).long()  # or of text, as Qwen's processor says it
    return made | {"image_grid_thw": grid, "mm_token_type_ids": torch.cat([of_pictures] * ids.shape[0]).to(ids.device)}


def wanted(job: Prepared, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the model is to say of a batch or of a row; a language model, the tokens themselves."""
    if job.head is None:
        return {"labels": ids}
    if job.reads == "text to text":
        return {"labels": _target(job, ids)}
    if job.reads == "pictures and text":
        return {"labels": ids, **_pictures(job, ids)}
    rows, config = ids.shape[:-3] if job.reads == "pictures" else ids.shape[:-1], job.config
    if job.head.task == "QUESTION_ANS":
        places = {"start_positions", "end_positions"}
        return {place: torch.randint(0, ids.shape[-1], rows, device=ids.device) for place in sorted(places)}
    if job.head.task == "TOKEN_CLS":
        return {"labels": torch.randint(0, config.num_labels, ids.shape, device=ids.device)}
    if config.problem_type == "multi_label_classification":
        return {"labels": torch.rand((*rows, config.num_labels), device=ids.device)}
    if config.problem_type == "regression" or (config.problem_type is None and config.num_labels == 1):
        return {"labels": torch.rand(rows, device=ids.device)}
    return {"labels": torch.randint(0, config.num_labels, rows, device=ids.device)}


def autocast(job: Prepared, device: torch.device | str) -> AbstractContextManager[None]:
    kind = torch.device(device).type
    wanted = job.workload.autocast_type
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


def put_on(job: Prepared, device: torch.device | str, phases: Phases) -> nn.Module:
    """The model on its device, and what is to be called from then on."""
    if job.workload.is_quantised:
        load(job.model, device, job.loaded_bytes, phases, job.workload)
        return job.model
    with phases("load"):
        return _compiled(to_device(job.model, device, job.workload), job.workload)


def _compiled(model: nn.Module, work: Workload) -> nn.Module:
    """As people write it: `torch.compile(model)`, or `block.compile()` for each block; to generate `model.compile()`,
    as `torch.compile(model).generate` runs the model as it is."""
    if work.compile_blocks:
        if (found := block_list(model)) is None:
            raise UsageError(
                "--compile-blocks: a model with a list of two blocks or more is needed", hint="--compile, of all of it"
            )
        for block in found[1]:
            block.compile()
    if work.compile and work.kind == "generate":
        model.compile()
        return model
    return torch.compile(model) if work.compile else model  # type: ignore[return-value]


def choose_loop(work: Workload) -> Loop:
    if not work.trains:
        return run_generate if work.kind == "generate" else run_forward
    if work.loop == "plain":
        return partial(run_training, optimizer_of(work))
    from memfit.jobs.training.loops import run_memfit, run_trainer

    return run_trainer if work.loop == "trainer" else run_memfit


def run_forward(job: Prepared, device: torch.device | str, phases: Phases, *, steps: int = 3) -> None:
    model = put_on(job, device, phases)
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
    model, work = put_on(job, device, phases), job.workload
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
    work = job.workload
    called = put_on(job, device, phases)
    parameters = job.trainable
    optimizer = make_optimizer(parameters, lr=LEARNING_RATE)
    scaler = torch.amp.GradScaler(torch.device(device).type, enabled=work.autocast_type == "fp16")
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
    model: Any = job.model if called is None else called
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
