"""A command whose help shows its options under headings: those given as `rich_help_panel`, in the order they occur."""

from __future__ import annotations

from typing import Any

from memfit.cli import late_conversion

REST = "Options"


class Grouped(late_conversion.Command):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or REST, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)
