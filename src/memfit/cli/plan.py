"""`memfit plan`: a job's memory, predicted without a GPU: by kind (train, lora, ...), or of a program as it is."""

from __future__ import annotations

import dataclasses
import inspect
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import memfit
from memfit.cli import output
from memfit.cli.app import Command
from memfit.cli.many_jobs import batch
from memfit.cli.options import (
    HOW_MUCH,
    Json,
    Option,
    add_kinds,
    group_for_job_files,
    how_much,
    option,
    plain_command,
    read_workload,
    whole,
)
from memfit.errors import UsageError
from memfit.files import check_free, files_of_model, writing
from memfit.gpus import find_gpu
from memfit.jobs.workload import Workload
from memfit.tracing.compiled.settings import graphs_told

if TYPE_CHECKING:
    from memfit.events import Trace
    from memfit.jobfiles.file import JobFile
    from memfit.planning.predict import Plan


FAILS, NO_ANSWER = 1, 2
ANSWERS: dict[str, bool | Literal["even"]] = {"true": True, "false": False, "yes": True, "no": False, "even": "even"}


SCRIPT: dict[str, Option] = {
    "command": (
        Annotated[list[str], typer.Argument(
            metavar="-- COMMAND", help="What you would run: train.py ARGS, -m package.train ARGS, torchrun ...",
        )], inspect.Parameter.empty,
    ),
    "gpu": option(str | None, "--gpu", "NAME|SIZE", "A card (`memfit gpus`), or its size: gives a verdict."),
    "steps": option(str, "--steps", "N", "Stop after so many steps of the optimizer.", "3", shown=True),
    "seconds": option(str, "--seconds", "S", "Give up where the script takes longer than this.", "600", shown=True),
    "answer": option(
        list[str] | None, "--answer", "FILE:LINE=VALUE",
        "Where the script decides by a value nobody knows: true, a number; even, where it chooses experts.",
    ),
    "tries": option(list[str] | None, "--try", "KEY=V,V", "Plan it with each of these values of one of its arguments."),
    "synthetic_data": option(
        bool, "--synthetic-data", None,
        "Make up tokenizers, processors and data sets that are not on this machine.", False,
    ),
    "alloc_conf": option(str, "--alloc-conf", None, "As PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True, ...", ""),
    "json": (Json, False),
    "save_trace": option(Path | None, "--save-trace", "FILE", "Keep the allocation events in this file."),
    "force": option(bool, "--force -f", None, "Overwrite that file if it is there.", False),
}  # fmt: skip


def _script(
    *,
    command: list[str],
    steps: str,
    seconds: str,
    answer: list[str] | None,
    tries: list[str] | None,
    json: bool,
    save_trace: Path | None,
    force: bool,
    **settings: Any,
) -> int:
    """Predict a program of your own: it runs unmodified, without a GPU, until its optimizer has made a few steps."""
    from memfit.scripts.command import read_command
    from memfit.scripts.watched import watch

    if settings["gpu"] is not None:
        find_gpu(settings["gpu"])
    settings |= {
        "steps": whole("--steps", steps, 10**6, "3"),
        "seconds": whole("--seconds", seconds, 10**6, "3"),
        "answers": dict(_answer(text) for text in answer or []),
    }
    changes = dict(_change(text) for text in tries or [])
    if save_trace is not None:
        check_free(save_trace, "--save-trace", force)
        if changes:
            raise UsageError("--save-trace keeps one trace, and --try makes several", hint="leave one of them out")

    is_own = output.is_of_this_process()

    def plan() -> int:
        if is_own:  # before torch and transformers are imported, which read some of them or may lie on that path
            program = read_command(command)
            os.environ.update(program.environment)
            sys.path[1:1] = program.search_path
        if changes:
            return _try_script(command, changes, settings, json)
        return _plan_script(command, settings, json, save_trace)

    if not json and sys.stderr.isatty():  # a bar would be drawn over by what the script itself prints
        output.note(f"planning {shlex.join(command)}: it runs here without a GPU, for {steps} steps or some more")
    if not is_own or not hasattr(os, "fork"):
        return plan()
    code, text = watch(plan)
    output.say_all(text)
    return code


def _plan_script(command: list[str], settings: dict[str, Any], json: bool, save_trace: Path | None) -> int:
    from memfit.scripts.plan import trace_script

    return _told(trace_script(command, **settings), json, save_trace)


def _told(made: Plan, json: bool, save_trace: Path | None) -> int:
    if save_trace is not None:
        with writing(save_trace, "--save-trace"):
            _with_card(made).save(save_trace)
    output.tell(made, json=json)
    return FAILS if made.verdict == "fails" else 0


def _with_card(made: Plan) -> Trace:
    """So that a report of the file knows it; the trace itself may be of other plans too."""
    from memfit.events import CARD

    card = {} if made.gpu is None else {CARD: made.gpu.name}
    return dataclasses.replace(made.trace, facts=made.trace.facts | card)


def _try_script(command: list[str], changes: dict[str, list[str]], settings: dict[str, Any], json: bool) -> int:
    from memfit.scripts.trials import try_script

    tried = try_script(command, changes, **settings)
    output.tell(tried, json=json)
    if any(run.plan is None for run in tried.runs):
        return NO_ANSWER
    return FAILS if all(run.plan is not None and run.plan.verdict == "fails" for run in tried.runs) else 0


