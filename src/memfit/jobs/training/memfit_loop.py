"""What `memfit train` does, on random tokens: its own Trainer, with the probe before the first step.

A workload with `loop: memfit` is a training job without files: rows of exactly the length asked for, no tokenizer,
nothing saved. The same code runs on a GPU and on the traced device.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from memfit.jobs.phases import Phases
from memfit.jobs.preparing import Prepared
from memfit.jobs.training.batch_sizes import BatchSizes
from memfit.jobs.training.config import (
    BatchConfig,
    Checkpointing,
    DataConfig,
    LoggingConfig,
    LossConfig,
    MemoryConfig,
    MethodConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SavingConfig,
    ScheduleConfig,
    TrainConfig,
)
from memfit.jobs.training.data import DataSummary, Lengths, TrainingData
from memfit.jobs.training.out_of_memory import RanOut
from memfit.jobs.training.parallel import is_sharded
from memfit.jobs.training.preparation import TrainJob
from memfit.jobs.training.recovery import Halved
from memfit.jobs.workload import Workload


def run_memfit(job: Prepared, device: torch.device | str, phases: Phases, *, steps: int = 3) -> None:
    """Out of memory is out of memory here: no smaller micro-batch is tried."""
    from transformers import PreTrainedConfig, PrinterCallback

    from memfit.jobs.training.trainer_arguments import trainer_arguments
    from memfit.jobs.training.trainer_engine import MemfitTrainer

    model: Any = job.model
    if not isinstance(getattr(model, "config", None), PreTrainedConfig):
        model.config = None  # the Trainer would write into it
    with phases("load"):
        if not is_sharded(job.workload):
            model.to(device)
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
    return TrainJob(
        config=training_config(work, steps=steps), batch=batch, data=_random_rows(work, vocab_size), tokenizer=None,
        pad_id=0, source=None, shape=None, output_dir=folder, resume_from=None,
    )  # fmt: skip


def training_config(work: Workload, *, steps: int) -> TrainConfig:
    """What decides memory, as `memfit train` would be told it."""
    checkpointing: Checkpointing = "full" if work.grad_checkpointing else "none"
    if work.selective_checkpointing:
        checkpointing = "selective"
    return TrainConfig(
        model=ModelConfig(name=work.model, from_scratch=True, attention=work.attention),
        method=MethodConfig(
            kind="lora" if work.kind == "lora" else "full", rank=work.rank, dropout=work.lora_dropout,
            target_modules=work.target_modules, adapter_dtype=work.adapter_dtype,
        ),
        data=DataConfig(max_seq_len=max(2, work.seq_len), packing=not work.padding, shuffle=False),
        batch=BatchConfig(micro_batch_size=work.batch_size, gradient_accumulation_steps=work.grad_accum),
        schedule=ScheduleConfig(max_steps=steps, max_grad_norm=1.0 if work.clip_grad else 0.0),
        precision=work.precision,
        memory=MemoryConfig(gradient_checkpointing=checkpointing, offload=work.offload or ()),
        optimizer=OptimizerConfig(name=work.optimizer or "adamw-fused"),
        loss=LossConfig(kind=work.loss, chunk=work.loss_chunk),
        parallel=ParallelConfig(kind=work.parallel, gradient_as_bucket_view=bool(work.gradient_as_bucket_view)),
        logging=LoggingConfig(logging_steps=1, tensorboard=False), saving=SavingConfig(save_steps=None),
    )  # fmt: skip


def _random_rows(work: Workload, vocab_size: int) -> TrainingData:
    """Every batch has a row of full length. With padding every second row is half as long, so that the mask is there
    for a reason; a single row at a time is never padded."""
    lengths = [work.seq_len, work.seq_len // 2] if pads(work) else [work.seq_len]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    tokens = int(starts[-1])
    summary = DataSummary(
        source="random", origin="random tokens", format="text", packed=not work.padding, rows=len(lengths),
        samples=len(lengths), empty_rows=0, tokens=tokens, learned_tokens=tokens, truncated_samples=0,
        dropped_samples=0, tokens_left_out=0, max_seq_len=work.seq_len,
        lengths=Lengths(
            shortest=lengths[-1], median=lengths[-1], mean=tokens / len(lengths), percentile_95=lengths[0],
            longest=lengths[0],
        ),
    )  # fmt: skip
    ids = torch.randint(0, vocab_size, (tokens,), dtype=torch.int32)
    learned = torch.ones(tokens, dtype=torch.bool)
    return TrainingData(ids, learned, starts, packed=not work.padding, summary=summary)


def pads(work: Workload) -> bool:
    return work.padding and work.batch_size > 1 and work.seq_len > 2


def _fail(halved: Halved) -> None:
    raise torch.OutOfMemoryError(halved.cause)


def _reading_losses(trainer: Any) -> Any:
    """As often as there is a loss: each that waits to be read is a block on the GPU."""
    from transformers import TrainerCallback

    class ReadingLosses(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_log = True
            trainer.drain_losses()

    return ReadingLosses()
