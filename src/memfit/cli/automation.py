"""`memfit gate` and `memfit mcp`: memory in CI, and memfit as tools for coding agents."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

import memfit
from memfit.cli import output
from memfit.cli.options import Json
from memfit.errors import UsageError

FAILED = 1


def gate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file with `jobs`: names, settings, limits.")],
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="FILE", help="Figures of last time, as JSON.")
    ] = None,
    tolerance: Annotated[
        str | None,
        typer.Option(
            "--tolerance", metavar="SHARE", help="How much a job may grow: 0.02 or 2%. Default: the file's, or 1%."
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="NAME|SIZE", help="The card of jobs that name none themselves.")
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Write the baseline anew: what grew is accepted.")] = False,
    json: Json = False,
) -> int:
    """Predict a list of jobs and fail if one takes more than its limit, or more than it took last time.

    Exit code 1: a job is over its limit, has grown by more than the tolerance, or cannot be planned.
    """
    with output.working("planning the jobs"):
        result = memfit.gate(file, baseline=baseline, tolerance=tolerance, gpu=gpu, update=update)
    output.tell(result, json=json)
    return 0 if result.passed else FAILED


def mcp() -> int:
    """Serve plan, fit, explain, check and report as tools for coding agents, over stdio (Model Context Protocol).

    No tool runs code or writes files. It ends when its input does.
    """
    if find_spec("mcp") is None:
        raise UsageError("`memfit mcp` needs mcp", hint="pip install 'memfit[agent]'")
    from memfit.agents.server import make_server

    make_server(memfit.__version__).run("stdio")
    return 0
