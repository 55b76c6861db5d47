"""`memfit train`: LoRA or pre-training from one YAML file, planned first, alone or under torchrun."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli import output
from memfit.errors import InputError, MemfitError, UsageError
from memfit.files import written_whole
from memfit.jobs.training.batch import is_first
from memfit.replay.alloc_config import CUDA_VARIABLE
from memfit.units import duration, gib

if TYPE_CHECKING:
    from memfit.fitting.durations import Duration
    from memfit.jobs.training.config import TrainConfig
    from memfit.jobs.training.job import TrainJob
    from memfit.jobs.training.result import RunLog, TrainEvent, TrainResult
    from memfit.planning.training import TrainPlan

SCHEMA = "memfit.train/1"
DOES_NOT_FIT, WRONG_INPUT, INTERRUPTED = 1, 2, 130
PATIENCE_SECONDS = 3.0


def train(
    config: Annotated[str, typer.Option("--config", metavar="FILE|NAME", show_default=False, help=(
        "YAML file, or a config that comes with memfit: smollm2-lora-demo, qwen2.5-7b-lora-24gb, gsa-512m."
    ))],
    output_dir: Annotated[str | None, typer.Option("--output-dir", metavar="FOLDER", show_default=False,
        help="Where checkpoints and the log go. Default: outputs/ and the config's name.")] = None,
    resume_from: Annotated[str | None, typer.Option("--resume-from", metavar="FOLDER|latest", show_default=False,
        help="Continue from this checkpoint, step_N or checkpoint-N.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", show_default=False,
        help="Replace a setting of the config; may be given several times.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run",
        help="Check the config, read the data, show the plan, and train nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", "-f",
        help="Train even if the plan says that it does not fit.")] = False,
    json: Annotated[bool, typer.Option("--json",
        help="The result as one document on stdout, everything else on stderr.")] = False,
) -> int:  # fmt: skip
    """Train a model from a YAML file: LoRA or all of its weights.

    The job is planned before it starts, and its global batch stays the same on any number of GPUs:
    `torchrun --nproc_per_node=N -m memfit train ...`.
    """
    from memfit.jobs.training.config_file import load_config

    sets = list(set_ or ())
    for key, value in (("saving.output_dir", output_dir), ("saving.resume_from", resume_from)):
        if value is not None:
            sets.append(f"{key}={_quoted(value)}")
    with _only_the_first_complains():
        settings = load_config(config, sets=sets)
        note = _apply_allocator_settings(settings)
        _wait_without_spinning()
        with output.working(f"preparing {settings.name}"):
            from memfit.jobs.training.job import prepare_job

            job = prepare_job(settings, say=output.note if is_first() else None, to_run=not dry_run)
    say = _nothing if not is_first() else output.note_lines if json else output.say
    notes = (*job.notes, *((note,) if note else ()))
    said = [*job.in_lines(), *(f"note: {each}" for each in notes)]
    for line in said:
        say(line)
    job, plan = _planned(job, say)
    time_told = _duration(job, plan, say)
    fits = plan is None or plan.verdict != "fails"
    if dry_run or not (fits or force):
        if not fits and not dry_run:
            output.complain(
                "the plan says that this does not fit", "--force trains all the same; memory: auto looks for what fits"
            )
        if json and is_first():
            output.print_json(_document(job, plan, time_told, None))
        return 0 if fits else DOES_NOT_FIT
    return _run(job, plan, time_told, said, json=json, say=say)


def _run(
    job: TrainJob, plan: TrainPlan | None, time_told: Duration | None, said: list[str], *, json: bool,
    say: Callable[[str], None],
) -> int:  # fmt: skip
    from memfit.jobs.training.result import RanOut, RunLog
    from memfit.jobs.training.run import Stopped
    from memfit.jobs.training.run import train as run

    log = RunLog(job.output_dir) if is_first() else None
    if log is not None:
        log.write("\n".join(said + ([] if plan is None else plan.in_lines()) + _time_lines(time_told)))
        if job.resume_from is None:
            _keep_config(job)
    try:
        with _progress(log, shown=is_first()) as on_event, redirect_stdout(sys.stderr):
            result = run(job, on_event=on_event, plan=plan)
    except RanOut as error:
        output.complain(error.message, error.hint)
        if log is not None:
            log.write(f"error: {error.message}")
            for line in _explained(error.message, job):
                output.note(line)
        return DOES_NOT_FIT
    except Stopped as stop:
        if log is not None:
            log.write(f"{stop.message}: {stop.hint}")
            output.note(f"{stop.message}: {stop.hint}")
        return INTERRUPTED
    except MemfitError as error:
        if log is not None:
            log.write(f"error: {error.message}\n{error.hint or ''}")
        raise
    finally:
        if log is not None:
            log.close()
    if json and is_first():
        output.print_json(_document(job, plan, time_told, result))
    else:
        for line in result.in_lines():
            say(line)
        if time_told is not None:
            step = time_told.step
            say(f"a step was estimated to take {step.likely:.2f} s ({step.least:.2f} to {step.most:.2f})")
    return 0


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


def _explained(message: str, job: TrainJob) -> list[str]:
    """What `memfit explain` says of the error, with this job's own settings."""
    from memfit.explaining.explain import explain
    from memfit.planning.training import workload_of

    try:
        settings = workload_of(job).settings() | {"batch_size": 1}  # it was halved down to that
        with output.working("explaining"):
            told = explain(message, gpu=job.config.memory.gpu, **settings)
    except MemfitError:  # the error has been told; what goes wrong here must not hide it
        return []
    return str(told).splitlines() if told.known else []


