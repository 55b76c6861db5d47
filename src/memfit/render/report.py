"""A report for a person: first what changes the numbers' meaning, then the peak, why it is so, and what next.

show_report(document, Console())      # document: memfit.report/1, as `memfit report --json` prints it
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
            yield section("parts with the highest peaks", _checkpoints(_highest(report["log"]["parts"])))
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
    reserved = peak["reserved_bytes"]
    held = f", {gib(reserved)} reserved" if reserved is not None else ""
    gpu = f", GPU {report['device']}" if report["device"] is not None else ""
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
    rows = (
        (
            small(share["allocated_bytes"]),
            percent(share["allocated_bytes"], total),
            f"{share['count']:,} x",
            _category(share["category"]),
            _name(share, max(width - 50, 24)),
        )
        for share in shares[:ROWS]
    )
    return grid("right", "right", "right", "left", "left", rows=rows)


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
    table = grid("left", "right", "left")
    for name, size, meaning in rows:
        table.add_row(name, size, Text(meaning, "dim"))
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
    cells = (
        (
            format_bytes(row["at_once_bytes"]),
            format_bytes(row["largest_bytes"]),
            f"{row['count']:,}",
            _name(row, max(width - 44, 24)),
        )
        for row in rows[:ROWS]
    )
    return grid("right", "right", "right", "left", heads=("at once", "largest", "times", ""), rows=cells)


def _growth(growth: Mapping[str, Any], width: int) -> RenderableType:
    steps = growth["steps"]
    table = grid("left", "right", "right", heads=("", "peak", "left behind"))
    shown = steps if len(steps) <= ROWS else [*steps[:4], None, *steps[-3:]]
    for step in shown:
        if step is None:
            table.add_row("...", "", "")
        else:
            table.add_row(f"step {step['step']}", gib(step["peak_bytes"]), gib(step["left_bytes"]))
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


def _highest(parts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(parts, key=lambda part: -(part["peak_bytes"] or 0))[:ROWS]


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
        chosen = "reported above" if each["device"] == reported else ""
        table.add_row(
            f"GPU {each['device']}", gib(each["allocated_bytes"]), gib(each["reserved_bytes"]), Text(chosen, "dim")
        )
    return table
