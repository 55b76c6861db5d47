"""`memfit plan batch FILE|-`: many predictions in one process, a line of JSON in, a line of JSON out.

There is one line out for each line in that is not blank, in the same order, written when it is known: its plan, or
`{"schema": "memfit.error/1", "id": 7, "line": 3, "error": "...", "hint": "..."}` where the line was wrong.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    with _progress(file) as advance:
        for answer in output.each_quietly(answers):
            if isinstance(answer, memfit.Refusal):
                code = max(code, BUG if answer.is_bug else BAD_LINES)
                if answer.is_bug:
                    traceback.print_exception(answer.error)
            output.print_json(answer.to_json(), indent=None)
            advance()
    return code


@contextmanager
def _progress(file: str) -> Iterator[Callable[[], None]]:
    """A bar on stderr if somebody looks on there, and the answers go elsewhere."""
    err = output.errors_console()
    if not err.is_terminal or sys.stdout.isatty():
        yield lambda: None
        return
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("workloads"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("workloads", total=_count(Path(file)))
        yield lambda: progress.advance(task)


def _count(path: Path) -> int | None:
    """Lines to do; unknown for a pipe, which can be read only once."""
    from memfit.planning.many import read_lines

    if not path.is_file():
        return None
    with path.open("rb") as stream:
        return sum(1 for _ in read_lines(stream))
