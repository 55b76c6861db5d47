"""A training job as transformers' own TrainingArguments."""

from __future__ import annotations

from typing import Any

import torch

from memfit.jobs.training.levers import has_tensorboard
from memfit.jobs.training.preparation import TrainJob
from memfit.jobs.training.trainer import sharding
from memfit.models.gsa_names import GSA_TYPE


def on_gpu(job: TrainJob) -> bool:
    return job.config.device != "cpu" and torch.cuda.is_available()


def trainer_arguments(job: TrainJob, *, gpu: bool | None = None) -> Any:
    """One batch of the Trainer is all that a process has of a step: how it is cut up is up to `recovery`."""
    from transformers import TrainingArguments

    config, schedule = job.config, job.config.schedule
    gpu = on_gpu(job) if gpu is None else gpu
    scheduler: dict[str, Any] = {"lr_scheduler_type": schedule.lr_scheduler}
    if schedule.min_learning_rate:
        scheduler = {
            "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": schedule.min_learning_rate}
        }  # fmt: skip
    warmup = schedule.warmup_steps or int(schedule.warmup_ratio * job.total_steps)
    sharded = config.parallel.kind == "fsdp2" and job.batch.world_size > 1
    args = TrainingArguments(
        output_dir=str(job.output_dir),
        per_device_train_batch_size=job.batch.rows_per_process,
        gradient_accumulation_steps=1,
        max_steps=job.total_steps,
        learning_rate=schedule.learning_rate,
        warmup_steps=warmup,
        max_grad_norm=schedule.max_grad_norm,
        weight_decay=config.optimizer.weight_decay,
        bf16=config.precision == "amp-bf16",
        fp16=config.precision == "amp-fp16",
        seed=config.seed,
        logging_strategy="no",
        save_strategy="no",
        logging_nan_inf_filter=False,
        ignore_data_skip=True,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=_report_to(job),
        use_cpu=not gpu,
        ddp_backend="gloo" if not gpu and job.batch.world_size > 1 else None,
        dataloader_pin_memory=gpu,
        **scheduler,
        **(sharding(state_dict_type="FULL_STATE_DICT") if sharded else {}),
    )
    if job.batch.world_size == 1:
        args._n_gpu = min(1, args.n_gpu)  # several GPUs without torchrun: the Trainer would make threads of them
    return args


def _is_gsa(job: TrainJob) -> bool:
    """By name, or by what a folder holds."""
    return job.shape is not None and job.shape.get("model_type") == GSA_TYPE


def find_unused_parameters(job: TrainJob) -> bool:
    said = job.config.parallel.find_unused_parameters
    return _is_gsa(job) if said is None else said  # no gradient reaches GSA's indexer


def _report_to(job: TrainJob) -> list[str]:
    logging = job.config.logging
    wanted = []
    if logging.tensorboard or (logging.tensorboard is None and has_tensorboard()):
        wanted.append("tensorboard")
    if logging.wandb:
        wanted.append("wandb")
    return wanted or ["none"]