def _change(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    if not key.strip() or not equals or not values.strip(","):
        raise UsageError(f"--try {text!r} names no values", hint="--try batch_size=4,8,16")
    return key.strip(), [value for value in values.split(",") if value]


def _answer(text: str) -> tuple[str, bool | float | Literal["even"]]:
    place, equals, said = text.rpartition("=")
    if equals and said.lower() in ANSWERS:
        return place, ANSWERS[said.lower()]
    try:
        return place, float(said)
    except ValueError:
        raise UsageError(f"--answer {text!r} gives no value", hint="--answer train.py:123=true") from None


WHAT = {
    "forward": "Predict a forward pass without gradients.",
    "train": "Predict training of all weights.",
    "lora": "Predict LoRA fine-tuning: adapters are trained, the base model is frozen.",
    "qlora": "Predict LoRA as the QLoRA paper does it: nf4 with double quantisation, bf16 compute, "
    "kbit preparation, checkpointing, paged AdamW; flags of `plan lora` change it.",
    "generate": "Predict token-by-token generation.",
    "prune": "Predict one-shot pruning, one block of the model on the GPU at a time.",
}
EXAMPLES = {
    "forward": "memfit plan forward --model llama-3.1-8b --batch-size 4 --seq-len 4096 --gpu 24GB",
    "train": "memfit plan train --model gpt2 --batch-size 8 --seq-len 1024 --precision fp32 --gpu 'RTX 4090'",
    "lora": "memfit plan lora --model qwen2.5-7b --seq-len 1536 --rank 128 --grad-checkpointing --gpu 24GiB",
    "qlora": "memfit plan qlora --model qwen2.5-7b --seq-len 2048 --gpu 'RTX 4060 Ti 16GB'",
    "generate": "memfit plan generate --model llama-3.1-8b --batch-size 8 --new-tokens 512 --gpu 24GB",
    "prune": "memfit plan prune --model llama-3.3-70b --gpu 16GiB",
}

EXTRA: dict[str, Option] = {
    "gpu": option(
        str | None, "--gpu", "NAME|SIZE",
        "A card (`memfit gpus`), its label as 24GB, or exactly 23.5GiB: gives a verdict.",
    ),
    "json": (Json, False),
    "save_trace": option(Path | None, "--save-trace", "FILE", "Keep the allocation events in this file."),
    "force": option(bool, "--force -f", None, "Overwrite that file if it is there.", False),
    "no_trace_cache": option(bool, "--no-trace-cache", None, "Trace anew, and keep nothing for the next time.", False),
}  # fmt: skip
SUMMARY = "Predict a job's peak memory, without a GPU: allocated, reserved, device; what is alive; whether it fits."


def _plan(typed: Mapping[str, Any], **asked: Any) -> int:
    return _tell(read_workload(typed, asked["gpu"]), None, **asked)


def _plan_file(job: JobFile, *, gpu: str | None, **asked: Any) -> int:
    if gpu is not None:
        find_gpu(gpu)
    return _tell(job.workload, job, gpu=gpu, **asked)


def _tell(
    workload: Workload,
    job: JobFile | None,
    *,
    gpu: str | None,
    json: bool,
    save_trace: Path | None,
    force: bool,
    no_trace_cache: bool,
    steps: str | None = None,
    tokens: str | None = None,
) -> int:
    asked = how_much(steps, tokens)
    if asked and gpu is None:
        raise UsageError(f"--{next(iter(asked))}: no card is named whose time could be told", hint="--gpu 'RTX 4090'")
    if save_trace is not None:
        inputs = [*files_of_model(workload.model), *(job.files if job else ())]
        check_free(save_trace, "--save-trace", force, inputs=inputs)
    what = f"tracing {workload.model}"
    with output.working(what) as tell, ExitStack() as stack:
        if workload.is_compiled:
            stack.enter_context(graphs_told(lambda number: tell(f"{what}: compiling graph {number}")))
        made = memfit.predict(workload, gpu=gpu, trace_cache=not no_trace_cache, stacks=save_trace is not None)
        made = dataclasses.replace(made, job_file=job.to_json() if job else None)
        if workload.trains and made.gpu is not None:
            made = _with_duration(made, workload, asked)
    return _told(made, json, save_trace)


def _with_duration(made: Plan, workload: Workload, asked: dict[str, int]) -> Plan:
    from memfit.fitting.durations import with_duration

    made, why_none = with_duration(made, workload, **asked)
    if why_none is not None and asked:
        output.note(f"note: no time: {why_none}")
    return made


plan = group_for_job_files(
    _plan_file, {**EXTRA, **HOW_MUCH}, summary=SUMMARY, short="Predict a job's peak memory, without a GPU.",
    example=EXAMPLES["lora"], needed="memfit plan lora --model qwen2.5-7b, or memfit plan --from train.yaml",
)  # fmt: skip
add_kinds(plan, _plan, EXTRA, of_training=HOW_MUCH, what=WHAT, examples=EXAMPLES)
plan.command(
    cls=Command,
    epilog=output.example("memfit plan batch examples/sweep.jsonl --gpu 24GB | jq -c '[.id, .verdict]'"),
)(batch)
plan.command(
    cls=Command,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=output.example("memfit plan script --gpu 'RTX 4090' -- train.py --batch_size 8"),
)(plain_command(SCRIPT, _script))
