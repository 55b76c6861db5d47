"""`memfit fit forward|train|lora|generate|prune`: the smallest set of changes with which a job fits a card."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memfit
from memfit.cli import output
from memfit.cli.options import (
    HOW_MUCH,
    Json,
    Option,
    add_kinds,
    group_for_job_files,
    how_much,
    option,
    read_workload,
    whole,
)
from memfit.cli.plan import FAILS
from memfit.errors import UsageError
from memfit.gpus import find_gpu
from memfit.jobs.settings import split_names
from memfit.jobs.workload import Workload

if TYPE_CHECKING:
    from memfit.fitting.fit import Fitted
    from memfit.jobfiles.file import JobFile

WHAT = {
    "forward": "Make a forward pass fit.",
    "train": "Make training of all weights fit, at the same global batch.",
    "lora": "Make LoRA fine-tuning fit, at the same global batch.",
    "qlora": "Make LoRA on 4-bit weights fit: `fit lora` from the settings of the QLoRA paper.",
    "generate": "Make generation fit.",
    "prune": "Make pruning fit, beside what the whole model on the card would take.",
}
EXAMPLES = {
    "forward": "memfit fit forward --model llama-3.1-8b --batch-size 32 --gpu 24GB",
    "train": "memfit fit train --model llama-3.1-8b --global-batch 8 --gpu 80GiB",
    "lora": "memfit fit lora --model qwen2.5-7b --rank 128 --seq-len 2048 --global-batch 16 --gpu 24GiB",
    "qlora": "memfit fit qlora --model qwen2.5-7b --seq-len 2048 --gpu 8GB",
    "generate": "memfit fit generate --model llama-3.1-8b --batch-size 64 --new-tokens 512 --gpu 24GB",
    "prune": "memfit fit prune --model llama-2-13b --gpu 16GiB",
}

CARD = ("--gpu", "NAME|SIZE", "The card (`memfit gpus`), as 24GB, or exactly 23.5GiB.")
EXTRA: dict[str, Option] = {
    "gpu": option(str, *CARD, inspect.Parameter.empty),
    "keep": option(list[str] | None, "--keep", "NAMES", "Settings that stay as they are: seq-len,rank,precision."),
    "margin": option(str, "--margin", "SHARE", "Share of the card that stays free.", "0.1", shown=True),
    "emit": option(
        str | None, "--emit", "yaml|args|python", "Write the fitted job to stdout in this form; of --from, by its "
        "format or to a FILE: the same file with only the needed keys changed.",
    ),
    "json": (Json, False),
}  # fmt: skip
TRY_COMPILE: dict[str, Option] = {
    "try_compile": option(
        bool, "--try-compile", None,
        "torch.compile may be a change too: start-up time, and minutes more to find the answer.", False,
    ),
}  # fmt: skip
"""Not of generate and prune."""
OF_TRAINING: dict[str, Option] = {
    "global_batch": option(
        str | None, "--global-batch", "N",
        "Rows of one optimizer step over all GPUs; never changed. Default: what the other flags make.",
    ),
    "ladder": option(
        bool, "--ladder", None, "Show how far the micro-batch can go, from safe to all of the card.", False,
    ),
    **HOW_MUCH,
}  # fmt: skip
OF_FILES: dict[str, Option] = {
    **EXTRA, **TRY_COMPILE, "gpu": option(str | None, *CARD), **OF_TRAINING,
    "force": option(bool, "--force -f", None, "Overwrite the file of --emit if it is there.", False),
}  # fmt: skip

SUMMARY = "Find the smallest set of changes with which a job fits a card: each set predicted, the cheapest first."


def _fit(typed: Mapping[str, Any], **asked: Any) -> int:
    return _answer(read_workload(typed, asked["gpu"]), None, **asked)


def _fit_file(job: JobFile, *, gpu: str | None, **asked: Any) -> int:
    if gpu is None:
        raise UsageError("missing option '--gpu'", hint="the card, as 24GB or 'RTX 4090'")
    find_gpu(gpu)
    _ = (workload := job.workload).source
    return _answer(workload, job, gpu=gpu, **asked)


def _answer(
    workload: Workload,
    job: JobFile | None,
    *,
    keep: list[str] | None,
    margin: str,
    emit: str | None,
    json: bool,
    try_compile: bool = False,
    global_batch: str | None = None,
    ladder: bool = False,
    steps: str | None = None,
    tokens: str | None = None,
    force: bool = False,
    gpu: str,
) -> int:
    from memfit.fitting.emit import check_form

    much = how_much(steps, tokens)
    check_form(emit, job, force)
    _check_together(much, emit, ladder, try_compile, json)
    kept = [*split_names(keep or []), *(job.kept if job else ())]
    rows = None if global_batch is None else whole("--global-batch", global_batch, 1 << 24, "256")
    asked: dict[str, Any] = {"gpu": gpu, "keep": kept, "margin": _share(margin), "global_batch": rows}
    if ladder:
        with output.working(f"climbing with {workload.model}"):
            made = memfit.ladder(workload, **asked)
        output.tell(made, json=json)
        return 0 if made.rungs else FAILS
    with output.working(f"fitting {workload.model}"):
        fitted = memfit.fit(workload, **asked | much, try_compile=try_compile)
    if emit is not None:
        return _emit(fitted, emit, job)
    output.tell(dataclasses.replace(fitted, job_file=job.to_json() if job else None), json=json)
    return 0 if fitted.fits else FAILS


def _share(margin: str) -> float:
    try:
        return float(margin)
    except ValueError as error:
        raise UsageError(f"--margin {margin!r} is not a share between 0 and 1", hint="such as 0.1") from error


def _emit(fitted: Fitted, form: str, job: JobFile | None) -> int:
    from memfit.fitting.emit import emit_as_file, headline

    if not fitted.fits:
        output.complain("nothing fits, so nothing was written", "without --emit the nearest set is shown")
        return FAILS
    made = emit_as_file(fitted, form, job)
    output.note(headline(fitted))
    output.note(f"written to {made}") if isinstance(made, Path) else output.say(made.rstrip("\n"))
    return 0


def _check_together(much: Mapping[str, int], emit: str | None, ladder: bool, try_compile: bool, json: bool) -> None:
    if much and (ladder or emit is not None):
        other = "--ladder" if ladder else "--emit"
        raise UsageError(f"--{next(iter(much))} has no effect with {other}", hint=f"without {other} the time is told")
    if emit is not None and (json or ladder):
        raise UsageError(f"--emit and {'--json' if json else '--ladder'} both say what is printed", hint="give one")
    if ladder and try_compile:
        raise UsageError("--try-compile has no effect with --ladder", hint="--compile climbs with compiled steps")


fit = group_for_job_files(
    _fit_file, OF_FILES, summary=SUMMARY, short="Find the smallest change that makes a job fit.",
    example=EXAMPLES["lora"],
    needed="memfit fit lora --model qwen2.5-7b --gpu 24GB, or memfit fit --from train.yaml --gpu 24GB",
)  # fmt: skip
for kind, said in WHAT.items():
    changes = {} if kind in ("generate", "prune") else TRY_COMPILE
    add_kinds(fit, _fit, {**EXTRA, **changes}, of_training=OF_TRAINING, what={kind: said}, examples=EXAMPLES)
