"""A plan for a person: verdict, why, what is alive at the peak, phases, largest tensors, what is assumed, what next.

    show_plan(document, Console())      # document: memfit.plan/1, as `memfit plan --json` prints it

Only what the document says is written. Text from elsewhere goes in as rich `Text`, never as markup. Colour repeats what
a word or a glyph says already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.render.words import clean, count, percent, short_op, tail
from memfit.units import gib

Plan = Mapping[str, Any]

VERDICT_STYLES = {"safe": "bold green", "tight": "bold yellow", "fails": "bold red"}
CATEGORY_STYLES = {
    "weights": "blue", "gradients": "green", "optimizer": "magenta", "activations": "yellow", "loss": "red",
    "calibration": "cyan", "kv_cache": "cyan", "temporaries": "bright_black", "workspaces": "bright_black",
}  # fmt: skip
MAX_WIDTH = 120
LARGEST = 10
EIGHTHS = " ▏▎▍▌▋▊▉█"


def show_plan(plan: Plan, console: Console) -> None:
    console.width = min(console.width, MAX_WIDTH)
    for part in _parts(plan, console):
        console.print(part)


def _parts(plan: Plan, console: Console) -> Iterator[RenderableType]:
    glyphs = _Glyphs(console.encoding)
    yield _verdict(plan)
    yield Padding(_why(plan), (0, 0, 0, 2))
    yield _section("memory", _memory(plan, glyphs, console.width))
    yield _section(_alive_title(plan), _alive(plan["breakdown"], glyphs, console.width))
    if plan["phases"]:
        yield _section("phases", _phases(plan, glyphs))
    if plan.get("largest"):
        yield _section("largest at the peak, by module and op", _largest(plan, console.width))
    yield _section("the job", _job(plan))
    yield _section("assumed", _bullets(plan["notes"]))
    yield Text()
    yield Text.assemble(("next: ", "bold"), clean(_next_step(plan)))


class _Glyphs:
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


def _section(title: str, body: RenderableType) -> RenderableType:
    return Group(Text(), Text(title, style="bold"), Padding(body, (0, 0, 0, 2)))


def _verdict(plan: Plan) -> Text:
    peak, verdict = plan["peak"], plan["verdict"]
    if verdict is None:
        return Text.assemble(("no verdict", "bold"), f": {gib(peak['device_bytes'])} on the device at the peak; no card was named")
    capacity, spare = plan["gpu"]["capacity_bytes"], plan["headroom_bytes"]
    word = Text(verdict, style=VERDICT_STYLES[verdict])
    if verdict == "fails":
        return word.append(f": needs {gib(plan['smallest_gpu_bytes'])}, has {gib(capacity)}: {gib(-spare)} too little", "default")
    return word.append(f": {gib(capacity - spare)} of {gib(capacity)}, {gib(spare)} to spare", "default")


def _why(plan: Plan) -> Text:
    peak, at = plan["peak"], plan["at_peak"]
    name, most = max(plan["breakdown"].items(), key=lambda item: item[1])
    step = f" of step {at['step']}" if at["step"] else ""
    text = (
        f"tensors take most in {clean(at['phase']) or 'the traced code'}{step}, {gib(peak['allocated_bytes'])}, of which "
        f"{percent(most, peak['allocated_bytes'])} {_category(name)}; torch reserves up to {gib(peak['reserved_bytes'])}, "
        f"and CUDA itself takes {gib(peak['context_bytes'])}"
    )
    return Text(text)


def _memory(plan: Plan, glyphs: _Glyphs, width: int) -> RenderableType:
    """One bar for the card: tensors, what the allocator holds beyond them, CUDA's own, and what is left."""
    peak = plan["peak"]
    device, allocated = peak["device_bytes"], peak["allocated_bytes"]
    capacity = plan["gpu"]["capacity_bytes"] if plan["gpu"] else device
    parts = [
        (glyphs.used, "blue", "allocated", allocated, "live tensors at their peak"),
        (glyphs.idle, "cyan", "reserved", peak["reserved_bytes"], "held by torch's allocator at its peak"),
        (glyphs.context, "magenta", "context", peak["context_bytes"], "CUDA itself"),
    ]
    lengths = [allocated, peak["reserved_bytes"] - allocated, peak["context_bytes"], max(capacity - device, 0)]
    cells = _shares(lengths, max(width - 4, 10))
    bar = Text(no_wrap=True)
    for (glyph, style, *_), cell in zip([*parts, (glyphs.free, "bright_black")], cells, strict=True):
        bar.append(glyph * cell, style)
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for glyph, style, name, size, meaning in parts:
        table.add_row(Text(glyph, style), name, gib(size), Text(meaning, "dim"))
    table.add_row("", Text("device", "bold"), Text(gib(device), "bold"), Text("reserved and context: what must fit", "dim"))
    if plan["gpu"]:
        table.add_row(Text(glyphs.free, "bright_black"), "card", gib(capacity), Text(clean(plan["gpu"]["name"]), "dim"))
    return Group(bar, table)


def _shares(sizes: Sequence[int], width: int) -> list[int]:
    """Cells for each part, `width` of them in all; the rounding of one is made good by the next."""
    total, done, cells = sum(sizes) or 1, 0, []
    for size in sizes:
        before, done = done, done + size
        cells.append(round(width * done / total) - round(width * before / total))
    return cells


