"""`memfit explain FILE|-`: an out-of-memory error, from a message, a log, a snapshot or a run's folder."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

import memfit
from memfit.cli import output
from memfit.cli.options import Json, read_settings, with_any_option
from memfit.errors import UsageError
from memfit.jobs.settings import KINDS, QLORA

NOTHING_FOUND = 1
PANEL = "The job"

FILE = typer.Argument(
    metavar="FILE|-",
    show_default=False,
    help="A log, a snapshot, a memory log or the folder of a run; `-` or nothing is a text on stdin.",
)
KIND_FLAG = typer.Option(
    "--kind",
    metavar="|".join((*KINDS, QLORA)),
    show_default=False,
    rich_help_panel=PANEL,
    help="What kind of job it was.",
)
CONFIG_FLAG = typer.Option(
    "--config",
    metavar="FILE|NAME",
    show_default=False,
    rich_help_panel=PANEL,
    help="The job as a config of `memfit train`, or as another tool's job file, instead of flags.",
)
GPU_FLAG = typer.Option(
    "--gpu", metavar="NAME|SIZE", show_default=False, help="The card to predict for. Default: the one in the message."
)

EXTRA: dict[str, tuple[Any, Any]] = {
    "file": (Annotated[str | None, FILE], None),
    "kind": (Annotated[str | None, KIND_FLAG], None),
    "config": (Annotated[str | None, CONFIG_FLAG], None),
    "gpu": (Annotated[str | None, GPU_FLAG], None),
    "json": (Json, False),
}


def _explain(
    *, file: str | None, kind: str | None, config: str | None, gpu: str | None, json: bool, **given: Any
) -> int:
    if kind not in (None, *KINDS, QLORA):
        raise UsageError(f"--kind {kind!r} is not one of {', '.join((*KINDS, QLORA))}")
    source = _stdin() if file in (None, "-") else _path(str(file))
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in read_settings(given).items()
    }
    with output.working("explaining"):
        told = memfit.explain(source, gpu=gpu, config=config, kind=kind, **settings)
    output.tell(told, json=json)
    return 0 if told.known else NOTHING_FOUND


def _path(file: str) -> Any:
    from pathlib import Path

    return Path(file)


def _stdin() -> Any:
    if sys.stdin.isatty():
        raise UsageError(
            "no FILE, and nothing is piped in", hint="memfit explain train.log, or memfit explain < oom.txt"
        )
    return sys.stdin.buffer


explain = with_any_option(_explain, EXTRA)
explain.__name__ = "explain"
explain.__doc__ = """Explain an out-of-memory error and what to do about it.

Says what happened and by how much, which tensor failed, in which phase, what helps and what does not. Takes a pasted
message, a log with one or several in it, a snapshot, a memory log or a run's folder. Without the job the answer is in
words; with it (flags, a config, or what the log tells) every fix is predicted on that very job.

Exit code 1: there is no out-of-memory error in it.
"""
