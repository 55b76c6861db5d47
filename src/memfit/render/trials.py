"""A script planned with several values of its arguments, for a person: one row a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, JustifyMethod, RenderableType
from rich.text import Text

from memfit.render.pieces import clean, grid, print_parts, section
from memfit.render.plan import VERDICT_STYLES
from memfit.units import gib


def show_trials(document: Mapping[str, Any], console: Console) -> None:
    runs = document["runs"]
    keys = list(runs[0]["changed"])
    right: list[JustifyMethod] = ["right"]
    table = grid(*right * (len(keys) + 3), "left", "right")
    table.add_row(*(Text(clean(word), "bold") for word in (*keys, "allocated", "reserved", "device", "", "to spare")))
    for run in runs:
        values = [clean(run["changed"][key]) for key in keys]
        if run["plan"] is None:
            table.add_row(*values, "", "", "", Text("no answer", "bold red"), "")
            continue
        plan, peak = run["plan"], run["plan"]["peak"]
        verdict = plan["verdict"] or ""
        spare = "" if plan["headroom_bytes"] is None else gib(plan["headroom_bytes"])
        figures = (gib(peak[f"{name}_bytes"]) for name in ("allocated", "reserved", "device"))
        table.add_row(*values, *figures, Text(verdict, VERDICT_STYLES.get(verdict, "")), spare)
    print_parts(_parts(document, table), console)


def _parts(document: Mapping[str, Any], table: RenderableType) -> Iterator[RenderableType]:
    card = next((run["plan"]["gpu"] for run in document["runs"] if run["plan"]), None)
    on = f" on {clean(card['name'])}" if card else ""
    yield section(f"{clean(' '.join(document['command']))}{on}, predicted", table)
    for run in document["runs"]:
        said = ", ".join(f"{clean(key)}={clean(value)}" for key, value in run["changed"].items())
        if run["error"]:
            yield Text(f"{said}: {clean(run['error'])}", "red")
    for note in document["notes"]:
        yield Text(f"  {clean(note)}")
    notes = dict.fromkeys(note for run in document["runs"] if run["plan"] for note in run["plan"]["notes"][:1])
    for note in notes:
        yield Text(f"  {clean(note)}", "dim")
