"""A profile for a person: the peak, the phases, where the snapshot lies and what opens it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.render.terminal import verdict_line
from memfit.render.words import clean
from memfit.units import gib


def show_profile(document: Mapping[str, Any], console: Console) -> None:
    peak, origin = document["peak"], document["origin"]
    if document["verdict"] is not None:
        console.print(verdict_line(document, document["capacity_bytes"]))
    console.print(
        Text.assemble(
            (f"{gib(peak['allocated_bytes'])} allocated at the peak", "bold"),
            f", {gib(peak['reserved_bytes'])} reserved ({origin}, {clean(document['gpu'])})",
        )
    )
    most = max((phase["allocated_bytes"] for phase in document["phases"]), default=0)
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for phase in document["phases"]:
        table.add_row(clean(phase["name"]), gib(phase["allocated_bytes"]), "peak" * (phase["allocated_bytes"] == most))
    console.print(Padding(table, (0, 0, 0, 2)))
    for note in document["notes"]:
        console.print(Text(f"- {clean(note)}", "dim"))
    path = clean(document["snapshot"])
    console.print(Text(f"snapshot: {path}  (opens in pytorch.org/memory_viz)"))
    console.print(Text.assemble(("next: ", "bold"), f"memfit report {path} --html report.html"))
