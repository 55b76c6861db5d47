"""A training job, run and followed: `train(prepare_job(config), on_event=print)`.

The engine is transformers' Trainer on accelerate, alone or under torchrun; `engine` says what of it is memfit's. In the
output folder: `step_N` (checkpoints), `result.json`, `memory_log.csv` if wanted, and `tensorboard/` where that is
installed.

Ctrl-C, and SIGTERM as schedulers send it: the step that runs is finished and saved, and the run ends there. A second
one ends it at once, and then what was trained since the last checkpoint is lost.

The memory log has a row at the beginning, at every logging step, and where the run ends or breaks. Only the first
process keeps one. torch has a single counter of peaks, and the run's own watch sets it back after every step: `GPU
Peak` comes from there.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from memfit.errors import InputError, RanOut, Stopped
from memfit.jobs.build import build_for_training
from memfit.jobs.host import cause_of, is_out_of_memory
from memfit.jobs.training.batch import is_first
from memfit.jobs.training.checkpoints import check_whole, disk_errors_told, remove_halves
from memfit.jobs.training.job import TrainJob
from memfit.jobs.training.loops import on_gpu, trainer_arguments
from memfit.jobs.training.parallel import ProcessGroup
from memfit.jobs.training.result import STEPS, Expected, PhasePeaks, Place, TrainEvent, TrainResult, beside, ran_out
from memfit.recording.growth import GrowthWatch
from memfit.recording.machine import publish, published
from memfit.recording.memory_log import MemoryLog
from memfit.recording.sampler import GpuReading, GpuSource, find_gpu

if TYPE_CHECKING:
    from memfit.jobs.training.engine import HalvedStep

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether one came while this was open. Only a program's first thread hears of signals."""

    def __init__(self) -> None:
        self.came = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            heeded = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
            self._before = {each: signal.signal(each, self._hear) for each in heeded}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True


