"""`memfit export FILE --to FORMAT`: a run for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import memfit
from memfit.cli import output


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
