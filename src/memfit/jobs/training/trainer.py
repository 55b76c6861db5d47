"""The Hugging Face Trainer itself, on random tokens: nothing of its loop is written here."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
from torch.utils.data import Dataset

from memfit.jobs.batches import wanted
from memfit.jobs.phases import Phases
from memfit.jobs.preparing import Prepared, trainer_checkpoints
from memfit.jobs.training.optimizers import ADAMW, adamw, trainer_name
from memfit.jobs.training.parallel import is_sharded


def sharding(**more: Any) -> dict[str, Any]:
    """For the Trainer: FSDP2 as accelerate does it. Blocks, embedding, and norm and head are each a group."""
    from transformers import TrainingArguments

    settings = {"version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **more}
    reads_settings = hasattr(TrainingArguments, "_apply_legacy_fsdp_to_config")  # before 5.10 it needs the words
    return {"fsdp": True if reads_settings else "full_shard auto_wrap", "fsdp_config": settings}


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, job: Prepared, rows: int) -> None:
        self.job, self.rows = job, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        work = self.job.workload
        ids = torch.randint(0, self.job.vocab_size, (work.seq_len,))
        mask = torch.ones_like(ids)
        if work.padding:
            mask[work.seq_len // 2 :] = 0
        return {"input_ids": ids, "attention_mask": mask, **wanted(self.job, ids)}


def run_trainer(job: Prepared, device: torch.device | str, phases: Phases, *, steps: int = 3) -> None:
    from transformers import PrinterCallback, Trainer

    model, work = job.model, job.workload
    with phases("load"):
        if not is_sharded(work):
            model.to(device)
    rows = work.batch_size * work.grad_accum * (steps + 1) * work.world_size
    data = RandomTokens(job, rows)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        args = arguments(job, folder, steps, use_cpu=torch.device(device).type == "cpu")
        trainer = Trainer(
            model=model, args=args, train_dataset=data, optimizer_cls_and_kwargs=_optimizer_on_host(job, args)
        )
        trainer.remove_callback(PrinterCallback)
        if trainer.accelerator.ddp_handler is not None:
            trainer.accelerator.ddp_handler.gradient_as_bucket_view = bool(work.gradient_as_bucket_view)
        with phases("trainer", 1):
            trainer.train()


def arguments(job: Prepared, folder: str, steps: int, *, use_cpu: bool = False) -> Any:
    from transformers import TrainingArguments

    work = job.workload
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=work.batch_size,
        gradient_accumulation_steps=work.grad_accum,
        max_steps=steps,
        max_grad_norm=1.0 if work.clip_grad else 0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=work.autocast == "bf16",
        fp16=work.autocast == "fp16",
        gradient_checkpointing=trainer_checkpoints(work),
        optim=trainer_name(str(work.optimizer)),
        disable_tqdm=True,
        use_cpu=use_cpu,
        **(sharding() if is_sharded(work) else {}),
    )


def _optimizer_on_host(job: Prepared, args: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """None leaves it to the Trainer."""
    work = job.workload
    if "optimizer" not in (work.offload or ()):
        return None
    settings = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return adamw(on_host=True), settings | ADAMW[str(work.optimizer)]
