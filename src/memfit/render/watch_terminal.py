"""A machine's memory for a person who looks on: a bar for each GPU, who holds it, and the memfit jobs that run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.render.words import clean, percent, tail
from memfit.units import gib

FULL = 0.9
PROCESSES = 5


def show_watch(seen: Mapping[str, Any], console: Console) -> None:
    console.print(watch_view(seen, console.width, console.encoding))


def watch_view(seen: Mapping[str, Any], width: int, encoding: str) -> RenderableType:
    return Group(*_parts(seen, min(width, 110), encoding.lower().startswith("utf")))


def _parts(seen: Mapping[str, Any], width: int, blocks: bool) -> Iterator[RenderableType]:
    yield Text(clean(seen["time"])[:19].replace("T", " "), "dim")
    for gpu in seen["gpus"]:
        yield Text()
        yield from _gpu(gpu, width, blocks)
    if seen["no_gpus"]:
        yield Text()
        yield Text.assemble(("no GPU seen", "bold"), f": {clean(seen['no_gpus'])}")
    yield Text()
    yield _bar_line("host", seen["host"]["used_bytes"], seen["host"]["total_bytes"], width, blocks)
    yield Text()
    yield from _jobs(seen["jobs"], width)


def _gpu(gpu: Mapping[str, Any], width: int, blocks: bool) -> Iterator[RenderableType]:
    busy = "" if gpu["busy_percent"] is None else f", {gpu['busy_percent']} % busy"
    yield Text.assemble((f"GPU {gpu['index']}", "bold"), f"  {clean(gpu['name'])}{busy}")
    yield _bar_line("", gpu["used_bytes"], gpu["total_bytes"], width, blocks)
    table = Table.grid(padding=(0, 2))
    for justify in ("right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for process in gpu["processes"][:PROCESSES]:
        size = "n/a" if process["used_bytes"] is None else gib(process["used_bytes"])
        name = "of another container, or ended" if process["name"] is None else clean(process["name"])
        table.add_row(str(process["pid"]), size, tail(name, max(width - 30, 20)))
    if gpu["processes"]:
        yield Padding(table, (0, 0, 0, 2))


def _bar_line(name: str, used: int, total: int, width: int, blocks: bool) -> Text:
    cells = max(width - 46, 10)
    filled = min(round(cells * used / total), cells) if total else 0
    on, off = ("█", "·") if blocks else ("#", ".")
    style = "red" if total and used > FULL * total else "blue"
    figures = f"  {gib(used)} of {gib(total)} ({percent(used, total)})"
    label = f"{name:6}" if name else "  "
    return Text.assemble(label, (on * filled, style), (off * (cells - filled), "bright_black"), figures, no_wrap=True)


def _jobs(jobs: list[Mapping[str, Any]], width: int) -> Iterator[RenderableType]:
    if not jobs:
        yield Text("no memfit job runs", "dim")
        return
    table = Table.grid(padding=(0, 2))
    for justify in ("right", "left", "left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_row(*(Text(word, "dim") for word in ("job", "command", "at", "peak", "headroom", "")))
    for job in jobs:
        done = "" if not job["total"] else f"{job['done']} of {job['total']}"
        command = tail(clean(job["command"]), max(width - 60, 16))
        sizes = _size(job["peak_bytes"]), _size(job["headroom_bytes"])
        table.add_row(str(job["pid"]), command, clean(job["at"]), *sizes, done)
    yield table


def _size(value: int | None) -> str:
    return "n/a" if value is None else gib(value)
