"""`memfit report`, `diff`, `export` and `explain`: what a recording says, how two differ, why memory ran out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import memfit
from memfit.cli import output
from memfit.cli.options import JSON, FlagText, Json, command_of, read_settings, with_any_option
from memfit.errors import UsageError
from memfit.jobs.settings import KINDS, QLORA

FILE = "A snapshot (pickle or JSON) or a trace that memfit saved."
REPORT: dict[str, FlagText] = {
    "file": ("", "FILE", "A snapshot, a trace, a memory log or the folder of a run."),
    "html": ("--html", "FILE", "Also write the report as one self-contained page."),
    "json": JSON,
    "device": ("--device", "N", "The GPU to report on. Default: that which needed most."),
    "alloc_conf": ("--alloc-conf", "TEXT", "Replay a trace with this PYTORCH_CUDA_ALLOC_CONF."),
    "force": ("--force -f", None, "Overwrite the page if it is there."),
}
DIFF: dict[str, FlagText] = {
    "a": ("", "A", FILE),
    "b": ("", "B", "The same; differences are b less a."),
    "json": JSON,
    "step_a": ("--step-a", "N", "Compare only this step of A."),
    "step_b": ("--step-b", "N", "Compare only this step of B."),
    "device": ("--device", "N", "The GPU to compare. Default: that which needed most."),
}
EXPORT: dict[str, FlagText] = {
    "file": ("", "FILE", "A snapshot (pickle or JSON) or a trace."),
    "to": ("--to", "memory-viz|json|perfetto|speedscope|csv", "The format to write."),
    "output": ("--output -o", "FILE", "Default: the file's name, in this folder."),
    "device": ("--device", "N", "The GPU to export. Default: that which needed most."),
    "force": ("--force -f", None, "Overwrite the output if it is there."),
}


def _report(*, file: Path, html: str | None, json: bool, **settings: Any) -> int:
    """Report on a memory snapshot, a trace, a memory log or a run's folder.

    The peak and what is alive at it, by category, module and line of code; the largest allocations with their stacks;
    phases, idle memory, temporaries, growth; and, if memory ran out, what was asked for and what stood in the way.
    """
    with output.working(f"reading {file.name}"):
        reported = memfit.report(file, html=html, **settings)
    output.tell(reported, json=json)
    if html is not None:
        output.note(f"the page is {html}")
    return 0


def _diff(*, json: bool, **settings: Any) -> int:
    """Compare two runs, any mix of predicted and measured: by phase, category and module, and event by event.

    Allocations are paired by bytes and order, independent of addresses. What is alive at one peak and not at the other
    adds up to the difference of the peaks exactly.
    """
    with output.working("comparing"):
        found = memfit.diff(**settings)
    output.tell(found, json=json)
    return 0


def _export(*, file: Path, to: str, **settings: Any) -> int:
    """Write a snapshot or a trace for another tool: torch's viewer, Perfetto, speedscope, a spreadsheet.

    A predicted trace becomes a snapshot that pytorch.org/memory_viz opens like a recorded one.
    """
    from memfit.analysis.export import find_format
    from memfit.files import is_own_stream

    opens_in = find_format(to).opens_in
    with output.working(f"reading {file.name}"):
        target = memfit.export(file, to=to, **settings)
    (output.note if is_own_stream(target) else output.say)(str(target))
    output.note(f"for {opens_in}")
    return 0


report = command_of(memfit.report, {"": REPORT}, _report)
diff = command_of(memfit.diff, {"": DIFF}, _diff)
export = command_of(memfit.export, {"": EXPORT}, _export)


NOTHING_FOUND = 1
PANEL = "The job"


def _flag(name: str, metavar: str, said: str, panel: str | None = PANEL) -> Any:
    info = typer.Option(name, metavar=metavar, show_default=False, rich_help_panel=panel, help=said)
    return Annotated[str | None, info]


CONFIG = "The job as a config of `memfit train`, or as another tool's job file, instead of flags."
FILE_ARGUMENT = typer.Argument(
    metavar="FILE|-",
    show_default=False,
    help="A log, a snapshot, a memory log or the folder of a run; `-` or nothing is a text on stdin.",
)
EXTRA: dict[str, tuple[Any, Any]] = {
    "file": (Annotated[str | None, FILE_ARGUMENT], None),
    "kind": (_flag("--kind", "|".join((*KINDS, QLORA)), "What kind of job it was."), None),
    "config": (_flag("--config", "FILE|NAME", CONFIG), None),
    "gpu": (_flag("--gpu", "NAME|SIZE", "The card to predict for. Default: the one in the message.", None), None),
    "json": (Json, False),
}


def _explain(
    *, file: str | None, kind: str | None, config: str | None, gpu: str | None, json: bool, **given: Any
) -> int:
    if kind not in (None, *KINDS, QLORA):
        raise UsageError(f"--kind {kind!r} is not one of {', '.join((*KINDS, QLORA))}")
    source = _stdin() if file is None or file == "-" else Path(file)
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in read_settings(given).items()
    }
    with output.working("explaining"):
        told = memfit.explain(source, gpu=gpu, config=config, kind=kind, **settings)
    output.tell(told, json=json)
    return 0 if told.known else NOTHING_FOUND


def _stdin() -> Any:
    if sys.stdin.isatty():
        hint = "memfit explain train.log, or memfit explain < oom.txt"
        raise UsageError("no FILE, and nothing is piped in", hint=hint)
    return sys.stdin.buffer


explain = with_any_option(_explain, EXTRA)
explain.__name__ = "explain"
explain.__doc__ = """Explain an out-of-memory error and what to do about it.

Says what happened and by how much, which tensor failed, in which phase, what helps and what does not. Takes a pasted
message, a log with one or several in it, a snapshot, a memory log or a run's folder. Without the job the answer is in
words; with it (flags, a config, or what the log tells) every fix is predicted on that very job.

Exit code 1: there is no out-of-memory error in it.
"""