class Following:
    """Step by step; only the first process tells."""

    def __init__(self, job: TrainJob, on_event: Callable[[TrainEvent], None], *, gpu: bool, first: bool) -> None:
        self.job, self._tell, self.first = job, on_event, first
        self.watch = GrowthWatch(gpu=gpu)
        self.phases = PhasePeaks(gpu=gpu, tell=self.watch.counter_was_read)
        self.memory: MemoryLog | None = None
        self.place: Place = "loading"
        self.probing = False
        self.trained_bytes = 0
        self.tokens = 0
        self.began = self._logged_at = time.perf_counter()
        self._waited = 0.0
        self._logged_step = 0
        self._first: tuple[int, float] | None = None
        """The first step of this run and when it ended: it is slower than all others."""
        self._said_of_growth: str | None = None
        self.stop_request = StopRequest()
        self._said_to_stop = False
        self.command = f"memfit train --config {job.config.name}"

    def say(self, **event: Any) -> None:
        if self.first:
            self._tell(TrainEvent(total_steps=self.job.total_steps, **event))

    def mark(self, moment: str, *, failed: bool = False) -> None:
        """A row of the memory log, where there is one."""
        if self.memory is not None:
            (self.memory.failed if failed else self.memory.checkpoint)(moment)

    def reached(self, phase: str, step: int, micro_step: int) -> None:
        """As `MemfitTrainer.reached` says it. What follows the end of the last micro-step is the optimizer's."""
        self.place = "optimizer" if phase == "end" else "micro-step"
        self.phases.reached(phase, step, micro_step)
        if self.stop_request.came and not self._said_to_stop:
            self._said_to_stop = True
            self.noted(f"asked to stop: step {step} is finished and saved first; asked again, it stops at once")

    def noted(self, text: str) -> None:
        self.say(kind="note", text=text)

    def halved(self, event: HalvedStep) -> None:
        self.say(kind="out-of-memory", step=event.step, text=event.in_words(), details=dataclasses.asdict(event))

    def probed(self, longest: int) -> None:
        self.watch.sample(0, tokens=longest, longest=longest)
        text = f"the longest rows, {longest:,} tokens, went through two steps of the optimizer"
        self.say(kind="probe", text=text, gpu_peak_bytes=self.watch.peak_bytes)
        self.mark("04_probed")
        self.watch.forget()
        self.probing = False

    def start(self, step: int) -> None:
        self.began = self._logged_at = time.perf_counter()
        self._logged_step = step
        self.say(kind="start", step=step)

    def stepped(self, trainer: Any, step: int) -> None:
        self.place = "between"
        if self._first is None:
            self._first = step, time.perf_counter()
        if step - trainer.first_step == STEPS:
            self.phases.end()
        self.tokens += trainer.tokens_of_step * trainer.together.world_size
        self.watch.sample(step, tokens=trainer.tokens_of_step, longest=trainer.longest_of_step)
        last = self.watch.samples[-1]
        if self.first:
            sizes = {"allocated_bytes": last.allocated_bytes, "peak_bytes": self.watch.peak_bytes}
            sizes["capacity_bytes"] = self.watch.capacity_bytes
            publish(self.command, f"step {step}", done=step, total=self.job.total_steps, **sizes)

    def logged(self, trainer: Any, step: int, learning_rate: float) -> None:
        losses = list(trainer.drain_losses().values())
        now, steps = time.perf_counter(), step - self._logged_step
        seconds, waited = now - self._logged_at, trainer.data_wait_seconds - self._waited
        self._logged_at, self._waited, self._logged_step = now, trainer.data_wait_seconds, step
        self.say(
            kind="step",
            step=step,
            loss=sum(losses) / len(losses) if losses else None,
            learning_rate=learning_rate,
            seconds_per_step=seconds / max(1, steps),
            seconds_left=self._seconds_left(step, now),
            data_wait_share=min(1.0, waited / max(seconds, 1e-9)),
            gpu_peak_bytes=self.watch.peak_bytes,
            host_bytes=self.watch.samples[-1].host_bytes,
        )
        self.mark(f"step_{step}")
        verdict = self.watch.verdict()
        if verdict.kind not in ("none", self._said_of_growth):
            self._said_of_growth = verdict.kind
            self.say(kind="growth", step=step, text=verdict.text, details=verdict.to_json())

    def _seconds_left(self, step: int, now: float) -> float | None:
        """What was saved and logged meanwhile counts: it will be again."""
        if self._first is None or step <= self._first[0]:
            return None
        begun, at = self._first
        return (now - at) / (step - begun) * (self.job.total_steps - step)


