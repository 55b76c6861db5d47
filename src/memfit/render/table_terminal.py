"""`memfit table` in a terminal, from its document (memfit.table/1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.render.pieces import bullets, section
from memfit.render.table_parts import NOTHING, SAME, Part, parts, settings_in_words

STYLES = {"safe": "green", "tight": "yellow", "fails": "red"}
"""Colour repeats what the word says."""
NAME = 32
"""What is longer in the first column is a sentence, and may be wrapped."""
WIDE = 120


def show_table(document: Mapping[str, Any], console: Console) -> None:
    for part in parts(document):
        narrow = part.sentences and console.width < WIDE
        console.print(section(part.title, _lines(part) if narrow else _table(part)))
    console.print(section("planned with", bullets(list(settings_in_words(document)))))
    console.print(section("how to read it", bullets(document["notes"])))


def _table(part: Part) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    first = 1 if part.grouped else 0
    sentences = any(len(row[first]) > NAME for row in part.rows)
    for at, header in enumerate(part.headers[first:], first):
        wraps = at > first or sentences  # where a terminal is too narrow nothing is cut off
        table.add_column(header, justify="left" if at < part.words else "right", overflow="fold", no_wrap=not wraps)
    group = None
    for row in part.rows:
        if part.grouped and row[0] != group:
            group = row[0]
            table.add_row(Text(group, "bold"))
        name = Text(f"  {row[first]}" if part.grouped else row[first])
        table.add_row(name, *(_cell(cell) for cell in row[first + 1 :]))
    return table


def _lines(part: Part) -> RenderableType:
    """A sentence, and below it the answer with its figures."""
    made: list[RenderableType] = []
    for said, answer, *cells in part.rows:
        told = zip(part.headers[2:], cells, strict=True)
        figures = ", ".join(f"{header} {cell}" for header, cell in told if cell not in (NOTHING, SAME))
        made += [Text(said), Padding(Text(f"{answer} ({figures})", "dim"), (0, 0, 0, 2))]
    return Group(*made)


def _cell(text: str) -> Text:
    """A verdict is its last word, if it has one."""
    return Text(text, STYLES.get(text.rpartition(" ")[2], ""))
