"""The flags of `plan`, `fit` and `check`, made from the fields of `Workload`: there is no second list to keep.

A field is an option of the kinds of job that read it. Its type gives the choices, its default the default, and
`jobs/settings.py` the sentence of help. Values are checked by `Workload` alone, so a wrong one is told in the same
words on the command line, in a line of `plan batch` and in Python. Below: flags that many commands have.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from memfit.cli import output
from memfit.cli.app import Command, Group
from memfit.environment import exported
from memfit.errors import UsageError
from memfit.gpus import find_gpu
from memfit.jobs.settings import (
    ALIASES,
    AS_IN_QLORA,
    HELP,
    KINDS,
    QLORA,
    TRAININGS,
    flag,
    plain_value,
    setting_types,
    split_names,
    without_none,
)
from memfit.jobs.workload import Workload, settings_of

METAVARS = {int: "N", float: "X", str: "TEXT"}
MOST_CHOICES = 12
NUMBERS = {int: "a whole number", float: "a number"}


def add_kinds(
    group: typer.Typer,
    ask: Callable[..., int],
    extra: Mapping[str, tuple[Any, Any]],
    *,
    what: Mapping[str, str],
    examples: Mapping[str, str],
    of_training: Mapping[str, tuple[Any, Any]] | None = None,
) -> None:
    """A command for each kind of job, with its settings and some more as flags: `ask(typed, **more)`."""
    for kind in (kind for kind in (*KINDS, QLORA) if kind in what):
        more = {**extra, **((of_training or {}) if kind in (*TRAININGS, QLORA) else {})}
        register = group.command(name=kind, cls=Command, help=what[kind], epilog=output.example(examples[kind]))
        register(with_options_of(kind, partial(_ask, ask, kind, tuple(more)), more))


def _ask(ask: Callable[..., int], kind: str, more: tuple[str, ...], **given: Any) -> int:
    asked = {name: given.pop(name) for name in more}
    return ask({"kind": kind, **given}, **asked)


def read_workload(typed: Mapping[str, Any], gpu: str | None = None) -> Workload:
    """The job that was typed. A wrong name of a card or a model is told before anything slow is loaded."""
    made = Workload.from_mapping(with_exported(read_settings(typed)))
    if gpu is not None:
        find_gpu(gpu)
    _ = made.source
    return made


def read_settings(typed: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _value(name, given) for name, given in typed.items()}


def with_exported(settings: dict[str, Any]) -> dict[str, Any]:
    """What is exported for torch's allocator is what a run from here would have, unless a flag says otherwise."""
    if "alloc_conf" in settings:
        return settings
    for name, text in exported(os.environ).items():
        output.note(f"{name}={text} is exported, and planned with; --alloc-conf '' plans without it")
        return {**settings, "alloc_conf": text}
    return settings


def with_options_of(kind: str, run: Callable[..., int], extra: Mapping[str, tuple[Any, Any]]) -> Callable[..., int]:
    """`run(**typed)` as a command: typer reads the options from the signature it is given here. What was not typed is
    not passed, so that `Workload` knows what was asked for."""
    names, usual = settings_of("lora" if kind == QLORA else kind), AS_IN_QLORA if kind == QLORA else {}
    return _command(names, {**{name: _option(name, usual) for name in names}, **extra}, run)


def with_any_option(run: Callable[..., int], extra: Mapping[str, tuple[Any, Any]]) -> Callable[..., int]:
    """The same with the settings of every kind of job, none of them required."""
    names = tuple(field.name for field in dataclasses.fields(Workload) if field.name != "kind")
    return _command(names, {**extra, **{name: _unset(*_option(name)) for name in names}}, run)


