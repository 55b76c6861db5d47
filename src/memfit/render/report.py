"""Recorded runs for a person: a report, then two of them side by side.

show_report(document, Console())      # document: memfit.report/1, as `memfit report --json` prints it
show_diff(document, Console())        # document: memfit.diff/1

A report says first what changes the numbers' meaning, then the peak, why it is so, and what next; a difference how the
peaks differ, what explains it, then where the events part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.render.pieces import (
    CATEGORY_STYLES,
    Glyphs,
    alive_bars,
    bullets,
    category_word,
    clean,
    grid,
    indented,
    labelled,
    next_step,
    percent,
    phase_words,
    printed,
    section,
    short_op,
    small,
    steps_table,
    tail,
)
from memfit.units import format_bytes, gib

Report = Mapping[str, Any]
ROWS = 8
STACK_LINES = 3


@printed
def show_report(report: Report, console: Console) -> Iterator[RenderableType]:
    glyphs, width = Glyphs(console.encoding), console.width
    for message in report["messages"]:
        yield labelled("note", message["text"], "bold yellow")
    if report["messages"]:
        yield Text()
    ooms = report.get("ooms") or []
    if ooms:
        where = f" at {clean(ooms[-1]['code_line'])}" if ooms[-1]["code_line"] else ""
        asked = f"a request of {format_bytes(ooms[-1]['requested_bytes'])}{where} failed"
        yield Text.assemble(("out of memory: ", "bold red"), asked)
    yield _peak_line(report)
    yield indented(_why(report))
    if ooms:
        at_peak = ooms[-1]["allocated_bytes"] == report["peak"]["allocated_bytes"]
        yield section("out of memory", _oom(ooms[-1], len(ooms), width, alive=not at_peak))
    if "breakdown" in report:
        yield from _run_parts(report, glyphs, width)
    if report.get("log"):
        yield section("checkpoints", _checkpoints(report["log"]["checkpoints"], report["log"]))
        if report["log"]["parts"]:
            highest = sorted(report["log"]["parts"], key=lambda part: -(part["peak_bytes"] or 0))
            yield section("parts with the highest peaks", _checkpoints(highest[:ROWS]))
    if report["source"]["files"]:
        yield section("recordings in the folder", _files(report["source"]["files"], report["source"].get("reported")))
    if len(report.get("devices", ())) > 1:
        yield section("GPUs", _devices(report["devices"], report["device"]))
    if report["notes"]:
        yield section("how to read it", bullets(report["notes"]))
    if report["next"]:
        yield from next_step("; or ".join(report["next"]))


def _run_parts(report: Report, glyphs: Glyphs, width: int) -> Iterator[RenderableType]:
    total = report["peak"]["allocated_bytes"]
    if total:
        yield section(f"alive at the peak: {gib(total)}", _alive(report, glyphs, width))
    for key, title in (("by_code_line", "by line of code"), ("by_module", "by module"), ("by_op", "by op")):
        if any(share["name"] for share in report[key]):
            yield section(f"at the peak, {title}", _shares(report[key], total, width))
    if report["largest"]:
        yield section("largest allocations at the peak", _largest(report["largest"], width))
    if report["phases"]:
        peak = report["at_peak"]["phase"], report["at_peak"]["step"]
        yield section("phases", steps_table(report["phases"], peak, glyphs.peak))
    if any(report["idle"].values()):
        yield section("held but idle", _idle(report["idle"]))
    if report["temporaries"]:
        gone = "gone in the phase they were made in" if report["phases"] else "made and freed again"
        yield section(f"temporaries: {gone}", _temporaries(report["temporaries"], width))
    if len(report["growth"]["steps"]) > 1:
        yield section("growth between steps", _growth(report["growth"], width))
    if report["annotations"]:
        yield section("named by the program", _annotations(report["annotations"]))


# -- the peak ----------------------------------------------------------------------------------------------------


def _peak_line(report: Report) -> Text:
    peak = report["peak"]
    if peak["allocated_bytes"] is None:
        return Text.assemble(("peak: n/a", "bold"), f" ({report['origin']})")
    reserved, least = peak["reserved_bytes"], peak.get("reserved_at_least_bytes")
    held = f", {gib(reserved)} reserved" if reserved is not None else ""
    if least is not None:
        held = f", at least {gib(least)} reserved"
    card = clean(report.get("gpu") or "") or (f"GPU {report['device']}" if report["device"] is not None else "")
    gpu = f", {card}" if card else ""
    return Text.assemble(
        ("peak: ", "bold"), (gib(peak["allocated_bytes"]), "bold"), f" allocated{held}", f" ({report['origin']}{gpu})"
    )


def _why(report: Report) -> Text:
    at, peak = report["at_peak"], report["peak"]
    if at is None or not peak["allocated_bytes"]:
        return Text("nothing was allocated" if peak["allocated_bytes"] == 0 else "no figures of a GPU", "dim")
    if "breakdown" not in report:
        return Text(f"reached {clean(at['phase'])}")
    words = []
    if at["phase"]:
        words.append(f"in {phase_words(at['phase'], at['step'])}")
    if at["event"] < 0:
        words.append("before the first event")
    elif at["seconds"] is not None:
        words.append(f"{at['seconds']:.3f} s in")
    else:
        words.append(f"at event {at['event']:,}")
    made = at["code_line"] or " in ".join(part for part in (short_op(at["op"]), at["module"]) if part)
    if made:
        words.append(f"when {clean(made)} asked for memory")
    name, most = max(report["breakdown"].items(), key=lambda item: item[1])
    before = report["there_before"]["allocated_bytes"]
    if name == "unknown" and before:
        tells = f"{percent(before, peak['allocated_bytes'])} was there before the recording began"
    elif name == "unknown":
        tells = "no category is known (no labels, and no backward pass to derive them from)"
    else:
        tells = f"{percent(most, peak['allocated_bytes'])} of it {category_word(name)}"
    return Text(", ".join(words) + f"; {tells}")


def _alive(report: Report, glyphs: Glyphs, width: int) -> RenderableType:
    parts: list[RenderableType] = [alive_bars(report["breakdown"], glyphs, width)]
    before, unknown = report["there_before"], report["breakdown"].get("unknown", 0)
    if before["allocated_bytes"] and unknown:
        said = f"{small(before['allocated_bytes'])} in {before['count']:,} blocks was there before the recording began"
        parts.append(Text(said, "dim"))
    return Group(*parts)


def _shares(shares: Sequence[Mapping[str, Any]], total: int, width: int) -> Table:
    table, room = grid("right", "right", "right", "left", "left"), max(width - 50, 24)
    for share in shares[:ROWS]:
        size, times = share["allocated_bytes"], f"{share['count']:,} x"
        table.add_row(small(size), percent(size, total), times, _category(share["category"]), _name(share, room))
    return table


def _name(row: Mapping[str, Any], room: int) -> str:
    return tail(clean(short_op(row["name"])) or "(no name)", room)


def _category(name: str) -> Text:
    return Text(category_word(name), CATEGORY_STYLES.get(name, "dim"))


def _largest(kinds: Sequence[Mapping[str, Any]], width: int) -> Table:
    table = grid("right", "right", "left", "left")
    for kind in kinds[:ROWS]:
        where = kind["code_line"] or "  ".join(part for part in (kind["module"], short_op(kind["op"])) if part)
        room = max(width - 44, 24)
        lines = [Text(tail(clean(where) or "(no name)", room))]
        lines += [Text(tail(clean(line), room), "dim") for line in _callers(kind["stack"], kind["code_line"])]
        count = f"{kind['count']:,} x" if kind["count"] > 1 else ""
        table.add_row(count, format_bytes(kind["each_bytes"]), _category(kind["category"]), Group(*lines))
    return table


def _callers(stack: Sequence[str], line: str) -> list[str]:
    """Who called, outside torch: the innermost few."""
    at = stack.index(line) + 1 if line in stack else 0
    return [each for each in stack[at:] if not each.startswith("torch/")][: STACK_LINES if line else 0]


# -- out of memory -----------------------------------------------------------------------------------------------


def _oom(oom: Mapping[str, Any], count: int, width: int, *, alive: bool) -> RenderableType:
    rows = [
        ("asked for", format_bytes(oom["requested_bytes"]), f"of the driver: {format_bytes(oom['segment_bytes'])}"),
        ("allocated", gib(oom["allocated_bytes"]), "in live blocks then"),
        ("cached", "n/a" if oom["cached_bytes"] is None else format_bytes(oom["cached_bytes"]), _pieces(oom)),
        ("reserved", gib(oom["reserved_bytes"]), "allocated and cached"),
        ("device free", gib(oom["device_free_bytes"]), "what the driver had left; a limit of the process may be lower"),
    ]  # fmt: skip
    table = grid("left", "right", "left", rows=((name, size, Text(meaning, "dim")) for name, size, meaning in rows))
    lines = [Text(tail(clean(line), width - 4), "dim") for line in oom["stack"][:6]]
    parts: list[RenderableType] = [table]
    if count > 1:
        parts.append(Text(f"{count} requests failed; this is the last", "dim"))
    if lines:
        parts += [Text("asked for by"), *lines]
    if alive:
        parts += [Text("alive then"), _shares(oom["by_code_line"][:5], oom["allocated_bytes"], width)]
    return Group(*parts)


def _pieces(oom: Mapping[str, Any]) -> str:
    if oom["largest_hole_bytes"] is None:
        return ""
    return f"held from the driver but free, in pieces of at most {format_bytes(oom['largest_hole_bytes'])}"


# -- the rest ----------------------------------------------------------------------------------------------------


def _idle(idle: Mapping[str, Any]) -> Table:
    heads = ("", "reserved", "idle", "largest hole", "could go back", "rounding")
    table = grid("left", "right", "right", "right", "right", "right", heads=heads)
    for name, label in (("reserved_peak", "when most was reserved"), ("end", "at the end")):
        at = idle.get(name)
        if at:
            sizes = (at["idle_bytes"], at["largest_hole_bytes"], at["releasable_bytes"], at["rounding_bytes"])
            table.add_row(label, gib(at["reserved_bytes"]), *(format_bytes(size) for size in sizes))
    return table


def _temporaries(rows: Sequence[Mapping[str, Any]], width: int) -> Table:
    table = grid("right", "right", "right", "left", heads=("at once", "largest", "times", ""))
    for row in rows[:ROWS]:
        sizes = format_bytes(row["at_once_bytes"]), format_bytes(row["largest_bytes"])
        table.add_row(*sizes, f"{row['count']:,}", _name(row, max(width - 44, 24)))
    return table


def _growth(growth: Mapping[str, Any], width: int) -> RenderableType:
    steps = growth["steps"]
    table = grid("left", "right", "right", heads=("", "peak", "left behind"))
    shown = steps if len(steps) <= ROWS else [*steps[:4], None, *steps[-3:]]
    for step in shown:
        cells = (f"step {step['step']}", gib(step["peak_bytes"]), gib(step["left_bytes"])) if step else ("...", "", "")
        table.add_row(*cells)
    if growth["grows"] is None:
        said = "too few steps to tell whether it grows"
    elif growth["grows"]:
        said = f"every step leaves more behind: {format_bytes(growth['per_step_bytes'])} each"
    else:
        said = "it does not grow from step to step"
    survivors = [
        Text(f"  {format_bytes(share['allocated_bytes'])}  {tail(clean(share['name']) or '(no name)', width - 20)}")
        for share in growth["survivors"]
    ]
    return Group(table, Text(said), *survivors)


def _annotations(spans: Sequence[Mapping[str, Any]]) -> Table:
    largest = sorted(spans, key=lambda span: -span["allocated_bytes"])[:ROWS]
    return grid("right", "left", rows=((gib(span["allocated_bytes"]), clean(span["name"])) for span in largest))


def _checkpoints(points: Iterable[Mapping[str, Any]], log: Mapping[str, Any] | None = None) -> Table:
    heads = ("", "allocated", "reserved", "peak", "host", "")
    table = grid("left", "right", "right", "right", "right", "left", heads=heads)
    most = None if log is None else log["peak_bytes"]
    for point in points:
        reached = most is not None and point["peak_bytes"] == most
        if reached:
            most = None
        sizes = (gib(point[f"{name}_bytes"]) for name in ("allocated", "reserved", "peak", "cpu_used"))
        said = "the run broke here" if point["failed"] else "◀ peak" if reached else ""
        table.add_row(clean(point["name"]), *sizes, said)
    return table


def _files(files: Sequence[Mapping[str, Any]], reported: str | None) -> Table:
    table = grid("left", "left", "right", "right", "left", heads=("", "", "allocated", "reserved", ""))
    for file in files:
        sizes = gib(file["allocated_bytes"]), gib(file["reserved_bytes"])
        chosen = "reported above" if file["name"] == reported else ""
        table.add_row(clean(file["name"]), file["origin"], *sizes, Text(chosen, "dim"))
    return table


def _devices(devices: Sequence[Mapping[str, Any]], reported: int) -> Table:
    table = grid("left", "right", "right", "left", heads=("", "allocated", "reserved", ""))
    for each in devices:
        sizes = gib(each["allocated_bytes"]), gib(each["reserved_bytes"])
        chosen = "reported above" if each["device"] == reported else ""
        table.add_row(f"GPU {each['device']}", *sizes, Text(chosen, "dim"))
    return table


# -- two runs side by side -----------------------------------------------------------------------------------------

Diff = Mapping[str, Any]
DIFF_ROWS = 10
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
    for row in rows[:DIFF_ROWS]:
        module = tail(clean(row["name"]) or "(no module)", max(width - 46, 24))
        name = category_word(row["name"]) if category else module
        table.add_row(gib(row["a"]), gib(row["b"]), _signed(row["difference"]), name)
    return table


def _phases(rows: Sequence[Mapping[str, Any]]) -> Table:
    heads = ("", "", "a", "b", "b less a", "reserved, b less a")
    table = grid("left", "left", "right", "right", "right", "right", heads=heads)
    for row in rows[:24]:
        sizes = row["allocated_bytes"]
        step = f"step {row['step']}" if row["step"] else "start"
        less = (_signed(each["difference"]) for each in (sizes, row["reserved_bytes"]))
        table.add_row(step, clean(row["name"]), gib(sizes["a"]), gib(sizes["b"]), *less)
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
    for total in totals[:DIFF_ROWS]:
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
