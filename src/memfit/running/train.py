"""`memfit.train`: a training from one config, planned first, alone or under torchrun.

Every process of a run calls it; the first one tells and writes. The plan may change the job (`memory: auto`) or refuse
it; what happens is in `train.log`, and an out-of-memory error can be explained with the job's own settings.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memfit.environment import CUDA_VARIABLE
from memfit.errors import InputError, MemfitError, RanOut, Stopped, UsageError
from memfit.files import written_whole
from memfit.jobs.listener import Listener
from memfit.jobs.training.batch import is_first

if TYPE_CHECKING:
    from memfit.explaining.explain import Explanation
    from memfit.fitting.durations import Duration
    from memfit.jobs.training.config import TrainConfig
    from memfit.jobs.training.job import TrainJob
    from memfit.jobs.training.result import RunLog, TrainEvent, TrainResult
    from memfit.planning.training import TrainPlan

SCHEMA = "memfit.train/1"
WRONG_INPUT = 2
PATIENCE_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What `memfit.train` answers: the job, its plan, and what came of it. `print` shows it."""

    job: TrainJob
    plan: TrainPlan | None
    """None in a process that is not the first, where a plan decides nothing."""
    duration: Duration | None
    """As estimated for the card that was planned for."""
    notes: tuple[str, ...] = ()
    result: TrainResult | None = None
    """None where nothing was trained: a dry run, or a job that does not fit."""

    @property
    def fits(self) -> bool:
        return self.plan is None or self.plan.verdict != "fails"

    def __repr__(self) -> str:
        result, config = self.result, self.job.config
        done = "not trained" if result is None else f"{result.steps:,} steps, {result.in_lines()[2]}"
        return f"<Trained: {config.name}, {config.model.name}: {done}>"

    def __str__(self) -> str:
        plan = [] if self.plan is None else self.plan.in_lines()
        return "\n".join([*self.job_lines(), *plan, *self.time_lines(), *self.result_lines()])

    def job_lines(self) -> list[str]:
        return [*self.job.in_lines(), *(f"note: {each}" for each in self.notes)]

    def time_lines(self) -> list[str]:
        told = self.duration
        return [] if told is None else [f"time: {told.in_words()}", f"time: estimated, by {told.basis}"]

    def result_lines(self) -> list[str]:
        if self.result is None or self.duration is None:
            return [] if self.result is None else self.result.in_lines()
        step = self.duration.step
        told = f"a step was estimated to take {step.likely:.2f} s ({step.least:.2f} to {step.most:.2f})"
        return [*self.result.in_lines(), told]

    def to_json(self) -> dict[str, Any]:
        """memfit.train/1"""
        return {
            "schema": SCHEMA,
            "trained": self.result is not None,
            "job": self.job.to_json(),
            "plan": None if self.plan is None else self.plan.to_json(),
            "duration": None if self.duration is None else self.duration.to_json(),
            "result": None if self.result is None else self.result.to_json(),
        }


class TrainingRanOut(RanOut):
    """No row fits. `explain()` is what `memfit.explain` says of it, with this job's own settings."""

    def __init__(self, error: MemfitError, job: TrainJob) -> None:
        super().__init__(error.message, hint=error.hint)
        self.job = job

    def explain(self) -> Explanation | None:
        """None where there is nothing to say: the error has been told, and what goes wrong here must not hide it."""
        from memfit.explaining.explain import explain
        from memfit.planning.training import workload_of

        try:
            settings = workload_of(self.job).settings() | {"batch_size": 1}  # it was halved down to that
            told = explain(self.message, gpu=self.job.config.memory.gpu, **settings)
        except MemfitError:
            return None
        return told if told.known else None


def train(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    sets: Iterable[str] = (),
    output_dir: str | None = None,
    resume_from: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    listener: Listener | None = None,
) -> Trained:
    """Train a model: LoRA, or all of its weights. The job is planned first, and runs if it fits, or with `force`.

    `config` is a YAML file, the name of one that comes with memfit, or its keys as a dict; `sets` are `key=value` and
    replace them. `dry_run` plans only. Raises `RanOut` where no row fits, and `MemfitError`s with hints
    for all else; Ctrl-C ends it after the step that runs, which is saved."""
    told = listener or Listener()
    if not is_first():
        told = Listener(working=told.working)
    folders = {"saving.output_dir": output_dir, "saving.resume_from": resume_from}
    sets = [*sets, *(f"{key}={_quoted(str(place))}" for key, place in folders.items() if place is not None)]
    with _only_the_first_complains():
        from memfit.jobs.training.config_file import load_config

        settings = load_config(config if isinstance(config, Mapping) else os.fspath(config), sets=sets)
    with _allocator_settings(settings) as note:
        return _planned_and_run(settings, note, told, dry_run=dry_run, force=force)


