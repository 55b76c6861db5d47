"""`memfit plan forward|train|lora|...`: predict a job's memory without a GPU.

Of `plan batch` there is one line out for each line in that is not blank, in the same order, written when it is known:
its plan, or `{"schema": "memfit.error/1", "id": 7, "line": 3, "error": "...", "hint": "..."}` where the line was wrong.
"""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memfit
from memfit.cli import output
from memfit.cli.options import HOW_MUCH, Json, add_job_files, add_kinds, how_much, read_workload
from memfit.cli.script import script
from memfit.cli.typed import Command, Group
from memfit.errors import UsageError
from memfit.files import check_free, files_of_model, writing
from memfit.gpus import find_gpu
from memfit.jobs.workload import Workload

if TYPE_CHECKING:
    from memfit.jobfiles.file import JobFile
    from memfit.planning.predict import Plan

FAILS = 1
BAD_LINES, BUG = 2, 70

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

GPU_FLAG = typer.Option(
    "--gpu", metavar="NAME|SIZE", help="A card (`memfit gpus`), its label as 24GB, or exactly 23.5GiB: gives a verdict."
)
SAVE_FLAG = typer.Option("--save-trace", metavar="FILE", help="Keep the allocation events in this file.")
NO_CACHE_FLAG = typer.Option("--no-trace-cache", help="Trace anew, and keep nothing for the next time.")
FORCE_FLAG = typer.Option("--force", "-f", help="Overwrite that file if it is there.")

EXTRA: dict[str, tuple[Any, Any]] = {
    "gpu": (Annotated[str | None, GPU_FLAG], None),
    "json": (Json, False),
    "save_trace": (Annotated[Path | None, SAVE_FLAG], None),
    "force": (Annotated[bool, FORCE_FLAG], False),
    "no_trace_cache": (Annotated[bool, NO_CACHE_FLAG], False),
}

SUMMARY = "Predict a job's peak memory, without a GPU: allocated, reserved, device; what is alive; whether it fits."

plan = typer.Typer(
    cls=Group,
    help=SUMMARY,
    short_help="Predict a job's peak memory, without a GPU.",
    epilog=output.example(EXAMPLES["lora"]),
    no_args_is_help=True,
)


def _plan(
    typed: Mapping[str, Any],
    *,
    gpu: str | None,
    json: bool,
    save_trace: Path | None,
    force: bool,
    no_trace_cache: bool,
    steps: str | None = None,
    tokens: str | None = None,
) -> int:
    return _tell(
        read_workload(typed, gpu), None, gpu=gpu, json=json, save_trace=save_trace, force=force,
        no_trace_cache=no_trace_cache, asked=how_much(steps, tokens),
    )  # fmt: skip


def _plan_file(job: JobFile, *, gpu: str | None, steps: str | None, tokens: str | None, **asked: Any) -> int:
    if gpu is not None:
        find_gpu(gpu)
    return _tell(job.workload, job, gpu=gpu, asked=how_much(steps, tokens), **asked)


def _tell(
    workload: Workload,
    job: JobFile | None,
    *,
    gpu: str | None,
    json: bool,
    save_trace: Path | None,
    force: bool,
    no_trace_cache: bool,
    asked: dict[str, int],
) -> int:
    if asked and gpu is None:
        raise UsageError(f"--{next(iter(asked))}: no card is named whose time could be told", hint="--gpu 'RTX 4090'")
    if save_trace is not None:
        inputs = [*files_of_model(workload.model), *(job.files if job else ())]
        check_free(save_trace, "--save-trace", force, inputs=inputs)
    with output.working(f"tracing {workload.model}"):
        made = memfit.predict(workload, gpu=gpu, trace_cache=not no_trace_cache, stacks=save_trace is not None)
        from_file = job.to_json() if job else None
        made = dataclasses.replace(made, duration=_duration(made, workload, asked), job_file=from_file)
    if save_trace is not None:
        with writing(save_trace, "--save-trace"):
            made.trace.save(save_trace)
    output.tell(made, json=json)
    return FAILS if made.verdict == "fails" else 0


def _duration(made: Plan, workload: Workload, asked: dict[str, int]) -> dict[str, Any] | None:
    """Of a training that runs on a card whose speed is known."""
    if made.gpu is None or made.verdict == "fails" or not workload.trains:
        return None
    from memfit.fitting.durations import estimate, why_none

    time = estimate(workload, made.gpu, **asked)
    if time is None and asked:
        output.note(f"note: no time: {why_none(made.gpu)}")
    return None if time is None else time.to_json()


def batch(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="One workload as JSON a line; - is standard input.")],
    gpu: Annotated[str | None, typer.Option("--gpu", help="For lines that name no card themselves.")] = None,
) -> int:
    """Predict many jobs in one process: one workload as JSON a line in, one plan as JSON a line out."""
    code = 0
    answers = memfit.predict_many(sys.stdin.buffer if file == "-" else Path(file), gpu=gpu)
    looks_on = sys.stderr.isatty() and not sys.stdout.isatty()
    total = _count(Path(file)) if looks_on else None
    with output.bar("spinner", "workloads", "count", "elapsed", shown=looks_on, redirect_stdout=False) as tell:
        for done, answer in enumerate(output.each_quietly(answers), 1):
            if isinstance(answer, memfit.Refusal):
                code = max(code, BUG if answer.is_bug else BAD_LINES)
                if answer.is_bug:
                    traceback.print_exception(answer.error)
            output.print_json(answer.to_json(), indent=None)
            tell(completed=done, total=total)
    return code


def _count(path: Path) -> int | None:
    """Lines to do; unknown for a pipe, which can be read only once."""
    from memfit.planning.many import read_lines

    if not path.is_file():
        return None
    with path.open("rb") as stream:
        return sum(1 for _ in read_lines(stream))


add_kinds(plan, _plan, EXTRA, of_training=HOW_MUCH, what=WHAT, examples=EXAMPLES)
add_job_files(
    plan, _plan_file, {**EXTRA, **HOW_MUCH}, summary=SUMMARY,
    needed="memfit plan lora --model qwen2.5-7b, or memfit plan --from train.yaml",
)  # fmt: skip
plan.command(
    cls=Command,
    epilog=output.example("memfit plan batch examples/sweep.jsonl --gpu 24GB | jq -c '[.id, .verdict]'"),
)(batch)
plan.command(
    cls=Command,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=output.example("memfit plan script --gpu 'RTX 4090' -- train.py --batch_size 8"),
)(script)