def _document(
    job: TrainJob, plan: TrainPlan | None, time_told: Duration | None, result: TrainResult | None
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "trained": result is not None,
        "job": job.to_json(),
        "plan": None if plan is None else plan.to_json(),
        "duration": None if time_told is None else time_told.to_json(),
        "result": None if result is None else result.to_json(),
    }


def _planned(job: TrainJob, say: Callable[[str], None]) -> tuple[TrainJob, TrainPlan | None]:
    """The job as the plan leaves it (`memory: auto` chooses another micro-batch), and the plan itself."""
    from memfit.planning.training import decides, plan_training

    if not is_first() and not decides(job):  # then one of them plans, for all to read
        return job, None
    with output.working("planning"):
        plan = plan_training(job)
        lines = plan.in_lines() if is_first() else []
    for line in lines:
        say(line)
    return plan.job, plan


def _duration(job: TrainJob, plan: TrainPlan | None, say: Callable[[str], None]) -> Duration | None:
    """For the card that was planned for; once it runs, measured steps tell."""
    if plan is None or plan.plan is None or plan.gpu is None or plan.verdict == "fails" or not is_first():
        return None
    from memfit.fitting.durations import estimate_training, why_none

    with output.working("counting operations"):
        time_told = estimate_training(job, plan.gpu)
    for line in _time_lines(time_told) or [f"time: n/a, for {why_none(plan.gpu)}"]:
        say(line)
    return time_told


def _time_lines(time_told: Duration | None) -> list[str]:
    return [] if time_told is None else [f"time: {time_told.in_words()}", f"time: estimated, by {time_told.basis}"]


# -- one of many processes ---------------------------------------------------------------------------------------------


def _nothing(_: str) -> None:
    pass


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


# -- settings ----------------------------------------------------------------------------------------------------------


def _apply_allocator_settings(config: TrainConfig) -> str | None:
    """They count only if they stand in the environment before CUDA starts. What the user exported wins."""
    wanted = config.memory.alloc_conf
    there = os.environ.get(CUDA_VARIABLE)
    if not wanted:
        return None
    if there is None:
        os.environ[CUDA_VARIABLE] = wanted
        return None
    return None if there == wanted else f"{CUDA_VARIABLE}={there} is exported and wins over memory.alloc_conf {wanted}"


def _wait_without_spinning() -> None:
    """Where other programs use the cores too, threads that spin while they wait for each other make a step on the CPU
    twenty times as long; where nobody else does, they make it a fifth shorter. It counts before torch is imported."""
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1) / 2:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _quoted(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise UsageError(f"{value!r} is not the name of a folder")
    return "'" + value.replace("'", "''") + "'"


# -- while it runs -----------------------------------------------------------------------------------------------------


@contextmanager
def _progress(log: RunLog | None, *, shown: bool) -> Iterator[Callable[[TrainEvent], None]]:
    """Steps done, loss, memory and time left, on stderr and only where a person looks on; lines for everything else."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from memfit.jobs.training.result import in_a_line

    err = output.errors_console()
    columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=err, transient=True, disable=not (shown and err.is_terminal)) as bar:
        task: Any = None

        def show(event: TrainEvent) -> None:
            nonlocal task
            if log is not None and log.failed is None:
                log(event)
                if log.failed is not None:
                    err.print(f"note: {log.failed}", soft_wrap=True)
            if not shown:
                return
            if event.kind not in ("step", "end"):  # the end is told by the result
                err.print(in_a_line(event), soft_wrap=True)
            elif not err.is_terminal and event.loss is not None:
                output.note(in_a_line(event))
            if event.step is not None and event.total_steps is not None:
                if task is None:
                    task = bar.add_task("", total=event.total_steps, state="")
                bar.update(task, completed=event.step)
                if event.loss is not None:
                    peak = "" if event.gpu_peak_bytes is None else f", GPU peak {gib(event.gpu_peak_bytes)}"
                    left = "" if not event.seconds_left else f", {duration(event.seconds_left)} left"
                    bar.update(task, state=f"loss {event.loss:.4f}{peak}{left}")

        yield show
