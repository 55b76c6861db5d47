"""`memfit table`: models against workloads against cards."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from memfit.cli import output
from memfit.errors import UsageError
from memfit.jobs.settings import split_names

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
            split_names(models or []) or MODELS,
            split_names(workloads or []) or WORKLOADS,
            split_names(gpus or []) or GPUS,
            seq_len=seq_len,
            nsamples=nsamples,
            guides=guides,
            on_step=lambda what, done, total: tell(description=what, completed=done, total=total),
        )
    _write(made.to_json(), "json" if json else form or "terminal")


def _write(document: dict[str, object], form: str) -> None:
    if form == "json":
        output.print_json(document)
    elif form == "terminal":
        from memfit.render.table import show_table

        output.show(show_table, document)
    else:
        from memfit.render.table import as_csv, as_markdown

        output.say((as_csv if form == "csv" else as_markdown)(document))
