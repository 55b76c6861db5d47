"""`memfit plan batch` and `memfit gate`: many jobs, a line of JSON each, or a list with limits for CI.

Of `plan batch` there is one line out for each line in that is not blank, in the same order, written when it is known:
its plan, or `{"schema": "memfit.error/1", "id": 7, "line": 3, "error": "...", "hint": "..."}` where the line was wrong.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

import memfit
from memfit.cli import output
from memfit.cli.options import Json

FAILED, BAD_LINES, BUG = 1, 2, 70


def batch(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="One workload as JSON a line; - is standard input.")],
    gpu: Annotated[str | None, typer.Option("--gpu", help="For lines that name no card themselves.")] = None,
) -> int:
    """Predict many jobs in one process: one workload as JSON a line in, one plan as JSON a line out."""
    code = 0
    answers = memfit.predict_many(sys.stdin.buffer if file == "-" else Path(file), gpu=gpu)
    looks_on = sys.stderr.isatty() and not sys.stdout.isatty()
    total = _count(Path(file)) if looks_on else None
    with output.bar("spinner", "workloads", "count", "elapsed", shown=looks_on, redirect_stdout=False) as tell:
        for done, answer in enumerate(output.each_quietly(answers), 1):
            if isinstance(answer, memfit.Refusal):
                code = max(code, BUG if answer.is_bug else BAD_LINES)
                if answer.is_bug:
                    traceback.print_exception(answer.error)
            output.print_json(answer.to_json(), indent=None)
            tell(completed=done, total=total)
    return code


def _count(path: Path) -> int | None:
    """Lines to do; unknown for a pipe, which can be read only once."""
    from memfit.planning.many import read_lines

    if not path.is_file():
        return None
    with path.open("rb") as stream:
        return sum(1 for _ in read_lines(stream))


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
