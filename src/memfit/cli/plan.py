"""`memfit plan forward|train|lora|...`: predict a job's memory without a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memfit
from memfit.cli import late_conversion, output
from memfit.cli.batch import batch
from memfit.cli.options import Json, with_options_of
from memfit.cli.script import script
from memfit.errors import UsageError
from memfit.files import check_free, files_of_model, writing
from memfit.jobs.workload import KINDS, Workload

if TYPE_CHECKING:
    from memfit.planning.predict import Plan

FAILS = 1

WHAT = {
    "forward": "Predict a forward pass without gradients.",
    "train": "Predict training of all weights.",
    "lora": "Predict LoRA fine-tuning: adapters are trained, the base model is frozen.",
    "generate": "Predict token-by-token generation.",
    "prune": "Predict one-shot pruning, one block of the model on the GPU at a time.",
}
EXAMPLES = {
    "forward": "memfit plan forward --model llama-3.1-8b --batch-size 4 --seq-len 4096 --gpu 24GB",
    "train": "memfit plan train --model gpt2 --batch-size 8 --seq-len 1024 --precision fp32 --gpu 'RTX 4090'",
    "lora": "memfit plan lora --model qwen2.5-7b --seq-len 1536 --rank 128 --grad-checkpointing --gpu 24GiB",
    "generate": "memfit plan generate --model llama-3.1-8b --batch-size 8 --new-tokens 512 --gpu 24GB",
    "prune": "memfit plan prune --model llama-3.3-70b --gpu 16GiB",
}

GPU_FLAG = typer.Option(
    "--gpu", metavar="NAME|SIZE", help="A card (`memfit gpus`), its label as 24GB, or exactly 23.5GiB: gives a verdict."
)
SAVE_FLAG = typer.Option("--save-trace", metavar="FILE", help="Keep the allocation events in this file.")
STEPS_FLAG = typer.Option("--steps", metavar="N", show_default=False, help="Optimizer steps: how long they take.")
TOKENS_FLAG = typer.Option(
    "--tokens", metavar="N", show_default=False, help="Tokens to train on in all: how long that takes, as 300000000."
)
NO_CACHE_FLAG = typer.Option("--no-trace-cache", help="Trace anew, and keep nothing for the next time.")
FORCE_FLAG = typer.Option("--force", "-f", help="Overwrite that file if it is there.")

EXTRA: dict[str, tuple[Any, Any]] = {
    "gpu": (Annotated[str | None, GPU_FLAG], None),
    "json": (Json, False),
    "save_trace": (Annotated[Path | None, SAVE_FLAG], None),
    "force": (Annotated[bool, FORCE_FLAG], False),
    "no_trace_cache": (Annotated[bool, NO_CACHE_FLAG], False),
}

OF_TRAINING: dict[str, tuple[Any, Any]] = {
    "steps": (Annotated[str | None, STEPS_FLAG], None),
    "tokens": (Annotated[str | None, TOKENS_FLAG], None),
}

plan = typer.Typer(
    cls=late_conversion.Group,
    help="Predict a job's peak memory, without a GPU: allocated, reserved, device; what is alive; whether it fits.",
    short_help="Predict a job's peak memory, without a GPU.",
    epilog=output.example(EXAMPLES["lora"]),
    no_args_is_help=True,
)


def _plan(
    workload: Workload, *, gpu: str | None, json: bool, save_trace: Path | None, force: bool, no_trace_cache: bool,
    steps: str | None = None, tokens: str | None = None,
) -> int:  # fmt: skip
    check_names(workload.model, gpu)
    asked = how_much(steps, tokens)
    if asked and gpu is None:
        raise UsageError(f"--{next(iter(asked))}: no card is named whose time could be told", hint="--gpu 'RTX 4090'")
    if save_trace is not None:
        check_free(save_trace, "--save-trace", force, inputs=files_of_model(workload.model))
    with output.working(f"tracing {workload.model}"):
        made = memfit.predict(workload, gpu=gpu, trace_cache=not no_trace_cache, stacks=save_trace is not None)
        made = dataclasses.replace(made, duration=_duration(made, workload, asked))
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


def how_much(steps: str | None, tokens: str | None) -> dict[str, int]:
    """What `--steps` or `--tokens` says."""
    given = {name: text for name, text in (("steps", steps), ("tokens", tokens)) if text is not None}
    if len(given) > 1:
        raise UsageError("--steps and --tokens both say how long it trains", hint="give one of them")
    for name, text in given.items():
        number = text.replace(",", "").replace("_", "")
        if not number.isascii() or not number.isdigit() or not 1 <= int(number) <= 10**18:
            raise UsageError(f"--{name} {text!r} is not a whole number above 0", hint=f"such as --{name} 5000")
        given[name] = number
    return {name: int(number) for name, number in given.items()}


def check_names(model: str, gpu: str | None) -> None:
    """What is wrong with a name is told before torch is loaded."""
    from memfit.gpus import find_gpu
    from memfit.models.registry import resolve

    if gpu is not None:
        find_gpu(gpu)
    resolve(model)


def _register(kind: str) -> None:
    flags = {**EXTRA, **(OF_TRAINING if kind in ("train", "lora") else {})}

    def run(**given: Any) -> int:
        extra = {name: given.pop(name) for name in flags}
        return _plan(Workload.from_mapping({"kind": kind, **given}), **extra)

    epilog = output.example(EXAMPLES.get(kind, f"memfit plan {kind} --model gpt2"))
    register = plan.command(name=kind, cls=late_conversion.Command, help=WHAT.get(kind), epilog=epilog)
    register(with_options_of(kind, run, flags))


for _kind in KINDS:
    _register(_kind)
plan.command(
    cls=late_conversion.Command,
    epilog=output.example("memfit plan batch examples/sweep.jsonl --gpu 24GB | jq -c '[.id, .verdict]'"),
)(batch)
plan.command(
    cls=late_conversion.Command,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=output.example("memfit plan script --gpu 'RTX 4090' -- train.py --batch_size 8"),
)(script)
