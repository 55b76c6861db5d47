"""`memfit plan batch`, `memfit gate` and `memfit table`: many jobs at once.

Of `plan batch` there is one line out for each line in that is not blank, in the same order, written when it is known:
its plan, or `{"schema": "memfit.error/1", "id": 7, "line": 3, "error": "...", "hint": "..."}` where the line was wrong.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

import memfit
from memfit.cli import output
from memfit.cli.options import Json
from memfit.errors import UsageError
from memfit.jobs.settings import split_names

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


FORMATS = ("terminal", "markdown", "csv", "json")


def table(
    models: Annotated[
        list[str] | None,
        typer.Option("--models", metavar="NAMES", help="a,b or the flag repeated. Default: 1b,3b,7b,13b,30b,70b."),
    ] = None,
    workloads: Annotated[
        list[str] | None,
        typer.Option("--workloads", metavar="NAMES", help="Default: prune,lora,train,forward,generate."),
    ] = None,
    gpus: Annotated[
        list[str] | None,
        typer.Option("--gpus", metavar="NAMES", help="Default: 8GB,12GB,16GB,24GB,40GB,48GB,80GB,141GB."),
    ] = None,
    seq_len: Annotated[
        int, typer.Option("--seq-len", "--seqlen", "--context-length", metavar="N", help="Tokens in a sequence.")
    ] = 2048,
    nsamples: Annotated[
        int | None,
        typer.Option("--nsamples", metavar="N", help="Windows of text to calibrate on, for pruning. Default: 128."),
    ] = None,
    guides: Annotated[
        bool, typer.Option("--guides/--no-guides", help="Beside it, what people's guides say, checked.")
    ] = True,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="|".join(FORMATS), help="What to write on stdout. Default: terminal."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Show models against workloads against cards: what fits where.

    The quick-reference table and the decision matrix of the guides on pruning, computed: weights, activations and total
    of each job in GiB, the smallest card and the one to take, with the guides' own numbers beside them. It takes half a
    minute, less where its traces are known. CSV has the jobs alone, sizes in bytes.
    """
    if form is not None and form not in FORMATS:
        raise UsageError(f"--format {form!r} is not one of {', '.join(FORMATS)}")
    if json and form not in (None, "json"):
        raise UsageError(f"--json and --format {form} both say what is written", hint="give one")
    from memfit.fitting.table import GPUS, MODELS, WORKLOADS, make_table

    columns = ("bar", "count", "elapsed", "{task.description}")
    with output.bar(*columns, redirect_stdout=False) as tell, redirect_stdout(sys.stderr):
        made = make_table(
            _names("--models", models, MODELS),
            _names("--workloads", workloads, WORKLOADS),
            _names("--gpus", gpus, GPUS),
            seq_len=seq_len,
            nsamples=nsamples,
            guides=guides,
            on_step=lambda what, done, total: tell(description=what, completed=done, total=total),
        )
    _write(made.to_json(), "json" if json else form or "terminal")


def _names(flag: str, typed: list[str] | None, usual: Sequence[str]) -> Sequence[str]:
    if typed is None:
        return usual
    if not (found := split_names(typed)):
        raise UsageError(
            f"{flag} is empty", hint=f"such as {flag} {','.join(usual[:2])}; without it: {','.join(usual)}"
        )
    return found


def _write(document: dict[str, object], form: str) -> None:
    if form in ("json", "terminal"):
        output.tell_document(document, json=form == "json")
    else:
        from memfit.render.table import as_csv, as_markdown

        output.say((as_csv if form == "csv" else as_markdown)(document))