def follow(following: Following) -> Any:
    """As a callback of the Trainer, which also says when to log and when to save."""
    from transformers import TrainerCallback

    job = following.job
    every, saving = job.config.logging.logging_steps, job.config.saving.save_steps

    class Follow(TrainerCallback):  # type: ignore[misc,unused-ignore]
        trainer: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            following.start(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            step, last = state.global_step, state.global_step >= job.total_steps
            state.epoch = step * job.batch.global_batch_size / len(job.data)
            following.stepped(self.trainer, step)
            stop = not self.trainer.together.all_well(not following.stop_request.came)
            control.should_training_stop = control.should_training_stop or stop
            control.should_log = step % every == 0 or last or stop
            control.should_save = last or stop or (saving is not None and step % saving == 0)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                following.logged(self.trainer, state.global_step, float(logs.get("learning_rate", 0.0)))

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            place = job.output_dir / f"step_{state.global_step}"
            following.say(kind="checkpoint", step=state.global_step, text=str(place))

    return Follow()


MEMORY_LOG_FILE = "memory_log.csv"


class WatchedGpu:
    """The counters as they are, with the peak that the run's watch has seen."""

    def __init__(self, gpu: GpuSource, watch: GrowthWatch) -> None:
        self._gpu, self._watch = gpu, watch

    def read(self) -> GpuReading:
        now = self._gpu.read()
        peak = max(now.peak_bytes, self._watch.peak_bytes or 0)
        return dataclasses.replace(now, peak_bytes=peak, stretch_peak_bytes=None)


def open_memory_log(job: TrainJob, watch: GrowthWatch, *, gpu: bool) -> MemoryLog | None:
    """None where none is wanted. A run that goes on from a checkpoint goes on with its log."""
    wanted = job.config.logging.memory_log
    if not wanted:
        return None
    path = job.output_dir / MEMORY_LOG_FILE if wanted is True else Path(wanted).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"logging.memory_log '{path}' cannot be written: {error.strerror}") from error
    card = find_gpu(reset=False) if gpu else None
    source = None if card is None else WatchedGpu(card, watch)
    return MemoryLog(path, quiet=True, append=job.resume_from is not None, gpu=source)


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
        _quiet_libraries(),
        _tensorboard_in(job.output_dir / "tensorboard"),
        published(following.command),
        disk_errors_told(job.output_dir),
    ):
        try:
            trainer, seconds = _run(job, following)
        except RanOut:
            following.mark("out_of_memory", failed=True)
            raise
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            following.mark("out_of_memory", failed=True)
            trained, probing = following.trained_bytes, following.probing
            raise ran_out(
                following.place, cause_of(error), job.config, trained_bytes=trained, probing=probing
            ) from None
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

    from memfit.jobs.training.engine import MemfitTrainer

    args = trainer_arguments(job)  # first of all, for it makes the process group
    if following.first:
        following.memory = open_memory_log(job, following.watch, gpu=on_gpu(job))
    following.mark("01_start")
    if job.batch.world_size > 1:  # cards that differ may have been planned for differently
        job = job.with_micro_batch(ProcessGroup(args.device).smallest(job.batch.micro_batch_size))
    loads_to_gpu = job.config.workload.is_quantised
    if loads_to_gpu:
        following.phases.begin()
    model = build_for_training(job, following.phases.reached if loads_to_gpu else lambda _: None)
    following.phases.reached("end")
    following.mark("02_model_built")
    following.trained_bytes = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    following.probing = job.config.memory.probe

    if not loads_to_gpu:
        following.phases.begin()
    trainer = MemfitTrainer(
        job, model, args, on_halved=following.halved, on_probed=following.probed, on_reached=following.reached,
        on_note=following.noted,
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
        raise Stopped(
            f"stopped after step {done:,} of {job.total_steps:,}, which is saved",
            hint=f"--resume_from {job.output_dir / f'step_{done}'} goes on",
        )
    following.mark("end")
    return trainer, time.perf_counter() - following.began


def _result(job: TrainJob, trainer: Any, following: Following, seconds: float, plan: Expected | None) -> TrainResult:
    model, watch, sizes = trainer.model, following.watch, trainer.recovery.batch
    said = {} if plan is None else {"peak_bytes": plan.peak_bytes, "reserved_bytes": plan.reserved_bytes}
    return TrainResult(
        steps=int(trainer.state.global_step),
        first_step=trainer.first_step,
        losses=dict(trainer.progress.losses),
        seconds=seconds,
        tokens=following.tokens,
        data_wait_share=min(1.0, trainer.data_wait_seconds / max(seconds, 1e-9)),
        micro_batch_size=sizes.micro_batch_size,
        gradient_accumulation_steps=sizes.gradient_accumulation_steps,
        world_size=sizes.world_size,
        parameters=sum(each.numel() for each in model.parameters()),
        trained_parameters=sum(each.numel() for each in model.parameters() if each.requires_grad),
        gpu_peak_bytes=watch.peak_bytes,
        gpu_reserved_bytes=watch.reserved_bytes,
        host_peak_bytes=watch.host_peak_bytes,
        checkpoint=job.output_dir / f"step_{trainer.state.global_step}",
        out_of_memory=tuple(trainer.progress.halved),
        growth=watch.verdict().to_json(),
        predicted={name: value for name, value in said.items() if value is not None},
        phases=tuple(beside({} if plan is None else plan.phases, following.phases.peaks)),
    )


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