def group_for_job_files(
    ask: Callable[..., int],
    extra: Mapping[str, tuple[Any, Any]],
    *,
    summary: str,
    short: str,
    example: str,
    needed: str,
) -> typer.Typer:
    """A group of commands that is one itself, for `--from`: `ask(job, **more)`. Flags of every kind of job replace what
    the file says; help lists them by kind."""

    def run(
        *, from_: list[str] | None, from_format: str | None, without: list[str] | None, kind: str | None, **given: Any
    ) -> int:
        more = {name: given.pop(name) for name in extra}
        if not from_:
            _refuse_without_file(needed, {"--from-format": from_format, "--without": without, "--kind": kind})
            return ask(None, typed=read_settings(given), **more)
        if kind is not None and kind not in KINDS:
            raise UsageError(f"--kind {kind!r} is not one of {', '.join(KINDS)}")
        from memfit.jobfiles.file import read_job

        typed = {**with_exported(read_settings(given)), **({"kind": kind} if kind else {})}
        return ask(read_job(*from_, format=from_format, without=split_names(without or []), **typed), **more)

    made = with_any_option(run, {**FROM, **extra})
    for parameter in inspect.signature(made).parameters.values():
        for info in get_args(parameter.annotation):
            if getattr(info, "rich_help_panel", None) == "The job":
                info.hidden = True
    group = typer.Typer(cls=Group, help=summary, short_help=short, epilog=output.example(example))
    group.callback(invoke_without_command=True, no_args_is_help=bool(needed), cls=Group, help=summary)(made)
    return group


def _refuse_without_file(needed: str, of_files: Mapping[str, object]) -> None:
    if said := [name for name, value in of_files.items() if value]:
        raise UsageError(f"{said[0]} is for a job file, and no --from is given")
    if needed:
        raise UsageError("no kind of job is named, and no job file", hint=needed)


def _unset(annotation: Any, _: Any) -> tuple[Any, None]:
    kind, info = get_args(annotation)
    info.show_default, info.rich_help_panel = False, "The job"
    return Annotated[without_none(kind) | None, info], None


FlagText = tuple[str, str | None, str]
"""Flags, or nothing for a file that stands alone; metavar, help."""
YES_OR_NO = inspect.Parameter("flag", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)


def command_of(
    function: Callable[..., object], told: Mapping[str, Mapping[str, FlagText]], run: Callable[..., int]
) -> Callable[..., int]:
    """`run(**settings)` as a command whose options are parameters of a function of the library, by their own types and
    defaults; heading by heading it is `told` which flags, which metavar and which help they have. What the function
    does not know is yes or no."""
    known = inspect.signature(function).parameters
    names = vars(sys.modules[function.__module__])
    made = _command(
        (),
        {
            name: _parameter(_evaluated(known.get(name, YES_OR_NO), names), heading, *words)
            for heading, each in told.items()
            for name, words in each.items()
        },
        run,
    )
    made.__name__, made.__doc__ = function.__name__, run.__doc__
    return made


def _evaluated(known: inspect.Parameter, names: Mapping[str, Any]) -> inspect.Parameter:
    """Alone: what the function returns need not be imported for it."""
    written = known.annotation
    return known.replace(annotation=eval(written, dict(names))) if isinstance(written, str) else known


def _parameter(known: inspect.Parameter, heading: str, flags: str, metavar: str | None, said: str) -> tuple[Any, Any]:
    """Where text will do it is text."""
    kinds, kind, default = get_args(known.annotation), known.annotation, known.default
    if get_origin(kind) is Iterable:
        kind, default = list[str] | None, None
    elif str in kinds:
        kind = str | None if NoneType in kinds else str
    if not flags:
        return Annotated[Path, typer.Argument(metavar=metavar, help=said)], default
    shown = default not in (None, inspect.Parameter.empty)
    info = typer.Option(*flags.split(), help=said, metavar=metavar, show_default=shown, rich_help_panel=heading or None)
    return Annotated[kind, info], default


def _command(
    names: tuple[str, ...], options: Mapping[str, tuple[Any, Any]], run: Callable[..., int]
) -> Callable[..., int]:
    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)] + [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in options.items()
    ]

    def command(context: typer.Context, **given: Any) -> int:
        if context.invoked_subcommand is not None:  # of a group, and that one does it
            _refuse_before(context)
            return 0
        rest = {name: value for name, value in given.items() if name not in names}
        return run(**{name: given[name] for name in names if _was_typed(context, name)}, **rest)

    command.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": int}
    return command


def _refuse_before(context: typer.Context) -> None:
    for each in context.command.params:
        if each.name and _was_typed(context, each.name):
            flags = f"{each.opts[0]} stands before {context.invoked_subcommand}"
            raise UsageError(flags, hint="write flags after the kind")


