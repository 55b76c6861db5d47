"""`memfit report FILE`: what a recording, a prediction or a memory log says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import memfit
from memfit.cli import output
from memfit.cli.options import Json


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
