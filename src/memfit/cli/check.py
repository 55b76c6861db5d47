"""`memfit check`: the pre-flight of machine, settings, config, model and plan, before hours are spent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import memfit
from memfit.cli import output
from memfit.cli.options import Json, Option, add_kinds, group_for_job_files, option, read_workload
from memfit.errors import UsageError
from memfit.jobs.settings import KINDS, QLORA, flag
from memfit.jobs.workload import Workload

if TYPE_CHECKING:
    from memfit.jobfiles.file import JobFile

FAILED = 1

WHAT = {
    "forward": "Check a forward pass without gradients, with the flags of `memfit plan forward`.",
    "train": "Check training of all weights, with the flags of `memfit plan train`.",
    "lora": "Check LoRA fine-tuning, with the flags of `memfit plan lora`.",
    "qlora": "Check LoRA as the QLoRA paper does it, with the flags of `memfit plan qlora`.",
    "generate": "Check generation, with the flags of `memfit plan generate`.",
    "prune": "Check one-shot pruning, with the flags of `memfit plan prune`.",
}
EXTRA: dict[str, Option] = {
    "gpu": option(str | None, "--gpu", "NAME|SIZE", "The card to check against. Default: the one that is here."),
    "load": option(
        bool, "--load", None, "Really load the model, in a process of its own, and say what it took.", False,
    ),
    "json": (Json, False),
}  # fmt: skip
OF_CONFIG: dict[str, Option] = {
    "config": option(
        str | None, "--config", "FILE|NAME",
        "A training config, as `memfit train` takes it. Without one, only the machine is looked at.",
    ),
    "sets": option(
        list[str] | None, "--set", "KEY=VALUE", "Replace a setting of the config; may be given several times.",
    ),
}  # fmt: skip
SUMMARY = "Check machine, settings, config, model and plan before a run: each line says what to do next."


def _check(
    job: JobFile | None,
    *,
    config: str | None,
    sets: list[str] | None,
    typed: Mapping[str, Any] | None = None,
    **asked: Any,
) -> int:
    if job is not None:
        if config is not None:
            raise UsageError("--from and --config are two jobs", hint="check one, then the other")
        return _show(job.workload, job, **asked)
    if sets and config is None:
        raise UsageError("--set changes a config, and no --config is given")
    settings = dict(typed or {})
    count = settings.pop("world_size", None)
    if settings:
        raise UsageError(f"{flag(next(iter(settings)))} is of a job, and none is named", hint="memfit check lora ...")
    if count is not None and count < 1:
        raise UsageError(f"--world-size {count} is no number of processes")
    return _show(None, None, config=config, sets=tuple(sets or ()), world_size=count, **asked)


def _show(workload: Workload | None, job: JobFile | None, *, json: bool, **asked: Any) -> int:
    with output.working() as tell:
        checked = memfit.check(workload=workload, on_progress=tell, **asked)
    if job is not None:
        checked = dataclasses.replace(checked, job_file=job.to_json())
    output.tell(checked, json=json)
    return FAILED if checked.failed else 0


EXAMPLES = {kind: f"memfit check {kind} --model qwen2.5-7b --gpu 24GB" for kind in (*KINDS, QLORA)}
check = group_for_job_files(
    _check, {**OF_CONFIG, **EXTRA}, summary=SUMMARY, short="Check machine, settings and job before a run.",
    example="memfit check --config qwen2.5-7b-lora-24gb --gpu 24GB", needed="",
)  # fmt: skip
add_kinds(check, lambda typed, **asked: _show(read_workload(typed), None, **asked), EXTRA, what=WHAT, examples=EXAMPLES)
