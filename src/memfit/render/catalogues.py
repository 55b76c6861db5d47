"""The lists of models and cards, from the documents that `memfit models --json` and `memfit gpus --json` print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from memfit.render.words import clean, count
from memfit.units import gib


def show_models(document: Mapping[str, Any], console: Console) -> None:
    table = _table("name", "type", ("parameters", "right"), "hub ids")
    for model in document["models"]:
        ids = Text(", ".join(clean(name) for name in model["hub_ids"]), "dim")
        table.add_row(clean(model["name"]), clean(model["type"]), count(model["parameters"]), ids)
    console.print(table)


def show_gpus(document: Mapping[str, Any], console: Console) -> None:
    table = _table("name", ("memory", "right"), ("context", "right"), "", ("compute capability", "right"))
    for card in document["gpus"]:
        low, high = card["context"]["low_bytes"], card["context"]["high_bytes"]
        context = gib(high) if low == high else f"{gib(low).removesuffix(' GiB')} to {gib(high)}"
        basis = Text(clean(card["context"]["basis"]), "dim")
        capability = clean(card["compute_capability"])
        table.add_row(clean(card["name"]), gib(card["capacity_bytes"]), context, basis, capability)
    console.print(table)


def _table(*columns: str | tuple[str, JustifyMethod]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        name, justify = column if isinstance(column, tuple) else (column, _LEFT)
        table.add_column(name, justify=justify, overflow="fold")
    return table


_LEFT: JustifyMethod = "left"
