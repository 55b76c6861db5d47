"""The loops of the HF Trainer and of `memfit train` on random tokens, and the one writer of TrainingArguments.

Nothing of the Trainer's loop is written here. A workload with `loop: memfit` is a training job without files: rows of
exactly the length asked for, no tokenizer, nothing saved. The same code runs on a GPU and on the traced device.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset

from memfit.errors import RanOut
from memfit.jobs.build import Prepared
from memfit.jobs.run import Phases, put_on, token_ids, wanted
from memfit.jobs.training.batch import BatchSizes
from memfit.jobs.training.config import TrainConfig, keys_of
from memfit.jobs.training.config_file import config_from
from memfit.jobs.training.config_names import OF_PACKAGES
from memfit.jobs.training.data import made_up_rows
from memfit.jobs.training.job import TrainJob
from memfit.jobs.training.optimizers import ADAMW, OF_BITSANDBYTES, adamw, by_shapes, trainer_name
from memfit.jobs.training.refusals import has_tensorboard
from memfit.jobs.workload import Workload
from memfit.models.presets import GSA_TYPE

if TYPE_CHECKING:
    from memfit.jobs.training.engine import HalvedStep


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, job: Prepared, rows: int) -> None:
        self.job, self.rows = job, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        work = self.job.workload
        if self.job.reads == "pictures":
            pixels = token_ids(self.job, "cpu")[0]
            return {"pixel_values": pixels, **wanted(self.job, pixels)}
        ids = torch.randint(0, self.job.vocab_size, (work.seq_len,))
        mask = torch.ones_like(ids)
        if work.padding:
            mask[work.seq_len // 2 :] = 0
        return {"input_ids": ids, "attention_mask": mask, **wanted(self.job, ids)}


def run_trainer(job: Prepared, device: torch.device | str, phases: Phases, *, steps: int = 3) -> None:
    from transformers import PrinterCallback, Trainer

    model, work = job.model, job.workload
    _load(job, device, phases)
    rows = work.batch_size * work.grad_accum * (steps + 1) * work.world_size
    data = RandomTokens(job, rows)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        args = _training_arguments(
            work, folder, steps, gpu=torch.device(device).type != "cpu", logging_steps=1, report_to=[],
            **trainer_settings(work),
        )  # fmt: skip
        trainer = Trainer(
            model=model, args=args, train_dataset=data, optimizer_cls_and_kwargs=_own_optimizer(job, args, device)
        )
        trainer.remove_callback(PrinterCallback)
        if trainer.accelerator.ddp_handler is not None:
            trainer.accelerator.ddp_handler.gradient_as_bucket_view = bool(work.gradient_as_bucket_view)
        with phases("trainer", 1):
            trainer.train()


def _load(job: Prepared, device: torch.device | str, phases: Phases) -> None:
    """A model that is to be sharded stays on the host."""
    if job.workload.is_quantised:
        put_on(job, device, phases)
        return
    with phases("load"):
        if not job.workload.is_sharded:
            job.model.to(device)


def _own_optimizer(
    job: Prepared, args: Any, device: torch.device | str
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """None leaves it to the Trainer."""
    work = job.workload
    optimizer = str(work.optimizer)
    if optimizer in OF_PACKAGES and torch.device(device).type == "meta":
        kind, settings = by_shapes(optimizer)
        tables = [m.weight for m in job.model.modules() if isinstance(m, nn.Embedding)]  # which it keeps in fp32
        whole = {"whole": {id(table) for table in tables}} if optimizer in OF_BITSANDBYTES else {}
        return kind, {"lr": args.learning_rate, **whole, **settings}
    if "optimizer" not in work.offload:
        return None
    settings = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return adamw(on_host=True), settings | ADAMW[str(work.optimizer)]


def run_memfit(job: Prepared, device: torch.device | str, phases: Phases, *, steps: int = 3) -> None:
    """Out of memory is out of memory here: no smaller micro-batch is tried."""
    from transformers import PreTrainedConfig, PrinterCallback

    from memfit.jobs.training.engine import MemfitTrainer

    model: Any = job.model
    if not isinstance(getattr(model, "config", None), PreTrainedConfig):
        model.config = None  # the Trainer would write into it
    _load(job, device, phases)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), phases("trainer", 1):
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        warnings.filterwarnings("ignore", message=".*returned a view tensor.*")  # which nothing changes in place
        training = training_job(job.workload, job.vocab_size, steps=steps, folder=Path(folder))
        args = trainer_arguments(training, gpu=torch.device(device).type != "cpu")
        trainer = MemfitTrainer(training, model, args, on_halved=_fail, on_probed=lambda longest: None)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_reading_losses(trainer))
        try:
            trainer.train()
        except RanOut as error:
            raise torch.OutOfMemoryError(error.message) from None


def training_job(work: Workload, vocab_size: int, *, steps: int, folder: Path) -> TrainJob:
    batch = BatchSizes(
        micro_batch_size=work.batch_size, gradient_accumulation_steps=work.grad_accum, world_size=work.world_size
    )
    # Every batch has a row of full length. With padding every second row is half as long, so that the mask is there
    # for a reason; a single row at a time is never padded.
    lengths = [work.seq_len, work.seq_len // 2] if work.is_padded else [work.seq_len]
    ids = torch.randint(0, vocab_size, (sum(lengths),), dtype=torch.int32)
    data = made_up_rows(ids, lengths, packed=not work.padding, source="random", origin="random tokens", format="text")
    return TrainJob(
        config=training_config(work, steps=steps), batch=batch, data=data, tokenizer=None, pad_id=0, source=None,
        shape=None, output_dir=folder, resume_from=None,
    )  # fmt: skip


def training_config(work: Workload, *, steps: int) -> TrainConfig:
    """What decides memory, as `memfit train` would be told it."""
    keys = keys_of(work)
    keys["model"]["from_scratch"] = True
    keys["data"] = {"max_seq_len": max(2, work.seq_len), "packing": not work.padding, "shuffle": False}
    keys["batch"] = {"micro_batch_size": work.batch_size, "gradient_accumulation_steps": work.grad_accum}
    keys["schedule"]["max_steps"] = steps
    keys["logging"] = {"logging_steps": 1, "tensorboard": False}
    return config_from({**keys, "saving": {"save_steps": None}}, found=work)


def _fail(halved: HalvedStep) -> None:
    raise torch.OutOfMemoryError(halved.cause)


def _reading_losses(trainer: Any) -> Any:
    """As often as there is a loss: each that waits to be read is a block on the GPU."""
    from transformers import TrainerCallback

    class ReadingLosses(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_log = True
            trainer.drain_losses()

    return ReadingLosses()


def on_gpu(job: TrainJob) -> bool:
    return job.config.device != "cpu" and torch.cuda.is_available()


def trainer_settings(work: Workload) -> dict[str, Any]:
    """A workload in the words of the Hugging Face Trainer: what TrainingArguments has a field for."""
    made: dict[str, Any] = {
        "per_device_train_batch_size": work.batch_size,
        "gradient_accumulation_steps": work.grad_accum,
        "optim": trainer_name(str(work.optimizer)),
        "max_grad_norm": 1.0 if work.clip_grad else 0.0,
        **_autocast(work),
        "gradient_checkpointing": work.checkpoints_by_switch,
    }
    if work.checkpoints_by_switch:
        made["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if work.weight_decay:
        made["weight_decay"] = work.weight_decay
    if work.momentum:
        made["optim_args"] = f"momentum={work.momentum:g}"
    if work.compile:
        made["torch_compile"] = True
    return made | ({"fsdp": True, "fsdp_config": dict(FSDP2)} if work.is_sharded else {})


FSDP2 = {"version": 2, "reshard_after_forward": True}


def _autocast(work: Workload) -> dict[str, bool]:
    return {"bf16": work.autocast_type == "bf16", "fp16": work.autocast_type == "fp16"}


def trainer_arguments(job: TrainJob, *, gpu: bool | None = None) -> Any:
    """Of `memfit train`. One batch of the Trainer is all that a process has of a step: how it is cut up is up to
    `engine.Recovery`."""
    config, schedule = job.config, job.config.schedule
    gpu = on_gpu(job) if gpu is None else gpu
    scheduler: dict[str, Any] = {"lr_scheduler_type": schedule.lr_scheduler}
    if schedule.min_learning_rate:
        kwargs = {"min_lr": schedule.min_learning_rate}
        scheduler = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": kwargs}
    work = config.workload.with_found(world_size=job.batch.world_size)
    args = _training_arguments(
        work,
        str(job.output_dir),
        job.total_steps,
        gpu=gpu,
        per_device_train_batch_size=job.batch.rows_per_process,
        gradient_accumulation_steps=1,
        learning_rate=schedule.learning_rate,
        warmup_steps=schedule.warmup_steps or int(schedule.warmup_ratio * job.total_steps),
        max_grad_norm=schedule.max_grad_norm,
        weight_decay=work.weight_decay,
        **_autocast(work),
        seed=config.seed,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        ignore_data_skip=True,
        remove_unused_columns=False,
        report_to=_report_to(job),
        ddp_backend="gloo" if not gpu and job.batch.world_size > 1 else None,
        dataloader_pin_memory=gpu,
        **scheduler,
        **({"fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}} if work.is_sharded else {}),
    )
    if job.batch.world_size == 1:
        args._n_gpu = min(1, args.n_gpu)  # several GPUs without torchrun: the Trainer would make threads of them
    return args


def _training_arguments(work: Workload, folder: str, steps: int, *, gpu: bool, **fields: Any) -> Any:
    """Nothing is saved but by `memfit train` itself. FSDP2 is accelerate's: blocks, embedding, and norm and head are
    each a group."""
    from transformers import TrainingArguments

    if work.is_sharded:
        reads_settings = hasattr(TrainingArguments, "_apply_legacy_fsdp_to_config")  # before 5.10 it needs the words
        fields["fsdp"] = True if reads_settings else "full_shard auto_wrap"
        fields["fsdp_config"] = {**FSDP2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **fields["fsdp_config"]}
    if hasattr(TrainingArguments, "activation_checkpointing"):  # its name since transformers 5.23
        fields = {name.replace("gradient_checkpointing", "activation_checkpointing"): v for name, v in fields.items()}
    return TrainingArguments(
        output_dir=folder, max_steps=steps, use_cpu=not gpu, save_strategy="no", disable_tqdm=True, **fields
    )


def find_unused_parameters(job: TrainJob) -> bool:
    said = job.config.parallel.find_unused_parameters
    is_gsa = job.shape is not None and job.shape.get("model_type") == GSA_TYPE
    return is_gsa if said is None else said  # no gradient reaches GSA's indexer


def _report_to(job: TrainJob) -> list[str]:
    logging = job.config.logging
    tensorboard = has_tensorboard() if logging.tensorboard is None else logging.tensorboard
    wanted = {"tensorboard": tensorboard, "wandb": logging.wandb}
    return [name for name, here in wanted.items() if here] or ["none"]
