"""`memfit.check`: all checks that concern what was asked for, in order, each as one or more lines.

    checked = memfit.check(config="qwen2.5-7b-lora-24gb", gpu="24GB")
    checked.failed, checked.to_json()       # memfit.check/1

A check that cannot be made is skipped with the reason; one that stops with an error has failed.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from memfit.checking import config as job_settings
from memfit.checking import data, machine, model, plan
from memfit.checking.model import Flow
from memfit.checking.situation import CheckRequest, Finding, Line, Situation, Status, guarded
from memfit.errors import UsageError
from memfit.gpus import find_gpu
from memfit.jobs.training.batch import launched, processes, processes_meant
from memfit.jobs.training.config_file import find_config, parse_yaml
from memfit.jobs.workload import Workload
from memfit.models.registry import resolve
from memfit.render.shown import Shown

SCHEMA = "memfit.check/1"
STATUSES: tuple[Status, ...] = ("ok", "warning", "failed", "skipped")
Look = Callable[[Situation], Finding | Iterator[Finding]]


@dataclass(frozen=True, kw_only=True)
class Checked(Shown):
    """What `memfit.check` found, a line for each check. `print` shows it."""

    asked: dict[str, Any]
    findings: tuple[Finding, ...]
    seconds: float
    job_file: dict[str, Any] | None = None
    """Of a job that was read from another tool's file: what became of each key (`jobfiles/file.py`)."""

    @property
    def failed(self) -> tuple[Finding, ...]:
        return tuple(each for each in self.findings if each.status == "failed")

    @property
    def verdict(self) -> Status:
        found = {each.status for each in self.findings}
        return "failed" if "failed" in found else "warning" if "warning" in found else "ok"

    def __repr__(self) -> str:
        counts = self.to_json()["counts"]
        return f"<Checked: {self.verdict}: {', '.join(f'{count} {status}' for status, count in counts.items())}>"

    def to_json(self) -> dict[str, Any]:
        counts = {status: sum(each.status == status for each in self.findings) for status in STATUSES}
        return {
            "schema": SCHEMA, **({} if self.job_file is None else {"from": self.job_file}), "asked": self.asked,
            "verdict": self.verdict, "counts": counts,
            "checks": [each.to_json() for each in self.findings], "seconds": round(self.seconds, 3),
        }  # fmt: skip


