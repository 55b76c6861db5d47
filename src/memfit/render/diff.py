"""Two runs side by side, for a person: how the peaks differ, what explains it, then where the events part.

show_diff(document, Console())      # document: memfit.diff/1, as `memfit diff --json` prints it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.render.pieces import (
    CATEGORY_STYLES,
    bullets,
    category_word,
    clean,
    grid,
    indented,
    labelled,
    next_step,
    phase_words,
    printed,
    section,
    short_op,
    tail,
)
from memfit.units import format_bytes, gib

Diff = Mapping[str, Any]
ROWS = 10
PLACES = 6


@printed
def show_diff(diff: Diff, console: Console) -> Iterator[RenderableType]:
    width = console.width
    for message in diff["messages"]:
        yield labelled(f"note on {message['side']}", message["text"], "bold yellow")
    if diff["messages"]:
        yield Text()
    yield _verdict(diff)
    yield indented(_sides(diff))
    if diff["explained"]:
        yield section("what explains it, at the two peaks", _explained(diff["explained"], width))
    if any(row["difference"] for row in diff["by_category"]):
        yield section("by category", _named(diff["by_category"], category=True, width=width))
    if diff["by_phase"]:
        yield section("by phase", _phases(diff["by_phase"]))
    modules = [row for row in diff["by_module"] if row["difference"]]
    if modules:
        yield section("by module", _named(modules, category=False, width=width))
    yield section("events", _counts(diff))
    if diff["places"]:
        yield section("allocations that only one side makes", _places(diff, width))
    if diff["totals"]:
        yield section("the same, summed up", _totals(diff["totals"], width))
    if diff["lifetimes"]:
        yield section("allocations of both that one side frees earlier", _lifetimes(diff, width))
    yield section("how to read it", bullets(diff["notes"]))
    if diff["next"]:
        yield from next_step("; or ".join(diff["next"]))


def _verdict(diff: Diff) -> Text:
    allocated = diff["peak"]["allocated_bytes"]
    if diff["same"] and not allocated["difference"]:
        return Text.assemble(("the same", "bold green"), f": event by event, and in its peak of {gib(allocated['b'])}")
    change = allocated["difference"]
    if not change:
        return Text.assemble(("same peak", "bold"), f" of {gib(allocated['b'])}, but not the same events")
    word = "more" if change > 0 else "less"
    return Text.assemble(("b needs ", "bold"), (f"{format_bytes(abs(change))} {word}", "bold"), " than a at the peak")


def _sides(diff: Diff) -> Table:
    table = grid("left", "left", "right", "right", "left", heads=("", "", "allocated", "reserved", ""))
    for side in "ab":
        run = diff[side]
        at = run["at_peak"]
        where = f"in {phase_words(at['phase'], at['step'])}" if at["phase"] else f"at event {at['event']:,}"
        peak = run["peak"]
        name = f"{tail(clean(run.get('path', '')), 40)} ({run['origin']})"
        table.add_row(side, name, gib(peak["allocated_bytes"]), gib(peak["reserved_bytes"]), Text(where, "dim"))
    figures = (diff["peak"][f"{name}_bytes"]["difference"] for name in ("allocated", "reserved"))
    table.add_row("", Text("b less a", "dim"), *(_signed(figure) for figure in figures), "")
    return table


def _signed(count: int | None) -> str:
    if count is None:
        return "n/a"
    return "0 B" if count == 0 else ("+" if count > 0 else "-") + format_bytes(abs(count))


def _explained(reasons: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    table = grid("right", "right", "left")
    for reason in reasons:
        table.add_row(_signed(reason["difference_bytes"]), f"{reason['count']:,} x", Text(reason["text"], "bold"))
        for group in reason["largest"][:4]:
            label = Text.assemble(
                (category_word(group["category"]), CATEGORY_STYLES.get(group["category"], "dim")),
                "  ",
                tail(clean(short_op(group["name"])) or "(no name)", max(width - 50, 24)),
            )
            table.add_row(Text(_signed(group["difference_bytes"]), "dim"), Text(f"{group['count']:,} x", "dim"), label)
    total = sum(reason["difference_bytes"] for reason in reasons)
    table.add_row(_signed(total), "", Text("in all: the difference of the allocated peaks, to the byte", "dim"))
    return table


def _named(rows: Sequence[Mapping[str, Any]], *, category: bool, width: int) -> Table:
    table = grid("right", "right", "right", "left", heads=("a", "b", "b less a", ""))
    for row in rows[:ROWS]:
        name = (
            category_word(row["name"]) if category else tail(clean(row["name"]) or "(no module)", max(width - 46, 24))
        )
        table.add_row(gib(row["a"]), gib(row["b"]), _signed(row["difference"]), name)
    return table


def _phases(rows: Sequence[Mapping[str, Any]]) -> Table:
    heads = ("", "", "a", "b", "b less a", "reserved, b less a")
    table = grid("left", "left", "right", "right", "right", "right", heads=heads)
    for row in rows[:24]:
        sizes = row["allocated_bytes"]
        table.add_row(
            f"step {row['step']}" if row["step"] else "start",
            clean(row["name"]),
            gib(sizes["a"]),
            gib(sizes["b"]),
            _signed(sizes["difference"]),
            _signed(row["reserved_bytes"]["difference"]),
        )
    return table


def _counts(diff: Diff) -> Table:
    heads = ("", "both", "only a", "only b", "moved")
    table = grid("left", "right", "right", "right", "right", heads=heads)
    for name in ("allocations", "frees"):
        counts = diff[name]
        moved = f"{counts['moved']:,}" if name == "frees" else ""
        table.add_row(name, *(f"{counts[key]:,}" for key in ("both", "only_a", "only_b")), moved)
    return table


def _item(item: Mapping[str, Any], sign: str, width: int) -> Text:
    words = "  ".join(clean(part) for part in (short_op(item["op"]), item["module"], item["category"]) if part)
    return Text(f"{sign} {format_bytes(item['size']):>10}  {tail(words, max(width - 22, 20))}")


def _places(diff: Diff, width: int) -> RenderableType:
    lines: list[Text] = []
    for place in diff["places"][:PLACES]:
        phase = f", {clean(place['phase'])}" if place["phase"] else ""
        lines.append(Text(f"event {place['event_a']:,} of a, {place['event_b']:,} of b{phase}", "dim"))
        for side, sign in (("only_a", "-"), ("only_b", "+")):
            lines += [_item(item, sign, width) for item in place[side][:5]]
            if len(place[side]) > 5:
                lines.append(Text(f"{sign} ... and more here", "dim"))
    hidden = len(diff["places"]) - PLACES + diff["left_out"]["places"]
    if hidden > 0:
        lines.append(Text(f"and {hidden:,} more places", "dim"))
    return Group(*lines)


def _totals(totals: Sequence[Mapping[str, Any]], width: int) -> Table:
    table = grid("left", "right", "right", "left")
    for total in totals[:ROWS]:
        times = f"{total['count']:,} x {format_bytes(total['size'])}"
        name = tail(clean(short_op(total["op"])), max(width - 50, 20))
        table.add_row(f"only {total['side']}", format_bytes(total["bytes"]), times, name)
    return table


def _lifetimes(diff: Diff, width: int) -> RenderableType:
    lines: list[Text] = []
    for lifetime in diff["lifetimes"][:PLACES]:
        other = "b" if lifetime["earlier"] == "a" else "a"
        what = "1 block" if lifetime["count"] == 1 else f"{lifetime['count']:,} blocks"
        said = f"{format_bytes(lifetime['bytes'])} in {what}, {lifetime['apart']:,} allocations earlier"
        lines.append(Text(f"{said} in {lifetime['earlier']} than in {other}", "dim"))
        lines += [_item(item, "=", width) for item in lifetime["items"][:2]]
    hidden = len(diff["lifetimes"]) - PLACES + diff["left_out"]["lifetimes"]
    if hidden > 0:
        lines.append(Text(f"and {hidden:,} more", "dim"))
    return Group(*lines)
