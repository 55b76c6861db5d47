"""`memfit diff A B`: two runs, predicted or measured, and what explains the difference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import memfit
from memfit.cli import output
from memfit.cli.options import Json

FILE_HELP = "A snapshot (pickle or JSON) or a trace that memfit saved."


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
