"""A training job, run: `train(prepare_job(config), on_event=print)`.

The engine is transformers' Trainer on accelerate, alone or under torchrun; `trainer_engine` says what of it is
memfit's. In the output folder: `step_N` (checkpoints), `result.json`, `memory_log.csv` if wanted, and `tensorboard/`
where that is installed.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from memfit.jobs.memory_errors import is_out_of_memory
from memfit.jobs.training.checkpointing import disk_errors_told, remove_halves
from memfit.jobs.training.events import TrainEvent
from memfit.jobs.training.following import Following, follow
from memfit.jobs.training.model_building import build_for_training
from memfit.jobs.training.out_of_memory import RanOut, ran_out
from memfit.jobs.training.phase_peaks import beside
from memfit.jobs.training.preparation import TrainJob
from memfit.jobs.training.processes import is_first
from memfit.jobs.training.recovery import Halved, cause_of
from memfit.jobs.training.result import Expected, TrainResult
from memfit.jobs.training.run_memory_log import open_memory_log
from memfit.jobs.training.stopping import stopped
from memfit.jobs.training.together import Together
from memfit.jobs.training.trainer_arguments import on_gpu, trainer_arguments
from memfit.jobs.training.whole_checkpoint import check_whole
from memfit.recording.status import published

TENSORBOARD_FOLDER = "TENSORBOARD_LOGGING_DIR"


def train(job: TrainJob, *, on_event: Callable[[TrainEvent], None], plan: Expected | None = None) -> TrainResult:
    """Every process of a run calls this; only the first one writes and tells. Raises RanOut where no row fits,
    CannotSave where the disk takes no more, and Stopped after a first Ctrl-C."""
    if job.resume_from is not None:
        check_whole(job.resume_from, job.config, world_size=job.batch.world_size)
    following = Following(job, on_event, gpu=on_gpu(job), first=is_first())
    if following.first:
        remove_halves(job.output_dir)
    with (
        _quiet_libraries(), _tensorboard_in(job.output_dir / "tensorboard"), published(following.command),
        disk_errors_told(job.output_dir),
    ):  # fmt: skip
        try:
            trainer, seconds = _run(job, following)
        except RanOut:
            following.mark("out_of_memory", failed=True)
            raise
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            following.mark("out_of_memory", failed=True)
            raise ran_out(
                following.place, cause_of(error), job.config, trained_bytes=following.trained_bytes,
                probing=following.probing,
            ) from None  # fmt: skip
        finally:
            following.phases.end()
        result = _result(job, trainer, following, seconds, plan)
        if following.first:
            result.write(job.output_dir)
    following.say(kind="end", step=result.steps, text="; ".join(result.in_lines()[:1]))
    _end_together(trainer)
    return result


def _run(job: TrainJob, following: Following) -> tuple[Any, float]:
    from transformers import PrinterCallback

    from memfit.jobs.training.trainer_engine import MemfitTrainer

    args = trainer_arguments(job)  # first of all, for it makes the process group
    if following.first:
        following.memory = open_memory_log(job, following.watch, gpu=on_gpu(job))
    following.mark("01_start")
    # Cards that differ may have been planned for differently.
    job = job.with_micro_batch(Together(args.device).smallest(job.batch.micro_batch_size))
    model = build_for_training(job)
    following.mark("02_model_built")
    following.trained_bytes = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    following.probing = job.config.memory.probe

    def halved(event: Halved) -> None:
        following.say(kind="out-of-memory", step=event.step, text=event.in_words(), details=event.to_json())

    def probed(longest: int) -> None:
        following.watch.sample(0, tokens=longest, longest=longest)
        peak = following.watch.peak_bytes
        text = f"the longest rows, {longest:,} tokens, went through two steps of the optimizer"
        following.say(kind="probe", text=text, gpu_peak_bytes=peak)
        following.mark("04_probed")
        following.watch.forget()
        following.probing = False

    following.phases.begin()
    trainer = MemfitTrainer(
        job, model, args, on_halved=halved, on_probed=probed, on_reached=following.reached,
        on_note=lambda text: following.say(kind="note", text=text),
    )  # fmt: skip
    following.phases.reached("end")
    following.mark("03_model_loaded")
    trainer.remove_callback(PrinterCallback)
    callback = follow(following)
    callback.trainer = trainer
    trainer.add_callback(callback)
    with following.stop_request:
        trainer.train(resume_from_checkpoint=None if job.resume_from is None else str(job.resume_from))
    trainer.drain_losses()
    if (done := int(trainer.state.global_step)) < job.total_steps:
        _end_together(trainer)
        raise stopped(done, job)
    following.mark("end")
    return trainer, time.perf_counter() - following.began


def _result(job: TrainJob, trainer: Any, following: Following, seconds: float, plan: Expected | None) -> TrainResult:
    model, watch = trainer.model, following.watch
    sizes = trainer.recovery.batch
    return TrainResult(
        steps=int(trainer.state.global_step), first_step=trainer.first_step, losses=dict(trainer.progress.losses),
        seconds=seconds, tokens=following.tokens,
        data_wait_share=min(1.0, trainer.data_wait_seconds / max(seconds, 1e-9)),
        micro_batch_size=sizes.micro_batch_size, gradient_accumulation_steps=sizes.gradient_accumulation_steps,
        world_size=sizes.world_size, parameters=sum(each.numel() for each in model.parameters()),
        trained_parameters=sum(each.numel() for each in model.parameters() if each.requires_grad),
        gpu_peak_bytes=watch.peak_bytes, gpu_reserved_bytes=watch.reserved_bytes, host_peak_bytes=watch.host_peak_bytes,
        checkpoint=job.output_dir / f"step_{trainer.state.global_step}",
        out_of_memory=tuple(trainer.progress.halved), growth=watch.verdict().to_json(), predicted=_predicted(plan),
        phases=tuple(beside({} if plan is None else plan.phases, following.phases.peaks)),
    )  # fmt: skip


def _predicted(plan: Expected | None) -> dict[str, int]:
    said = {} if plan is None else {"peak_bytes": plan.peak_bytes, "reserved_bytes": plan.reserved_bytes}
    return {name: value for name, value in said.items() if value is not None}


def _end_together(trainer: Any) -> None:
    if trainer.together.many:
        trainer.together.wait()
        torch.distributed.destroy_process_group()


@contextmanager
def _tensorboard_in(folder: Path) -> Iterator[None]:
    """The Trainer takes the place of its event files from here only, and would use it for the next run as well."""
    if TENSORBOARD_FOLDER in os.environ:
        yield
        return
    os.environ[TENSORBOARD_FOLDER] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(TENSORBOARD_FOLDER, None)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """What they would print is said by events, or is of no use to the reader."""
    from transformers.utils import logging as of_transformers

    before = of_transformers.get_verbosity()
    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()
    of_accelerate = logging.getLogger("accelerate")
    level = of_accelerate.level
    of_accelerate.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*pin_memory.*")
            # Newer torch has another word for it, which accelerate does not know yet.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
            yield
    finally:
        of_transformers.set_verbosity(before)
        of_accelerate.setLevel(level)
