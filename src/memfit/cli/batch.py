"""`memfit plan batch FILE|-`: many predictions in one process, a line of JSON in, a line of JSON out.

There is one line out for each line in that is not blank, in the same order, written when it is known: its plan, or
`{"schema": "memfit.error/1", "id": 7, "line": 3, "error": "...", "hint": "..."}` where the line was wrong.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

import memfit
from memfit.cli import output

BAD_LINES, BUG = 2, 70


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