def _alive_title(plan: Plan) -> str:
    at = plan["at_peak"]
    where = ", ".join(clean(part) for part in (short_op(at["op"]), at["module"]) if part)
    return f"alive at the peak: {gib(plan['peak']['allocated_bytes'])}" + (f", when this is made: {where}" if where else "")


def _category(name: str) -> str:
    return clean(name).replace("_", " ")


def _alive(breakdown: Mapping[str, int], glyphs: _Glyphs, width: int) -> Table:
    total = sum(breakdown.values())
    cells = max(min(width - 44, 60), 10)
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name, size in sorted(breakdown.items(), key=lambda item: -item[1]):
        if size:
            bar = glyphs.bar(size, total, cells).ljust(cells)
            table.add_row(_category(name), Text(bar, CATEGORY_STYLES.get(name, "")), gib(size), percent(size, total))
    return table


def _phases(plan: Plan, glyphs: _Glyphs) -> Table:
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_row("", "", Text("allocated", "dim"), Text("reserved", "dim"), "")
    at = (plan["at_peak"]["phase"], plan["at_peak"]["step"])
    for steps, phases in _steps(plan["phases"], at[1]):
        label = _steps_label(steps) if steps else "left out"
        for phase in phases:
            peaks = phase["name"] == at[0] and at[1] in steps
            sizes = (gib(phase["allocated_bytes"]), gib(phase["reserved_bytes"]))
            table.add_row(label, clean(phase["name"]), *sizes, Text(glyphs.peak, "bold") if peaks else "")
            label = ""
        if not phases:
            table.add_row("…", "", "", "", "")
    return table


def _steps(phases: Sequence[Mapping[str, Any]], peak: int) -> Iterator[tuple[list[int], list[Mapping[str, Any]]]]:
    """Steps that are alike are one; of many different ones, the first, the last and the peak's are shown."""
    merged: list[tuple[list[int], list[Mapping[str, Any]]]] = []
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


def _figures(phase: Mapping[str, Any]) -> tuple[str, int, int]:
    return phase["name"], phase["allocated_bytes"], phase["reserved_bytes"]


def _steps_label(steps: Sequence[int]) -> str:
    if steps == [0]:
        return "start"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"


def _largest(plan: Plan, width: int) -> Table:
    shown, total = plan["largest"][:LARGEST], plan["peak"]["allocated_bytes"]
    ops = max((min(len(short_op(group["op"])), 28) for group in shown), default=0)
    room = max(width - 2 - 11 - 9 - 8 - 13 - ops - 2, 16)
    table = Table.grid(padding=(0, 2))
    for justify in ("right", "right", "right", "left", "left", "left"):
        table.add_column(justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for group in shown:
        table.add_row(
            gib(group["allocated_bytes"]), percent(group["allocated_bytes"], total), f"{group['count']:,} x",
            Text(_category(group["category"]), CATEGORY_STYLES.get(group["category"], "")),
            Text(tail(clean(group["module"]), room)), Text(tail(clean(short_op(group["op"])), 28), "dim"),
        )  # fmt: skip
    return table


def _job(plan: Plan) -> RenderableType:
    model, work = plan["model"], plan["workload"]
    trained = f", {count(model['trainable_parameters'])} trained" if model["trainable_parameters"] else ""
    head = f"{clean(work.get('kind', ''))} of {clean(model['name'])}: {count(model['parameters'])} parameters{trained}"
    settings = (_setting(name, value) for name, value in work.items() if name not in ("kind", "model", "gpu"))
    return Group(Text(head), Text(", ".join(said for said in settings if said), "dim"))


def _setting(name: str, value: object) -> str:
    """`batch-size 4`, `grad-checkpointing`; what is off or empty goes without saying."""
    word = clean(name).replace("_", "-")
    if value is None or value is False or value == "":
        return ""
    if value is True:
        return word
    return f"{word} {clean(' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value)}"


def _bullets(notes: Iterable[str]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for note in notes:
        table.add_row("-", Text(clean(note)))
    return table


def _next_step(plan: Plan) -> str:
    """What can be done now; savings are not guessed at, for a second plan computes them."""
    smallest, verdict = gib(plan["smallest_gpu_bytes"]), plan["verdict"]
    if verdict is None:
        return f"it runs on {smallest} or more; `--gpu 24GB` or `--gpu 'RTX 4090'` asks about a card, `memfit gpus` lists them"
    if verdict == "fails":
        return f"a card with {smallest} or more{_or_try(plan['workload'])}"
    if verdict == "tight":
        return f"keep everything else off the card; it runs on {smallest} or more{_or_try(plan['workload'])}"
    return f"nothing to change; {smallest} would do"


def _or_try(work: Mapping[str, Any]) -> str:
    levers = []
    if work.get("grad_checkpointing") is False:
        levers.append("--grad-checkpointing")
    levers += [f"a smaller --{name.replace('_', '-')}" for name in ("batch_size", "seq_len") if work.get(name, 1) > 1]
    if not work.get("alloc_conf") and work.get("kind"):
        levers.append("--alloc-conf expandable_segments:True")
    return f"; or plan again with {' or '.join(levers)}" if levers else ""
