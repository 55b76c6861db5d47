"""Which commands there are, how a line that was typed becomes one of them, and typer as memfit wants it.

`memfit --help` answers at once, without torch. Text stays text, no option counts twice, help has headings, and an
interruption is told in a line.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

import memfit
from memfit.cli import output
from memfit.environment import refuse_what_torch_dies_of
from memfit.errors import UsageError

A_SENTENCE = 200
REST = "Options"


@dataclass(frozen=True)
class _TextAsItIs:
    """In place of an option's converter. typer gives every value to pydantic, also an option that was not given and
    text that is to stay text; to import that takes as long as the rest of a plan whose trace is known, and typer has no
    switch for it. What does have to be converted goes the usual way."""

    make: Callable[[], Any]

    def coerce(self, value: Any, *, param: Any, ctx: Any) -> Any:
        many, annotation = param.multiple or param.nargs == -1, param.type_descriptor.annotation
        _refuse_empty_place(param, value, annotation)
        if value is None:
            return () if many else None
        if annotation is str and isinstance(value, str):
            return value
        if annotation == list[str] and many and all(isinstance(each, str) for each in value):
            return list(value)
        return self.make().coerce(value, param=param, ctx=ctx)


def _refuse_empty_place(param: Any, value: Any, annotation: Any) -> None:
    """Python takes an empty path for the current folder: a variable that the shell did not know would be answered about
    whatever lies there."""
    if "" not in (value if isinstance(value, (list, tuple)) else [value]):
        return
    metavar = param.metavar or ""
    if Path in (annotation, *get_args(annotation)) or not {"FILE", "FOLDER"}.isdisjoint(metavar.split("|")):
        said = metavar.split("|")[0] if param.param_type_name == "argument" else max(param.opts, key=len)
        raise UsageError(f"{said} is empty", hint="is a variable in the command not set?")


def _late(parameters: list[Any]) -> list[Any]:
    for each in parameters:
        make = getattr(each, "get_runtime_param", None)
        if make is not None and not isinstance(make, partial):
            each.get_runtime_param = partial(_TextAsItIs, make)
    return parameters


def _once(parser: Any) -> Any:
    """Of an option that is given twice typer would take the last, without a word about the first."""
    parse = parser.parse_args

    def parse_once(args: list[str]) -> Any:
        found = parse(args=args)
        for option, count in Counter(found[-1]).items():
            if count > 1 and not option.multiple and (not option.is_flag or option.secondary_opts):
                raise UsageError(f"{option.opts[0]} is given {count} times", hint="only one of them could count")
        return found

    parser.parse_args = parse_once
    return parser


class _AsTyped:
    def get_params(self, ctx: Any) -> list[Any]:
        return _late(super().get_params(ctx))  # type: ignore[misc]

    def make_parser(self, ctx: Any) -> Any:
        return _once(super().make_parser(ctx))  # type: ignore[misc]


class Command(_AsTyped, TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        """Of an interruption typer makes an exit code, without a word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            output.complain("interrupted")
            raise


class Grouped(Command):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Under the headings given as `rich_help_panel`, in the order they occur."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or REST, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class Group(_AsTyped, TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """What a command does is wrapped where it takes more than a line: typer would cut it off."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, self.commands[name].get_short_help_str(A_SENTENCE)) for name in self.list_commands(ctx)]
            )


WITH_TORCH = ("plan", "fit", "gate", "table", "prune", "train", "profile")
"""Those that import torch. `check` looks at the variables itself."""


COMMANDS: dict[str, str | None] = {
    "plan": None,
    "fit": None,
    "table": "memfit table --models 7b,13b --workloads prune,lora --gpus 16GB,24GB --format markdown",
    "check": None,
    "prune": (
        "memfit prune --model ./llama-3.2-1b --prune-method wanda --sparsity-ratio 0.5 --save out/wanda --log-memory"
    ),
    "train": "memfit train --config smollm2-lora-demo --output-dir outputs/demo",
    "profile": None,
    "gate": "memfit gate examples/gate.yaml --baseline memory.json",
    "explain": "memfit explain train.log --kind lora --model qwen2.5-7b --batch-size 1 --seq-len 2048 --rank 128",
    "serve": "memfit serve --dir outputs",
    "watch": "memfit watch --interval 2 --csv memory.csv",
    "report": "memfit report snapshot.pickle --html report.html",
    "diff": "memfit diff predicted.npz snapshot.pickle --step-a 2 --step-b 1",
    "export": "memfit export predicted.npz --to memory-viz",
    "mcp": "memfit mcp",
    "models": "memfit models --json",
    "gpus": "memfit gpus",
}
"""In the order of the help, with an example; a group has its own. Each is what its module in `memfit.cli` is called."""


ELSEWHERE = {
    "mcp": "serve",
    **dict.fromkeys(("gpus", "models", "watch"), "machine"),
    **dict.fromkeys(("gate", "table"), "many_jobs"),
    **dict.fromkeys(("report", "diff", "export", "explain"), "recorded"),
    **dict.fromkeys(("train", "prune", "profile"), "running"),
}
"""Commands that have no file of their own name."""


class _InOrder(Group):
    """typer would list groups of commands after all others."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in COMMANDS if name in self.commands]


def _say_version(wanted: bool) -> None:
    if wanted:
        output.say(f"memfit {memfit.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


def app_of(names: Iterable[str] = tuple(COMMANDS)) -> typer.Typer:
    """The command line with these commands only: what is not asked for is not imported."""
    app = typer.Typer(
        name="memfit",
        cls=_InOrder,
        help="GPU memory of transformer jobs, known before they run.",
        epilog=output.example("memfit plan train --model gpt2 --batch-size 8 --seq-len 1024 --gpu 'RTX 4090'"),
        context_settings={
            "token_normalize_func": lambda token: token.replace("_", "-"),
            "help_option_names": ["-h", "--help"],
            "max_content_width": 100,
        },
        add_completion=True,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain help: rich's boxes cut long flags short
    )
    app.callback()(_root)
    for name in names:
        module = import_module(f"memfit.cli.{ELSEWHERE.get(name, name)}")
        command, example = getattr(module, name), COMMANDS[name]
        if example is None:
            app.add_typer(command, name=name)
        else:
            app.command(cls=Grouped, epilog=output.example(example))(command)
    return app


def run_command(typed: list[str]) -> int:
    """What a command returns is its exit code; what the option parser refuses is told here."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its remarks on configs are none of the user's business
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # nor is which kernels for the CPU it lacks
    try:
        app = app_of(typed[:1]) if typed and typed[0] in COMMANDS else app_of()
        if typed and typed[0] in WITH_TORCH:
            refuse_what_torch_dies_of(os.environ)
        code = app(typed, prog_name="memfit", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
        if type(error).__name__ == "NoSuchOption" and context is not None:
            from memfit.cli.other_names import said_of

            output.complain_of_usage(error, said_of(str(option), context, typed))
            return error.exit_code
        output.complain_of_usage(error)
        return error.exit_code
