"""The ladder of `memfit fit --ladder` for a person.

show_ladder(document, Console())      # document: memfit.ladder/1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.render.pieces import bullets, grid, print_parts, section
from memfit.render.words import clean
from memfit.units import gib

Ladder = Mapping[str, Any]
STYLES = {"Safe": "green", "Medium": "cyan", "Aggressive": "yellow", "Maximum": "red"}


def show_ladder(ladder: Ladder, console: Console) -> None:
    print_parts(_parts(ladder), console)


def _parts(ladder: Ladder) -> Iterator[RenderableType]:
    yield _headline(ladder)
    if ladder["changes"]:
        names = ", ".join(f"{clean(change['name'])} ({change['cost']})" for change in ladder["changes"])
        yield Padding(Text(f"not a single row fits without these, which all rungs have: {names}"), (0, 0, 0, 2))
    if ladder["rungs"]:
        yield section("the ladder", _rungs(ladder["rungs"]))
        yield section("what else can push it over", _risks(ladder["rungs"]))
    if ladder["above"]:
        above = ladder["above"]
        rows = f"micro-batch {above['micro_batch']} x {above['grad_accum']}"
        yield section("the next rung", Text(f"{rows} takes {gib(above['device_bytes'])} and does not run"))
    if ladder["guide"]:
        title = "the guide's own ladder, as its authors ran it: their attention, checkpointing, bf16 over fp32 weights"
        yield section(title, _guide(ladder["guide"], ladder["gpu"]["capacity_bytes"]))
    search = f"{ladder['predictions']} predictions in {ladder['seconds']:.1f} s"
    yield section("assumed", bullets([*ladder["notes"], _time(ladder), search]))


def _headline(ladder: Ladder) -> Text:
    work, card = ladder["workload"], ladder["gpu"]
    gpus = f"{work['world_size']} x " if work["world_size"] > 1 else ""
    job = f"{clean(work['kind'])} of {clean(work['model'])}, {ladder['global_batch']} rows a step"
    there = f"on {gpus}{clean(card['name'])} ({gib(card['capacity_bytes'])})"
    if not ladder["rungs"]:
        return Text.assemble(("nothing fits", "bold red"), f": {job}, {there}")
    top = ladder["rungs"][-1]
    return Text.assemble((f"up to micro-batch {top['micro_batch']}", "bold green"), f": {job}, {there}")


def _rungs(rungs: Sequence[Mapping[str, Any]]) -> Table:
    table = grid("left", "right", "right", "right", "right", "right")
    heads = ("", "micro-batch x steps", "rows", "device", "of the card", "step time")
    table.add_row(*(Text(head, "dim") for head in heads))
    for rung in rungs:
        relative = "n/a" if rung["relative_step_time"] is None else f"{100 * rung['relative_step_time']:.0f} %"
        table.add_row(
            Text(_names(rung), STYLES[rung["names"][-1]]), f"{rung['micro_batch']} x {rung['grad_accum']}",
            str(rung["global_batch"]), gib(rung["device_bytes"]), f"{100 * rung['use']:.0f} %", relative,
        )  # fmt: skip
    return table


def _names(rung: Mapping[str, Any]) -> str:
    """There may be no micro-batch between two of the four."""
    first, last = rung["names"][0], rung["names"][-1]
    return clean(first) if first == last else f"{clean(first)} to {clean(last)}"


def _risks(rungs: Sequence[Mapping[str, Any]]) -> Table:
    table = grid("left", "left")
    for rung in rungs:
        table.add_row(_names(rung), Text("; ".join(clean(risk) for risk in rung["risks"])))
    return table


def _guide(guide: Sequence[Mapping[str, Any]], capacity: int) -> Table:
    table = grid("left", "right", "right", "right", "right", "right", "left")
    heads = ("", "micro-batch x steps", "tokens", "rows", "predicted", "of the card", "it says")
    table.add_row(*(Text(head, "dim") for head in heads))
    for rung in guide:
        wrong = f"; but {'; '.join(clean(each) for each in rung['wrong'])}" if rung["wrong"] else ""
        table.add_row(
            clean(rung["name"]), f"{rung['micro_batch']} x {rung['grad_accum']}", str(rung["seq_len"]),
            str(rung["global_batch"]), gib(rung["device_bytes"]), f"{100 * rung['device_bytes'] / capacity:.0f} %",
            Text(f"{clean(rung['claims'])}{wrong}"),
        )  # fmt: skip
    return table


def _time(ladder: Ladder) -> str:
    first = ladder["rungs"][0]["names"][0] if ladder["rungs"] else ""
    return f"step time is a roofline of counted FLOPs and bytes, relative to {first}: a bound, good for the ratio only"
