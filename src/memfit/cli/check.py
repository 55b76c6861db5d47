"""`memfit check`: the pre-flight of machine, settings, config, model and plan, before hours are spent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

import memfit
from memfit.cli import output
from memfit.cli.options import Json, add_kinds, read_workload
from memfit.cli.typed import Group
from memfit.errors import UsageError
from memfit.jobs.workload import KINDS, QLORA

FAILED = 1

WHAT = {
    "forward": "Check a forward pass without gradients, with the flags of `memfit plan forward`.",
    "train": "Check training of all weights, with the flags of `memfit plan train`.",
    "lora": "Check LoRA fine-tuning, with the flags of `memfit plan lora`.",
    "qlora": "Check LoRA as the QLoRA paper does it, with the flags of `memfit plan qlora`.",
    "generate": "Check generation, with the flags of `memfit plan generate`.",
    "prune": "Check one-shot pruning, with the flags of `memfit plan prune`.",
}
GPU = typer.Option("--gpu", metavar="NAME|SIZE", help="The card to check against. Default: the one that is here.")
LOAD = typer.Option("--load", help="Really load the model, in a process of its own, and say what it took.")
EXTRA: dict[str, tuple[Any, Any]] = {
    "gpu": (Annotated[str | None, GPU], None),
    "load": (Annotated[bool, LOAD], False),
    "json": (Json, False),
}

check = typer.Typer(
    cls=Group,
    help="Check machine, settings, config, model and plan before a run: each line says what to do next.",
    short_help="Check machine, settings and job before a run.",
    epilog=output.example("memfit check --config qwen2.5-7b-lora-24gb --gpu 24GB"),
    invoke_without_command=True,
    rich_markup_mode=None,
)


@check.callback()
def _check(
    context: typer.Context,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE|NAME",
            show_default=False,
            help="A training config, as `memfit train` takes it. Without one, only the machine is looked at.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            show_default=False,
            help="Replace a setting of the config; may be given several times.",
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size",
            metavar="N",
            show_default=False,
            help="Processes that would train. Default: what torchrun says, or 1.",
        ),
    ] = None,
    gpu: Annotated[str | None, GPU] = None,
    load: Annotated[bool, LOAD] = False,
    json: Json = False,
) -> int:
    """Check machine, settings, config, model and plan before a run: each line says what to do next."""
    if context.invoked_subcommand is not None:
        given = {"--config": config, "--set": set_, "--world-size": world_size, "--gpu": gpu, "--load": load}
        if said := [flag for flag, value in {**given, "--json": json}.items() if value]:
            raise UsageError(f"{said[0]} stands before {context.invoked_subcommand}", hint="write flags after the kind")
        return 0
    if set_ and config is None:
        raise UsageError("--set changes a config, and no --config is given")
    if world_size is not None and world_size < 1:
        raise UsageError(f"--world-size {world_size} is no number of processes")
    return _run(None, config=config, sets=tuple(set_ or ()), world_size=world_size, gpu=gpu, load=load, json=json)


def _run(typed: Mapping[str, Any] | None, *, json: bool, **asked: Any) -> int:
    workload = None if typed is None else read_workload(typed)
    with output.working() as tell:
        checked = memfit.check(workload=workload, on_progress=tell, **asked)
    output.tell(checked, json=json)
    return FAILED if checked.failed else 0


EXAMPLES = {kind: f"memfit check {kind} --model qwen2.5-7b --gpu 24GB" for kind in (*KINDS, QLORA)}
add_kinds(check, _run, EXTRA, what=WHAT, examples=EXAMPLES)