def check(
    workload: Workload | None = None,
    *,
    config: str | None = None,
    sets: Iterable[str] = (),
    gpu: str | None = None,
    world_size: int | None = None,
    load: bool = False,
    on_progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> Checked:
    """Look at this machine, and at a training config (`config`, a file or a name) or a workload (`kind`, `model` and
    the other settings of `memfit plan`)."""
    began = time.perf_counter()
    work = Workload.asked(workload, settings) if settings else workload
    if work is not None and config is not None:
        raise UsageError("a config and a workload are two jobs", hint="check one, then the other")
    if gpu is not None:
        find_gpu(gpu)
    if work is not None:
        resolve(work.model)
    environment = dict(os.environ)
    with machine.without_malformed():
        asked, wrong = _asked(work, config, tuple(sets), gpu, world_size, load)
        situation, found = Situation(asked, environment), [] if wrong is None else [wrong]
        for name, look, line in _checks(asked):
            if on_progress is not None:
                on_progress(name)
            found.extend(guarded(line, partial(look, situation)))
    return Checked(
        asked={
            "config": config, "workload": None if work is None else work.document(), "gpu": gpu,
            "world_size": asked.world_size, "load": load,
        },
        findings=tuple(sorted(found, key=lambda finding: SUBJECTS.index(finding.subject))),
        seconds=time.perf_counter() - began,
    )  # fmt: skip


SUBJECTS = ("machine", "settings", "config", "model", "plan")
"""In this order."""


def _asked(
    work: Workload | None,
    config: str | None,
    sets: tuple[str, ...],
    gpu: str | None,
    world_size: int | None,
    load: bool,
) -> tuple[CheckRequest, Finding | None]:
    """And what is wrong with the config, if its settings cannot be. A file that is not there, or no YAML, is an
    error."""
    if work is not None:
        return _of_workload(work, gpu, load)
    count = world_size or processes()
    if config is None:
        return CheckRequest(gpu=gpu, world_size=count, load=load), None
    _, text, where = find_config(config)
    parse_yaml(text, where)
    try:
        read, keys = job_settings.load(config, sets)
    except UsageError as error:
        if error.message.startswith("--set"):
            raise
        return CheckRequest(gpu=gpu, world_size=count), job_settings.KEYS.failed(error.message, error.hint)
    wrong: Finding | None = None
    try:
        if read.memory.gpu is not None:
            find_gpu(read.memory.gpu, flag="memory.gpu")
    except UsageError as error:
        wrong = job_settings.KEYS.failed(f"memory.gpu: {error.message}", error.hint)
        read = dataclasses.replace(read, memory=dataclasses.replace(read.memory, gpu=None))
    if world_size is None and not launched():
        count = processes_meant(read.batch) or count
    return CheckRequest(config=read, keys=keys, gpu=gpu, world_size=count, load=load), wrong


def _of_workload(work: Workload, gpu: str | None, load: bool) -> tuple[CheckRequest, Finding | None]:
    asked = partial(CheckRequest, workload=work, gpu=gpu, world_size=work.world_size, load=load)
    if not work.trains:
        return asked(), None
    try:
        from memfit.jobs.training.loops import training_config

        return asked(config=training_config(work, steps=1)), None
    except UsageError as error:
        return asked(), Line("config", "settings").failed(error.message, error.hint)
    except ImportError:  # of torch: the line on packages says so
        return asked(), None


def _checks(asked: CheckRequest) -> Iterator[tuple[str, Look, Line]]:
    """(what to tell while it runs, the check, the line that an error of it stands on)."""
    training, from_file = asked.config is not None, asked.config is not None and asked.workload is None
    of_job = training or asked.workload is not None
    yield "looking for GPUs", machine.check_gpus, machine.PRESENT
    yield "asking who holds them", machine.check_free_memory, machine.FREE
    yield "driver and torch", machine.check_build, machine.BUILD
    yield "what the card can do", machine.check_abilities, machine.ABILITIES
    yield "settings of the allocator", machine.check_allocator_settings, machine.SETTINGS
    yield "environment", machine.check_variables, machine.ENVIRONMENT
    yield "packages", machine.check_packages, machine.SET
    yield "bitsandbytes", machine.check_bitsandbytes, machine.LOADS
    if asked.job is not None and asked.job.is_quantised and asked.job.quantised_by != "bitsandbytes":
        yield "packages of quantised weights", machine.check_quantised, machine.QUANTISED
    if asked.workload is not None and asked.workload.is_compiled:
        yield "torch.compile", machine.check_compiler, machine.COMPILER
    if from_file:
        yield "keys of the config", job_settings.check_keys, job_settings.KEYS
    if of_job:
        yield "precision", job_settings.check_precision, job_settings.PRECISION
    if training:
        yield from _of_training(asked, from_file)
    elif asked.workload is not None and asked.workload.kind == "prune":
        yield "calibration data", data.check_calibration, data.CALIBRATION
    elif asked.workload is not None:  # pruning takes no more positions than there are
        yield "positions", data.check_positions, data.POSITIONS
    yield "host memory", machine.check_host_memory, machine.MEMORY
    yield "shared memory", machine.check_shared_memory, machine.SHARED
    if asked.world_size > 1 or (asked.config is not None and asked.config.workload.offload):
        yield "locked memory", machine.check_locked_memory, machine.LOCKED
    if of_job and asked.load:
        yield "loading the model", model.load_and_measure, model.LOADED
    if of_job:
        yield "planning", plan.check_fit, plan.FITS
        yield "planning", job_settings.check_attention, job_settings.ATTENTION


def _of_training(asked: CheckRequest, from_file: bool) -> Iterator[tuple[str, Look, Line]]:
    followed: list[Flow] = []
    yield "batch sizes", job_settings.check_global_batch, job_settings.BATCH
    if from_file:
        yield "settings of the engine", job_settings.check_served, job_settings.SERVED
        yield "looking for the weights", machine.check_weights_here, machine.WEIGHTS
        yield "looking for the tokenizer", data.check_tokenizer, data.TOKENIZER
        yield "reading data", data.check_readable, data.READABLE
        yield "cutting data into tokens", data.check_lengths, data.LENGTHS
        yield "padding", data.check_padding, data.PADDING
        yield "labels", data.check_labels, data.LABELS
        yield "checkpoint", job_settings.check_resume, job_settings.RESUME
    yield "the model's shapes", model.check_trained_weights, model.TRAINED
    yield "positions", data.check_positions, data.POSITIONS
    if from_file:
        yield "vocabulary", data.check_vocabulary, data.VOCABULARY
    yield "two steps of the first blocks", partial(model.check_gradients, followed=followed), model.GRADIENTS
    if asked.world_size > 1:
        yield "reductions", job_settings.check_reductions, job_settings.REDUCED
        yield "unused parameters", partial(job_settings.check_unused_parameters, followed=followed), job_settings.UNUSED
    yield "peaks beside the step", plan.check_evaluation, plan.EVALUATION
    yield "peaks beside the step", plan.check_saving, plan.SAVING
    if from_file:
        yield "disk", machine.check_room_for_checkpoints, machine.CHECKPOINTS
