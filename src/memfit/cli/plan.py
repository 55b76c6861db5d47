"""`memfit plan forward|train|lora|...`: predict a job's memory without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import memfit
from memfit.cli import output
from memfit.cli.many_jobs import batch
from memfit.cli.options import HOW_MUCH, Json, Option, add_job_files, add_kinds, how_much, option, read_workload
from memfit.cli.script import script
from memfit.cli.typed import Command, Group
from memfit.errors import UsageError
from memfit.files import check_free, files_of_model, writing
from memfit.gpus import find_gpu
from memfit.jobs.workload import Workload
from memfit.tracing.compiled.settings import graphs_told

if TYPE_CHECKING:
    from memfit.jobfiles.file import JobFile
    from memfit.planning.predict import Plan

FAILS = 1

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

plan = typer.Typer(
    cls=Group,
    help=SUMMARY,
    short_help="Predict a job's peak memory, without a GPU.",
    epilog=output.example(EXAMPLES["lora"]),
    no_args_is_help=True,
)


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
    if save_trace is not None:
        with writing(save_trace, "--save-trace"):
            made.trace.save(save_trace)
    output.tell(made, json=json)
    return FAILS if made.verdict == "fails" else 0


def _with_duration(made: Plan, workload: Workload, asked: dict[str, int]) -> Plan:
    from memfit.fitting.durations import with_duration

    made, why_none = with_duration(made, workload, **asked)
    if why_none is not None and asked:
        output.note(f"note: no time: {why_none}")
    return made


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
