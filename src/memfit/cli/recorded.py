"""`memfit report`, `diff` and `export`: what a recording or a prediction says, how two differ, one for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import memfit
from memfit.cli import output
from memfit.cli.options import Json

FILE_HELP = "A snapshot (pickle or JSON) or a trace that memfit saved."


def report(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A snapshot, a trace, a memory log or the folder of a run.")
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write the report as one self-contained page.")
    ] = None,
    json: Json = False,
    device: Annotated[
        int | None, typer.Option("--device", metavar="N", help="The GPU to report on. Default: that which needed most.")
    ] = None,
    alloc_conf: Annotated[
        str | None,
        typer.Option("--alloc-conf", metavar="TEXT", help="Replay a trace with this PYTORCH_CUDA_ALLOC_CONF."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite the page if it is there.")] = False,
) -> None:
    """Report on a memory snapshot, a trace, a memory log or a run's folder.

    The peak and what is alive at it, by category, module and line of code; the largest allocations with their stacks;
    phases, idle memory, temporaries, growth; and, if memory ran out, what was asked for and what stood in the way.
    """
    with output.working(f"reading {file.name}"):
        reported = memfit.report(file, html=html, device=device, alloc_conf=alloc_conf, force=force)
    output.tell(reported, json=json)
    if html is not None:
        output.note(f"the page is {html}")


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help=FILE_HELP)],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same; differences are b less a.")],
    json: Json = False,
    step_a: Annotated[int | None, typer.Option("--step-a", metavar="N", help="Compare only this step of A.")] = None,
    step_b: Annotated[int | None, typer.Option("--step-b", metavar="N", help="Compare only this step of B.")] = None,
    device: Annotated[
        int | None, typer.Option("--device", metavar="N", help="The GPU to compare. Default: that which needed most.")
    ] = None,
) -> None:
    """Compare two runs, any mix of predicted and measured: by phase, category and module, and event by event.

    Allocations are paired by bytes and order, independent of addresses. What is alive at one peak and not at the other
    adds up to the difference of the peaks exactly.
    """
    with output.working("comparing"):
        found = memfit.diff(a, b, step_a=step_a, step_b=step_b, device=device)
    output.tell(found, json=json)


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A snapshot (pickle or JSON) or a trace.")],
    to: Annotated[
        str, typer.Option("--to", metavar="memory-viz|json|perfetto|speedscope|csv", help="The format to write.")
    ],
    out: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: the file's name, in this folder.")
    ] = None,
    device: Annotated[
        int | None, typer.Option("--device", metavar="N", help="The GPU to export. Default: that which needed most.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite the output if it is there.")] = False,
) -> None:
    """Write a snapshot or a trace for another tool: torch's viewer, Perfetto, speedscope, a spreadsheet.

    A predicted trace becomes a snapshot that pytorch.org/memory_viz opens like a recorded one.
    """
    from memfit.analysis.export import find_format
    from memfit.files import is_own_stream

    opens_in = find_format(to).opens_in
    with output.working(f"reading {file.name}"):
        target = memfit.export(file, to=to, output=out, device=device, force=force)
    (output.note if is_own_stream(target) else output.say)(str(target))
    output.note(f"for {opens_in}")
