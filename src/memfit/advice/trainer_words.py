"""A workload's settings in the words of the Hugging Face Trainer: the fields of TrainingArguments."""

from __future__ import annotations

from typing import Any

from memfit.core.alloc_config import CUDA_VARIABLE
from memfit.errors import UsageError
from memfit.jobs.workload import Workload


def trainer_settings(work: Workload) -> dict[str, Any]:
    """What TrainingArguments has a field for."""
    from memfit.jobs.training.optimizers import trainer_name

    made: dict[str, Any] = {
        "per_device_train_batch_size": work.batch_size,
        "gradient_accumulation_steps": work.grad_accum,
        "optim": trainer_name(str(work.optimizer)),
        "max_grad_norm": 1.0 if work.clip_grad else 0.0,
        "bf16": work.precision == "amp-bf16",
        "fp16": work.precision == "amp-fp16",
        "gradient_checkpointing": work.grad_checkpointing,
    }
    if work.grad_checkpointing:
        made["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if work.world_size > 1 and work.parallel == "fsdp2":
        made["fsdp"] = True
        made["fsdp_config"] = {"version": 2, "reshard_after_forward": True}
    return made


def environment(work: Workload) -> dict[str, str]:
    """What must be set before Python starts."""
    return {CUDA_VARIABLE: work.alloc_conf} if work.alloc_conf else {}


def refuse_what_has_no_switch(work: Workload, form: str) -> None:
    lacking = [f"{what} on the host" for what in work.offload or ()]
    if work.selective_checkpointing:
        lacking.append("selective checkpointing")
    if lacking:
        raise UsageError(
            f"--emit {form}: the HF Trainer has no switch for {' and '.join(lacking)}",
            hint="--emit yaml writes it for `memfit train`; --keep offload,selective-checkpointing does without",
        )
