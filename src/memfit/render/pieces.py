"""What all reports in a terminal are built of: sections, columns that line up, bars, words for categories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.render.words import clean, percent
from memfit.units import gib

CATEGORY_STYLES = {
    "weights": "blue", "gradients": "green", "optimizer": "magenta", "activations": "yellow", "loss": "red",
    "calibration": "cyan", "kv_cache": "cyan", "temporaries": "bright_black", "workspaces": "bright_black",
}  # fmt: skip
MAX_WIDTH = 120
EIGHTHS = " ▏▎▍▌▋▊▉█"


class Glyphs:
    """Blocks where the output can show them, plain characters where it cannot."""

    def __init__(self, encoding: str) -> None:
        self.blocks = encoding.lower().startswith("utf")
        self.used, self.idle, self.context, self.free = "█▓▒·" if self.blocks else "#=+."
        self.peak = "◀ peak" if self.blocks else "< peak"

    def bar(self, part: int, whole: int, width: int) -> str:
        eighths = round(8 * width * part / whole) if whole else 0
        if not self.blocks:
            return "#" * max(round(eighths / 8), 1 if part else 0)
        return "█" * (eighths // 8) + EIGHTHS[max(eighths % 8, 1 if part and not eighths else 0)].strip()


def print_parts(parts: Iterable[RenderableType], console: Console) -> None:
    """The width is set before the first part is made: parts may ask for it."""
    console.width = min(console.width, MAX_WIDTH)
    for part in parts:
        console.print(part)


def section(title: str, body: RenderableType) -> RenderableType:
    return Group(Text(), Text(title, style="bold"), Padding(body, (0, 0, 0, 2)))


def grid(*columns: JustifyMethod) -> Table:
    """Only the last column may wrap: figures are never cut."""
    table = Table.grid(padding=(0, 2))
    for number, justify in enumerate(columns, 1):
        table.add_column(justify=justify, no_wrap=number < len(columns))
    return table


def bullets(notes: Iterable[str]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for note in notes:
        table.add_row("-", Text(clean(note)))
    return table


def category_word(name: str) -> str:
    return clean(name).replace("_", " ")


def phase_words(name: str, step: int) -> str:
    """`backward of step 2`; the phase that is itself called step is the optimizer's."""
    said = "the optimizer" if name == "step" else clean(name)
    return f"{said} of step {step}" if step else said


def small(size: int) -> str:
    """Something is never shown as nothing."""
    return "< 0.01 GiB" if size and gib(size) == gib(0) else gib(size)


def alive_bars(breakdown: Mapping[str, int], glyphs: Glyphs, width: int) -> Table:
    """By category, the largest first, each with a bar and its share."""
    total = sum(breakdown.values())
    cells = max(min(width - 44, 60), 10)
    table = grid("left", "left", "right", "right")
    for name, size in sorted(breakdown.items(), key=lambda item: -item[1]):
        if size:
            bar = glyphs.bar(size, total, cells).ljust(cells)
            style = CATEGORY_STYLES.get(name, "")
            table.add_row(category_word(name), Text(bar, style), small(size), percent(size, total))
    return table
