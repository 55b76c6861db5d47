"""`memfit report FILE`: what a recording, a prediction or a memory log says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    if html is not None:
        from memfit.analysis.files import files_read

        output.check_free(html, "--html", force, inputs=files_read(file))
    with output.working(f"reading {file.name}"):
        from memfit.analysis.files import report_file

        reported = report_file(file, device=device, alloc_conf=alloc_conf)
        if html is not None:
            from memfit.render.html import write_page

            with output.writing(html, "--html"):
                write_page(reported, html)
    if json:
        output.print_json(reported.document)
    else:
        from memfit.render.report import show_report

        output.show(show_report, reported.document)
    if html is not None:
        output.note(f"the page is {html}")
