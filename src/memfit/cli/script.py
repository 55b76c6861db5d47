"""`memfit plan script -- train.py ARGS`: a program as it is, run without a GPU for a few steps, and planned."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from memfit.cli import output
from memfit.cli.options import Json, whole
from memfit.errors import UsageError
from memfit.files import check_free, writing

FAILS, NO_ANSWER = 1, 2
ANSWERS: dict[str, bool | Literal["even"]] = {"true": True, "false": False, "yes": True, "no": False, "even": "even"}


def script(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND", help="What you would run: train.py ARGS, -m package.train ARGS, torchrun ..."
        ),
    ],
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME|SIZE", help="A card (`memfit gpus`), or its size: gives a verdict."),
    ] = None,
    steps: Annotated[
        str, typer.Option("--steps", metavar="N", help="Stop after so many steps of the optimizer.")
    ] = "3",
    seconds: Annotated[
        str, typer.Option("--seconds", metavar="S", help="Give up where the script takes longer than this.")
    ] = "600",
    answer: Annotated[
        list[str] | None,
        typer.Option(
            "--answer",
            metavar="FILE:LINE=VALUE",
            help="Where the script decides by a value nobody knows: true, a number; even, where it chooses experts.",
        ),
    ] = None,
    tries: Annotated[
        list[str] | None,
        typer.Option("--try", metavar="KEY=V,V", help="Plan it with each of these values of one of its arguments."),
    ] = None,
    synthetic_data: Annotated[
        bool, typer.Option("--synthetic-data", help="Make up tokenizers and data sets that are not on this machine.")
    ] = False,
    alloc_conf: Annotated[
        str, typer.Option("--alloc-conf", help="As PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True, ...")
    ] = "",
    json: Json = False,
    save_trace: Annotated[
        Path | None, typer.Option("--save-trace", metavar="FILE", help="Keep the allocation events in this file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite that file if it is there.")] = False,
) -> int:
    """Predict a program of your own: it runs unmodified, without a GPU, until its optimizer has made a few steps."""
    from memfit.gpus import find_gpu
    from memfit.scripts.command import read_command
    from memfit.scripts.watched import watch

    if gpu is not None:
        find_gpu(gpu)
    settings: dict[str, Any] = {
        "gpu": gpu,
        "steps": whole("--steps", steps, 10**6, "3"),
        "seconds": whole("--seconds", seconds, 10**6, "3"),
        "answers": dict(_answer(text) for text in answer or []),
        "alloc_conf": alloc_conf,
        "synthetic_data": synthetic_data,
    }
    changes = dict(_change(text) for text in tries or [])
    if save_trace is not None:
        check_free(save_trace, "--save-trace", force)
        if changes:
            raise UsageError("--save-trace keeps one trace, and --try makes several", hint="leave one of them out")

    is_own = output.is_of_this_process()

    def plan() -> int:
        if is_own:
            os.environ.update(read_command(command).environment)  # torch reads some of them when it is imported
        return _try(command, changes, settings, json) if changes else _plan(command, settings, json, save_trace)

    if not json and sys.stderr.isatty():  # a bar would be drawn over by what the script itself prints
        output.note(f"planning {shlex.join(command)}: it runs here without a GPU, for {steps} steps or some more")
    if not is_own or not hasattr(os, "fork"):
        return plan()
    code, text = watch(plan)
    output.say_all(text)
    return code


def _plan(command: list[str], settings: dict[str, Any], json: bool, save_trace: Path | None) -> int:
    from memfit.scripts.plan import trace_script

    made = trace_script(command, **settings)
    if save_trace is not None:
        with writing(save_trace, "--save-trace"):
            made.trace.save(save_trace)
    output.tell(made, json=json)
    return FAILS if made.verdict == "fails" else 0


def _try(command: list[str], changes: dict[str, list[str]], settings: dict[str, Any], json: bool) -> int:
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
