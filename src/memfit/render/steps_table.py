"""The peaks of the phases, step by step: steps that are alike are one row, of many different ones a few are shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from memfit.render.pieces import grid
from memfit.render.words import clean
from memfit.units import gib

Phase = Mapping[str, Any]


def steps_table(phases: Sequence[Phase], peak: tuple[str, int], mark: str) -> Table:
    table = grid("left", "left", "right", "right", "left")
    table.add_row("", "", Text("allocated", "dim"), Text("reserved", "dim"), "")
    for steps, found in _steps(phases, peak[1]):
        label = _label(steps)
        for phase in found:
            peaks = phase["name"] == peak[0] and peak[1] in steps
            sizes = (gib(phase["allocated_bytes"]), gib(phase["reserved_bytes"]))
            table.add_row(label, clean(phase["name"]), *sizes, Text(mark, "bold") if peaks else "")
            label = ""
        if not found:
            table.add_row(label, "", "", "", "")
    return table


def _steps(phases: Sequence[Phase], peak: int) -> Iterator[tuple[list[int], list[Phase]]]:
    """Steps that are alike are one; of many different ones, the first, the last and the peak's are shown."""
    merged: list[tuple[list[int], list[Phase]]] = []
    for step, found in groupby(phases, key=lambda phase: phase["step"]):
        rows = list(found)
        if merged and [_figures(row) for row in merged[-1][1]] == [_figures(row) for row in rows]:
            merged[-1][0].append(step)
        else:
            merged.append(([step], rows))
    kept = [i for i, (steps, _) in enumerate(merged) if i < 4 or i == len(merged) - 1 or peak in steps]
    for before, i in zip([-1, *kept], kept, strict=False):
        if i > before + 1:
            yield [], []
        yield merged[i]


def _figures(phase: Phase) -> tuple[str, int, int]:
    return phase["name"], phase["allocated_bytes"], phase["reserved_bytes"]


def _label(steps: Sequence[int]) -> str:
    if not steps:
        return "..."
    if steps == [0]:
        return "start"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"
