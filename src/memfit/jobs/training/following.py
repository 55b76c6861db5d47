"""What is told of a run while it runs: events for the command line and the log, a status for `memfit watch`, growth."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from memfit.jobs.training.events import TrainEvent
from memfit.jobs.training.out_of_memory import Place
from memfit.jobs.training.phase_peaks import STEPS, PhasePeaks
from memfit.jobs.training.preparation import TrainJob
from memfit.jobs.training.stopping import StopRequest
from memfit.recording.growth import GrowthWatch
from memfit.recording.memory_log import MemoryLog
from memfit.recording.status import publish


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
            text = f"asked to stop: step {step} is finished and saved first; asked again, it stops at once"
            self.say(kind="note", text=text)

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
            publish(
                self.command, f"step {step}", done=step, total=self.job.total_steps,
                allocated_bytes=last.allocated_bytes, peak_bytes=self.watch.peak_bytes,
                capacity_bytes=self.watch.capacity_bytes,
            )  # fmt: skip

    def logged(self, trainer: Any, step: int, learning_rate: float) -> None:
        losses = list(trainer.drain_losses().values())
        now, steps = time.perf_counter(), step - self._logged_step
        seconds, waited = now - self._logged_at, trainer.data_wait_seconds - self._waited
        self._logged_at, self._waited, self._logged_step = now, trainer.data_wait_seconds, step
        self.say(
            kind="step", step=step, loss=sum(losses) / len(losses) if losses else None, learning_rate=learning_rate,
            seconds_per_step=seconds / max(1, steps), seconds_left=self._seconds_left(step, now),
            data_wait_share=min(1.0, waited / max(seconds, 1e-9)),
            gpu_peak_bytes=self.watch.peak_bytes, host_bytes=self.watch.samples[-1].host_bytes,
        )  # fmt: skip
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