def _planned_and_run(settings: TrainConfig, note: str | None, told: Listener, *, dry_run: bool, force: bool) -> Trained:
    with _only_the_first_complains():
        _wait_without_spinning()
        with told.working(f"preparing {settings.name}"):
            from memfit.jobs.training.job import prepare_job

            job = prepare_job(settings, say=told.remark if is_first() else None, to_run=not dry_run)
    made = Trained(job=job, plan=None, duration=None, notes=(*job.notes, *((note,) if note else ())))
    _say(told, made.job_lines())
    made = _with_duration(_planned(made, told), told)
    return made if dry_run or not (made.fits or force) else replace(made, result=_run(made, told))


def _say(told: Listener, lines: Iterable[str]) -> None:
    for line in lines:
        told.say(line)


def _planned(made: Trained, told: Listener) -> Trained:
    """With the job as the plan leaves it: `memory: auto` chooses another micro-batch."""
    from memfit.planning.training import decides, plan_training

    if not is_first() and not decides(made.job):  # then one of them plans, for all to read
        return made
    with told.working("planning"):
        plan = plan_training(made.job)
        lines = plan.in_lines() if is_first() else []
    _say(told, lines)
    return replace(made, job=plan.job, plan=plan)


def _with_duration(made: Trained, told: Listener) -> Trained:
    """For the card that was planned for; once it runs, measured steps tell."""
    plan = made.plan
    if plan is None or plan.plan is None or plan.gpu is None or not made.fits or not is_first():
        return made
    from memfit.fitting.durations import estimate_training, why_none

    with told.working("counting operations"):
        made = replace(made, duration=estimate_training(made.job, plan.gpu))
    _say(told, made.time_lines() or [f"no time is told: {why_none(plan.gpu)}"])
    return made


def _run(made: Trained, told: Listener) -> TrainResult:
    from memfit.jobs.training.result import RunLog
    from memfit.jobs.training.run import train as run

    job, plan = made.job, made.plan
    log = RunLog(job.output_dir) if is_first() else None
    try:
        if log is not None:
            log.write("\n".join([*made.job_lines(), *([] if plan is None else plan.in_lines()), *made.time_lines()]))
            if job.resume_from is None:
                _keep_config(job)
        return run(job, on_event=_logged(log, told), plan=plan)
    except MemfitError as error:
        if log is not None:
            ended = f"{error.message}: {error.hint}" if isinstance(error, Stopped) else f"error: {error.message}"
            log.write(ended if isinstance(error, (Stopped, RanOut)) else f"{ended}\n{error.hint or ''}")
        if isinstance(error, RanOut):
            raise TrainingRanOut(error, job) from error
        raise
    finally:
        if log is not None:
            log.close()


def _logged(log: RunLog | None, told: Listener) -> Callable[[TrainEvent], None]:
    def tell(event: TrainEvent) -> None:
        if log is not None and log.failed is None:
            log(event)
            if log.failed is not None:
                told.remark(f"note: {log.failed}")
        told.progress(event)

    return tell


def _keep_config(job: TrainJob) -> None:
    """As it was resolved, beside the run; not over a config.yaml that is there: it may be the one that was given."""
    from memfit.jobs.training.config_file import dump

    text, place = dump(job.config), job.output_dir / "config.yaml"
    try:
        if place.exists() and place.read_text(encoding="utf-8", errors="replace") != text:
            place = job.output_dir / "config-resolved.yaml"
        with written_whole(place) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"'{place}' cannot be written: {error.strerror}") from error


# -- this process, and the others --------------------------------------------------------------------------------------


@contextmanager
def _only_the_first_complains() -> Iterator[None]:
    """All processes of a machine find the same mistake: one of them says it, and torchrun must not stop it before."""
    try:
        yield
    except MemfitError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(PATIENCE_SECONDS)
            raise SystemExit(WRONG_INPUT) from None
        raise


@contextmanager
def _allocator_settings(config: TrainConfig) -> Iterator[str | None]:
    """They count only if they stand in the environment before CUDA starts. What the user exported wins. Once CUDA has
    started with them they are this process's for good, and a later job must be told so."""
    wanted, there = config.workload.alloc_conf, os.environ.get(CUDA_VARIABLE)
    if not wanted or there is not None:
        wins = f"{CUDA_VARIABLE}={there} is exported and wins over memory.alloc_conf {wanted}"
        yield wins if wanted and there != wanted else None
        return
    os.environ[CUDA_VARIABLE] = wanted
    try:
        yield None
    finally:
        import torch

        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            os.environ.pop(CUDA_VARIABLE, None)


def _wait_without_spinning() -> None:
    """Where other programs use the cores too, threads that spin while they wait for each other make a step on the CPU
    twenty times as long; where nobody else does, they make it a fifth shorter. It counts before torch is imported."""
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1) / 2:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _quoted(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise UsageError(f"{value!r} is not the name of a folder")
    return "'" + value.replace("'", "''") + "'"
