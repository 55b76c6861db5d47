"""Commands as typer runs them, but that text stays text, no option counts twice, and help has headings.

An interruption is told in a line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from typer.core import TyperCommand, TyperGroup

from memfit.cli import output
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
        if value is None:
            return () if many else None
        if annotation is str and isinstance(value, str):
            return value
        if annotation == list[str] and many and all(isinstance(each, str) for each in value):
            return list(value)
        return self.make().coerce(value, param=param, ctx=ctx)


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


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _late(super().get_params(ctx))

    def make_parser(self, ctx: Any) -> Any:
        return _once(super().make_parser(ctx))

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


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _late(super().get_params(ctx))

    def make_parser(self, ctx: Any) -> Any:
        return _once(super().make_parser(ctx))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """What a command does is wrapped where it takes more than a line: typer would cut it off."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, self.commands[name].get_short_help_str(A_SENTENCE)) for name in self.list_commands(ctx)]
            )
