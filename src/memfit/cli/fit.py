"""`memfit fit forward|train|lora|generate|prune`: the smallest set of changes with which a job fits a card."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memfit
from memfit.cli import output
from memfit.cli.options import HOW_MUCH, Json, add_job_files, add_kinds, how_much, read_workload
from memfit.cli.plan import FAILS
from memfit.cli.typed import Group
from memfit.errors import UsageError
from memfit.files import check_free, writing, written_whole
from memfit.gpus import find_gpu
from memfit.jobs.spellings import plain_name, split_names
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

GPU_FLAG = typer.Option(
    "--gpu", metavar="NAME|SIZE", show_default=False, help="The card (`memfit gpus`), as 24GB, or exactly 23.5GiB."
)
KEEP_FLAG = typer.Option(
    "--keep", metavar="NAMES", show_default=False, help="Settings that stay as they are: seq-len,rank,precision."
)
MARGIN_FLAG = typer.Option("--margin", metavar="SHARE", help="Share of the card that stays free.")
GLOBAL_FLAG = typer.Option(
    "--global-batch",
    metavar="N",
    show_default=False,
    help="Rows of one optimizer step over all GPUs; never changed. Default: what the other flags make.",
)
LADDER_FLAG = typer.Option("--ladder", help="Show how far the micro-batch can go, from safe to all of the card.")
EMIT_FLAG = typer.Option(
    "--emit",
    metavar="yaml|args|python",
    show_default=False,
    help="Write the fitted job to stdout in this form; of "
    "--from, by its format or to a FILE: the same file with only the needed keys changed.",
)
COMPILE_FLAG = typer.Option(
    "--try-compile", help="torch.compile may be a change too: start-up time, and minutes more to find the answer."
)

EXTRA: dict[str, tuple[Any, Any]] = {
    "gpu": (Annotated[str, GPU_FLAG], inspect.Parameter.empty),
    "keep": (Annotated[list[str] | None, KEEP_FLAG], None),
    "margin": (Annotated[str, MARGIN_FLAG], "0.1"),
    "try_compile": (Annotated[bool, COMPILE_FLAG], False),
    "emit": (Annotated[str | None, EMIT_FLAG], None),
    "json": (Json, False),
}
OF_TRAINING: dict[str, tuple[Any, Any]] = {
    "global_batch": (Annotated[str | None, GLOBAL_FLAG], None),
    "ladder": (Annotated[bool, LADDER_FLAG], False),
    **HOW_MUCH,
}

FORCE = (Annotated[bool, typer.Option("--force", "-f", help="Overwrite the file of --emit if it is there.")], False)
SUMMARY = "Find the smallest set of changes with which a job fits a card: each set predicted, the cheapest first."

fit = typer.Typer(
    cls=Group,
    help=SUMMARY,
    short_help="Find the smallest change that makes a job fit.",
    epilog=output.example(EXAMPLES["lora"]),
    no_args_is_help=True,
)


def _fit(
    typed: Mapping[str, Any],
    *,
    gpu: str,
    keep: list[str] | None,
    margin: str,
    try_compile: bool,
    emit: str | None,
    json: bool,
    global_batch: str | None = None,
    ladder: bool = False,
    steps: str | None = None,
    tokens: str | None = None,
) -> int:
    return _answer(
        read_workload(typed, gpu), None, gpu=gpu, keep=keep, margin=margin, try_compile=try_compile, emit=emit,
        json=json,
        global_batch=global_batch, ladder=ladder, much=how_much(steps, tokens), force=False,
    )  # fmt: skip


def _fit_file(job: JobFile, *, gpu: str | None, steps: str | None, tokens: str | None, **asked: Any) -> int:
    if gpu is None:
        raise UsageError("missing option '--gpu'", hint="the card, as 24GB or 'RTX 4090'")
    find_gpu(gpu)
    return _answer(job.workload, job, gpu=gpu, much=how_much(steps, tokens), **asked)


def _answer(
    workload: Workload,
    job: JobFile | None,
    *,
    gpu: str,
    keep: list[str] | None,
    margin: str,
    try_compile: bool,
    emit: str | None,
    json: bool,
    global_batch: str | None,
    ladder: bool,
    much: dict[str, int],
    force: bool,
) -> int:
    if much and (ladder or emit is not None):
        other = "--ladder" if ladder else "--emit"
        raise UsageError(f"--{next(iter(much))} has no effect with {other}", hint=f"without {other} the time is told")
    _check_together(emit, json, ladder, job, force)
    kept = [plain_name(name) for name in split_names(keep or [])]
    if job is not None:
        _ = workload.source
        kept += [name for name in job.kept if name not in kept]
    asked: dict[str, Any] = {
        "gpu": gpu, "keep": kept, "margin": _share(margin), "global_batch": _rows(global_batch),
    }  # fmt: skip
    if ladder:
        if try_compile:
            raise UsageError("--try-compile has no effect with --ladder", hint="--compile climbs with compiled steps")
        return _ladder(workload, json=json, **asked)
    with output.working(f"fitting {workload.model}"):
        fitted = memfit.fit(
            workload, **asked, try_compile=try_compile, steps=much.get("steps"), tokens=much.get("tokens")
        )
    if job is not None:
        fitted = dataclasses.replace(fitted, job_file=job.to_json())
    if emit is not None:
        return _emit(fitted, emit, job)
    output.tell(fitted, json=json)
    return 0 if fitted.fits else FAILS


def _ladder(workload: Workload, *, json: bool, **asked: Any) -> int:
    with output.working(f"climbing with {workload.model}"):
        made = memfit.ladder(workload, **asked)
    output.tell(made, json=json)
    return 0 if made.rungs else FAILS


def _emit(fitted: Fitted, form: str, job: JobFile | None) -> int:
    from memfit.fitting.emit import FORMS, emit, headline

    if not fitted.fits:
        output.complain("nothing fits, so nothing was written", "without --emit the nearest set is shown")
        return FAILS
    text = emit(fitted, form) if form in FORMS or job is None else job.write(fitted.fitted)
    output.note(headline(fitted))
    if form not in FORMS and job is not None and form not in [each.name for each in job.formats]:
        place = Path(form)
        with writing(place, "--emit"), written_whole(place) as beside:
            beside.write_text(text, encoding="utf-8")
        output.note(f"written to {place}")
        return 0
    output.say(text.rstrip("\n"))
    return 0


def _check_together(emit: str | None, json: bool, ladder: bool, job: JobFile | None, force: bool) -> None:
    from memfit.fitting.emit import FORMS

    if emit is not None and emit not in FORMS:
        _check_written_back(emit, job, force)
    if emit is not None and (json or ladder):
        raise UsageError(f"--emit and {'--json' if json else '--ladder'} both say what is printed", hint="give one")


def _check_written_back(emit: str, job: JobFile | None, force: bool) -> None:
    """The name of the file's own format, or a file to write."""
    from memfit.fitting.emit import FORMS

    own = [each.name for each in job.formats] if job else []
    if emit in own:
        return
    if job is None or not Path(emit).suffix:
        files = f", or a file such as fitted{job.files[0].suffix}" if job else ""
        raise UsageError(f"--emit {emit!r} is not one of {', '.join([*FORMS, *own])}{files}")
    check_free(Path(emit), "--emit", force, inputs=job.files)


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"--margin {text!r} is not a share between 0 and 1", hint="such as 0.1") from error


def _rows(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1 << 24:
        raise UsageError(f"--global-batch {text!r} is not a whole number of rows", hint="such as 256")
    return int(text)


add_job_files(
    fit, _fit_file, {**EXTRA, "gpu": (Annotated[str | None, GPU_FLAG], None), **OF_TRAINING, "force": FORCE},
    summary=SUMMARY, needed="memfit fit lora --model qwen2.5-7b --gpu 24GB, or memfit fit --from train.yaml --gpu 24GB",
)  # fmt: skip
add_kinds(fit, _fit, EXTRA, of_training=OF_TRAINING, what=WHAT, examples=EXAMPLES)
