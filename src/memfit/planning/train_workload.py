"""A training job as the workload of one of its processes, which is what can be predicted."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any, get_args

from memfit.core.alloc_config import CUDA_VARIABLE
from memfit.errors import UsageError
from memfit.jobs.training.batch_sizes import BatchSizes
from memfit.jobs.training.config import ModelConfig, TrainConfig
from memfit.jobs.training.preparation import TrainJob
from memfit.jobs.training.shapes import basics_config, gsa_config, is_basics, transformers_config
from memfit.jobs.workload import Optimizer, Workload
from memfit.models.basics_sizes import BASICS
from memfit.models.gsa_names import is_gsa
from memfit.planning.shape_folder import shape_folder

OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
MICRO_STEPS = 3
"""Every later micro-step does what the third does: it finds gradients to add to, and the sum of losses before."""


def workload_of(job: TrainJob) -> Workload:
    """Of the longest rows, at the job's own micro-batch. Raises UsageError for what cannot be planned."""
    name = job.config.model.name if job.source is None else str(job.source.folder)
    return workload_of_config(job.config, job.batch, name, int(job.data.lengths.max()), packed=job.data.packed)


def workload_of_config(
    config: TrainConfig, batch: BatchSizes, model_name: str, longest: int, *, packed: bool | None = None
) -> Workload:
    """Where the data have not been read. `model_name` is one that the registry knows; rows are as long as `longest`."""
    rows = batch.micro_batch_size
    if packed is None:
        packed = config.data.format != "instruction" if config.data.packing is None else config.data.packing
    return Workload(
        kind="lora" if config.method.kind == "lora" else "train",
        model=_model(config.model, model_name),
        batch_size=rows,
        seq_len=longest,
        precision=config.precision,
        attention="eager" if config.model.attention == "eager" else "sdpa",  # which has flash kernels of its own
        padding=not packed and rows > 1,
        loop="memfit",
        loss=config.loss.kind,
        loss_chunk=config.loss.chunk,
        optimizer=_optimizer(config.optimizer.name),
        grad_checkpointing=config.memory.gradient_checkpointing == "full",
        selective_checkpointing=config.memory.gradient_checkpointing == "selective",
        offload=config.memory.offload,
        grad_accum=min(MICRO_STEPS, batch.gradient_accumulation_steps),
        clip_grad=config.schedule.max_grad_norm > 0,
        world_size=batch.world_size,
        parallel=config.parallel.kind,
        gradient_as_bucket_view=config.parallel.gradient_as_bucket_view,
        rank=config.method.rank,
        target_modules=config.method.target_modules,
        lora_dropout=config.method.dropout,
        adapter_dtype=config.method.adapter_dtype,
        alloc_conf=os.environ.get(CUDA_VARIABLE) or config.memory.alloc_conf,
    ).without_unused()


def _optimizer(name: str) -> Optimizer:
    for known in OPTIMIZERS:
        if known == name:
            return known
    raise UsageError(f"optimizer {name} cannot be planned: its state moves between GPU and host")


# -- the model ---------------------------------------------------------------------------------------------------------


def _model(model: ModelConfig, name: str) -> str:
    """A name under which the same architecture is found again."""
    return str(shape_folder(_settings(model))) if model.settings else name


def _settings(model: ModelConfig) -> dict[str, Any]:
    """As a config.json has them, with the changes that the job makes."""
    if is_basics(model.name):
        return {"model_type": BASICS, **dataclasses.asdict(basics_config(model))}
    config = gsa_config(model) if is_gsa(model.name) else transformers_config(model)
    made: dict[str, Any] = json.loads(config.to_json_string())
    return made
