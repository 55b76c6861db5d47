"""The rows of one optimizer step over all GPUs, which no advice changes."""

from __future__ import annotations

import dataclasses

from memfit.errors import UsageError
from memfit.jobs.training.batch_sizes import BatchSizes, resolve_batch
from memfit.jobs.training.config import BatchConfig
from memfit.jobs.workload import Workload

FLAGS = {
    "micro_batch_size": "--batch-size", "gradient_accumulation_steps": "--grad-accum",
    "global_batch_size": "--global-batch",
}  # fmt: skip


def with_global_batch(work: Workload, rows: int | None) -> Workload:
    """The workload with as many micro-steps as the global batch needs. Accumulation that was asked for must agree."""
    if rows is None:
        return work
    if not work.trains:
        raise UsageError("--global-batch is for training", hint=f"{work.kind} has --batch-size")
    said = BatchConfig(
        micro_batch_size=work.batch_size,
        gradient_accumulation_steps=work.grad_accum if work.grad_accum > 1 else None,
        global_batch_size=rows,
    )
    try:
        sizes = resolve_batch(said, work.world_size)
    except UsageError as error:
        raise UsageError(_in_flags(error.message), hint=_in_flags(error.hint or "")) from error
    return dataclasses.replace(work, grad_accum=sizes.gradient_accumulation_steps)


def _in_flags(text: str) -> str:
    """A config's keys as the flags that were typed."""
    for key, name in FLAGS.items():
        text = text.replace(key, name)
    return text


def batch_sizes(work: Workload) -> BatchSizes:
    return BatchSizes(
        micro_batch_size=work.batch_size, gradient_accumulation_steps=work.grad_accum, world_size=work.world_size
    )


def global_batch_of(work: Workload) -> int | None:
    return batch_sizes(work).global_batch_size if work.trains else None