def _was_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _option(name: str, usual: Mapping[str, Any] = MappingProxyType({})) -> tuple[Any, Any]:
    """A field as typer wants it: an annotation that holds the flag, and a default, its own or the `usual` one."""
    kind = setting_types()[name]
    default = ({f.name: f.default for f in dataclasses.fields(Workload)} | dict(usual))[name]
    names = [flag(each) for each in (name, *ALIASES.get(name, ()))]
    if kind is bool and default is not False:  # off has to be sayable too
        names = [f"{each}/--no-{each.removeprefix('--')}" for each in names]
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    metavar = "NAME" if len(choices) > MOST_CHOICES else "|".join(choices) or METAVARS.get(kind, "NAMES")
    show = isinstance(default, (int, float, str)) and default is not False and default != ""
    said = HELP.get(name, "").split(" Default:")[0] if name in usual else HELP.get(name)
    info = typer.Option(*names, help=said, metavar=None if kind is bool else metavar, show_default=show)
    given: Any = bool if kind is bool else list[str] if get_origin(kind) is tuple else str
    if default is dataclasses.MISSING:
        return Annotated[given, info], inspect.Parameter.empty
    if default in (None, ()):
        return Annotated[given | None, info], None
    return Annotated[given, info], default if kind is bool else str(default)


def _value(name: str, given: Any) -> Any:
    """What was typed, as the type that the field has; whether it is a sensible value is for `Workload` to say."""
    kind = setting_types()[name]
    if get_origin(kind) is tuple:
        return split_names(given) if given else None
    if kind in NUMBERS and given is not None:
        try:
            return kind(given)
        except ValueError as error:
            raise UsageError(f"{flag(name)} {given!r} is not {NUMBERS[kind]}") from error
    return plain_value(name, given)


Option = tuple[Any, Any]
"""An annotation that holds the flag, and a default."""


def option(
    kind: Any, flags: str, metavar: str | None, said: str, default: Any = None, *, shown: bool = False
) -> Option:
    info = typer.Option(*flags.split(), metavar=metavar, help=said, show_default=shown)
    return Annotated[kind, info], default


def plain_command(options: Mapping[str, Option], run: Callable[..., int]) -> Callable[..., int]:
    """`run(**given)` as a command of its name and docstring."""
    made = _command((), options, run)
    made.__name__, made.__doc__ = run.__name__.removeprefix("_"), run.__doc__
    return made


FROM: dict[str, Option] = {
    "from_": option(
        list[str] | None, "--from", "FILE", "A job file of LLaMA-Factory, Axolotl, torchtune or the HF Trainer; beside "
        "it, again, one of accelerate. Flags of the kinds below replace what it says.",
    ),
    "from_format": option(
        str | None, "--from-format", "NAME",
        "llamafactory, axolotl, torchtune, huggingface, accelerate, deepspeed. Default: told by its keys.",
    ),
    "without": option(
        list[str] | None, "--without", "KEYS", "Keys of the file that are taken as if they were not there.",
    ),
    "kind": option(
        str | None, "--kind", "train|lora",
        "Where the file does not say it. Default: lora where a flag is one of adapters.",
    ),
}  # fmt: skip
"""What `plan`, `fit` and `check` have for job files of other tools."""

JSON: FlagText = ("--json", None, "One JSON document on stdout instead of the report.")
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of the report.")]
HOW_MUCH: dict[str, Option] = {
    "steps": option(str | None, "--steps", "N", "Optimizer steps: how long they take."),
    "tokens": option(str | None, "--tokens", "N", "Tokens to train on in all: how long that takes, as 300000000."),
}
"""How long a training is."""


def how_much(steps: str | None, tokens: str | None) -> dict[str, int]:
    """What `--steps` or `--tokens` says."""
    given = {name: text for name, text in (("steps", steps), ("tokens", tokens)) if text is not None}
    if len(given) > 1:
        raise UsageError("--steps and --tokens both say how long it trains", hint="give one of them")
    plain = {name: text.replace(",", "").replace("_", "") for name, text in given.items()}
    return {name: whole(f"--{name}", each, 10**18, "5000", typed=given[name]) for name, each in plain.items()}


def whole(said: str, text: str, most: int, usual: str, *, typed: str | None = None) -> int:
    """A number that the flag `said` was given."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
        raise UsageError(f"{said} {typed or text!r} is not a whole number above 0", hint=f"such as {said} {usual}")
    return int(text)
