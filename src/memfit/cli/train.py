"""`memfit train`: LoRA or pre-training from one YAML file, planned first, alone or under torchrun."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Any

import memfit
from memfit.cli import output
from memfit.cli.options import FlagText, command_of
from memfit.jobs.training.batch import is_first
from memfit.units import duration, gib

if TYPE_CHECKING:
    from memfit.jobs.training.result import TrainEvent

DOES_NOT_FIT, INTERRUPTED = 1, 130


OPTIONS: dict[str, FlagText] = {
    "config": (
        "--config", "FILE|NAME",
        "YAML file, or a config that comes with memfit: smollm2-lora-demo, qwen2.5-7b-lora-24gb,"
        " qwen2.5-7b-qlora-8gb, gsa-512m.",
    ),
    "output_dir": (
        "--output-dir", "FOLDER", "Where checkpoints and the log go. Default: outputs/ and the config's name.",
    ),
    "resume_from": ("--resume-from", "FOLDER|latest", "Continue from this checkpoint, step_N or checkpoint-N."),
    "sets": ("--set", "KEY=VALUE", "Replace a setting of the config; may be given several times."),
    "dry_run": (
        "--dry-run", None, "Check the config, read the data, show the plan, and train nothing. The plan is for the GPU"
        " that is here, or for another one: --set memory.gpu='RTX 4090'.",
    ),
    "force": ("--force -f", None, "Train even if the plan says that it does not fit."),
    "json": ("--json", None, "The result as one document on stdout, everything else on stderr."),
}  # fmt: skip


def _train(*, json: bool, sets: list[str] | None, dry_run: bool, **settings: Any) -> int:
    """Train a model from a YAML file: LoRA or all of its weights.

    The job is planned before it starts, and its global batch stays the same on any number of GPUs:
    `torchrun --nproc_per_node=N -m memfit train ...`.
    """
    say = output.note_lines if json else partial(print, file=sys.stdout)
    try:
        with _progress() as progress, redirect_stdout(sys.stderr):
            told = memfit.Listener(say=say, remark=output.note, progress=progress, working=output.working)
            trained = memfit.train(**settings, sets=sets or (), dry_run=dry_run, listener=told)
    except memfit.RanOut as error:
        output.complain(error.message, error.hint)
        _explain(error)
        return DOES_NOT_FIT
    except memfit.Stopped as stop:
        if is_first():
            output.note(f"{stop.message}: {stop.hint}")
        return INTERRUPTED
    if trained.result is None and not (trained.fits or dry_run):
        output.complain(
            "the plan says that this does not fit", "--force trains all the same; memory: auto looks for what fits"
        )
    if json and is_first():
        output.print_json(trained.to_json())
    elif is_first():
        for line in trained.result_lines():
            output.say(line)
    return 0 if trained.fits or trained.result is not None else DOES_NOT_FIT


train = command_of(memfit.train, {"": OPTIONS}, _train)


def _explain(error: memfit.RanOut) -> None:
    from memfit.running.train import TrainingRanOut

    if is_first() and isinstance(error, TrainingRanOut):
        with output.working("explaining"):
            told = error.explain()
        for line in () if told is None else str(told).splitlines():
            output.note(line)


@contextmanager
def _progress() -> Iterator[Callable[[TrainEvent], None]]:
    """Steps done, loss, memory and time left where a person looks on; lines for everything else."""
    from memfit.jobs.training.result import in_a_line

    with output.bar("steps", "bar", "count", "{task.fields[state]}") as tell:

        def show(event: TrainEvent) -> None:
            if event.kind not in ("step", "end") or (event.loss is not None and not sys.stderr.isatty()):
                output.note_lines(in_a_line(event))  # the end is told by the result
            if event.step is not None and event.total_steps is not None:
                tell(completed=event.step, total=event.total_steps)
            if event.loss is not None:
                peak = "" if event.gpu_peak_bytes is None else f", GPU peak {gib(event.gpu_peak_bytes)}"
                left = "" if not event.seconds_left else f", {duration(event.seconds_left)} left"
                tell(state=f"loss {event.loss:.4f}{peak}{left}")

        yield show
