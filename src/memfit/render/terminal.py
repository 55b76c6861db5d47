"""A plan for a person: verdict, why, what is alive at the peak, phases, largest tensors, what is assumed, what next.

    show_plan(document, Console())      # document: memfit.plan/1, as `memfit plan --json` prints it

Only what the document says is written. Text from elsewhere goes in as rich `Text`, never as markup. Colour repeats what
a word or a glyph says already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console, Group, JustifyMethod, RenderableType
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
    verdict, spare = plan["verdict"], plan["headroom_bytes"]
    if verdict is None:
        return Text.assemble(
            ("no verdict", "bold"), f": {gib(plan['peak']['device_bytes'])} at the peak, no card named"
        )
    capacity = plan["gpu"]["capacity_bytes"]
    if verdict == "fails":
        rest = f"needs {gib(plan['smallest_gpu_bytes'])}, has {gib(capacity)}: {gib(-spare)} too little"
    else:
        rest = f"{gib(capacity - spare)} of {gib(capacity)}, {gib(spare)} to spare"
    return Text.assemble((verdict, VERDICT_STYLES[verdict]), f": {rest}")


def _why(plan: Plan) -> Text:
    peak, at = plan["peak"], plan["at_peak"]
    name, most = max(plan["breakdown"].items(), key=lambda item: item[1])
    where = clean(at["phase"]) or "the traced code"
    step = f" of step {at['step']}" if at["step"] else ""
    return Text(
        f"most is held in {where}{step}: {gib(peak['allocated_bytes'])} of "
        f"tensors ({percent(most, peak['allocated_bytes'])} {_category(name)}); torch reserves up to "
        f"{gib(peak['reserved_bytes'])}, CUDA itself takes {gib(peak['context_bytes'])}"
    )


def _memory(plan: Plan, glyphs: _Glyphs, width: int) -> RenderableType:
    """One bar for the card: tensors, what the allocator holds beyond them, CUDA's own, and what is left."""
    peak, card = plan["peak"], plan["gpu"]
    allocated, reserved, context, device = (
        peak[f"{name}_bytes"] for name in ("allocated", "reserved", "context", "device")
    )
    spare = max(card["capacity_bytes"] - device, 0) if card else 0
    smallest = plan["smallest_gpu_bytes"]
    gives_back = "; there torch gives back what is idle" if smallest < device else ""
    parts = zip(
        (glyphs.used, glyphs.idle, glyphs.context, glyphs.free),
        ("blue", "cyan", "magenta", "bright_black"),
        _shares([allocated, reserved - allocated, context, spare], max(width - 2, 10)),
        strict=True,
    )
    bar = Text.assemble(*((glyph * cells, style) for glyph, style, cells in parts), no_wrap=True)
    rows = [
        (glyphs.used, "allocated", allocated, "tensors that are alive, at their peak"),
        (glyphs.idle, "reserved", reserved, "what torch's allocator holds for them, at its peak"),
        (glyphs.context, "context", context, "CUDA itself"),
        ("", "device", device, "reserved and context: what nvidia-smi shows"),
        ("", "at least", smallest, "the smallest card it runs on" + gives_back),
    ]  # fmt: skip
    if card:
        named = clean(card["name"])
        rows.append(
            (glyphs.free, "card", card["capacity_bytes"], "as given" if named == gib(card["capacity_bytes"]) else named)
        )
    table = _grid("left", "left", "right", "left")
    for glyph, name, size, meaning in rows:
        table.add_row(glyph, name, gib(size), Text(meaning, "dim"))
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
    made = " in ".join(clean(part) for part in (short_op(at["op"]), at["module"]) if part)
    return f"alive at the peak: {gib(plan['peak']['allocated_bytes'])}" + (f" (just made: {made})" if made else "")


def _category(name: str) -> str:
    return clean(name).replace("_", " ")


def _alive(breakdown: Mapping[str, int], glyphs: _Glyphs, width: int) -> Table:
    total = sum(breakdown.values())
    cells = max(min(width - 44, 60), 10)
    table = _grid("left", "left", "right", "right")
    for name, size in sorted(breakdown.items(), key=lambda item: -item[1]):
        if size:
            bar = glyphs.bar(size, total, cells).ljust(cells)
            table.add_row(_category(name), Text(bar, CATEGORY_STYLES.get(name, "")), _small(size), percent(size, total))
    return table


def _small(size: int) -> str:
    """Something is never shown as nothing."""
    return "< 0.01 GiB" if gib(size) == gib(0) else gib(size)


def _grid(*columns: JustifyMethod) -> Table:
    """Only the last column may wrap: figures are never cut."""
    table = Table.grid(padding=(0, 2))
    for number, justify in enumerate(columns, 1):
        table.add_column(justify=justify, no_wrap=number < len(columns))
    return table


def _phases(plan: Plan, glyphs: _Glyphs) -> Table:
    table = _grid("left", "left", "right", "right", "left")
    table.add_row("", "", Text("allocated", "dim"), Text("reserved", "dim"), "")
    at = (plan["at_peak"]["phase"], plan["at_peak"]["step"])
    for steps, phases in _steps(plan["phases"], at[1]):
        label = _steps_label(steps)
        for phase in phases:
            peaks = phase["name"] == at[0] and at[1] in steps
            sizes = (gib(phase["allocated_bytes"]), gib(phase["reserved_bytes"]))
            table.add_row(label, clean(phase["name"]), *sizes, Text(glyphs.peak, "bold") if peaks else "")
            label = ""
        if not phases:
            table.add_row(label, "", "", "", "")
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
    if not steps:
        return "..."
    if steps == [0]:
        return "start"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"


def _largest(plan: Plan, width: int) -> Table:
    total, shown = plan["peak"]["allocated_bytes"], plan["largest"][:LARGEST]
    figures = [
        (_small(group["allocated_bytes"]), percent(group["allocated_bytes"], total), f"{group['count']:,} x")
        for group in shown
    ]
    labels = [_category(group["category"]) for group in shown]
    taken = 2 + sum(max(map(len, column)) + 2 for column in (*zip(*figures, strict=True), labels))
    table = _grid("right", "right", "right", "left", "left")
    for group, row, label in zip(shown, figures, labels, strict=True):
        style = CATEGORY_STYLES.get(group["category"], "")
        table.add_row(*row, Text(label, style), _made_where(group, max(width - taken, 24)))
    return table


def _made_where(group: Mapping[str, Any], room: int) -> Text:
    """The module and the op; weights are made by being loaded, which says nothing about them."""
    op = "" if group["category"] == "weights" else tail(clean(short_op(group["op"])), room)
    module = tail(clean(group["module"]), room - len(op) - 2) if room - len(op) > 6 else ""
    return Text.assemble(module, "  " if module and op else "", (op, "dim"))


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
    """What can be done now. Savings are not guessed at: a second plan computes them."""
    smallest, verdict = gib(plan["smallest_gpu_bytes"]), plan["verdict"]
    if verdict is None:
        return "add --gpu 24GB or --gpu 'RTX 4090' to ask about a card; `memfit gpus` lists them"
    if verdict == "safe":
        return "nothing to change"
    first = "keep other programs off the card" if verdict == "tight" else f"a card with {smallest} or more"
    return ", or ".join([first, *_levers(plan)])


def _levers(plan: Plan) -> Iterator[str]:
    """Settings of this job that could help; none that cannot."""
    work, peak, alive = plan["workload"], plan["peak"], plan["breakdown"]
    room = plan["gpu"]["capacity_bytes"] - peak["context_bytes"]
    if alive["weights"] > room:
        yield f"a smaller model: the weights alone take {gib(alive['weights'])}"
        return
    tried = []
    if work.get("grad_checkpointing") is False and alive["activations"]:
        tried.append("--grad-checkpointing")
    tried += [f"a smaller {flag}" for name, flag in _SHRINK.items() if work.get(name, 1) > 1]
    if work.get("alloc_conf") == "" and peak["allocated_bytes"] <= room:
        tried.append("--alloc-conf expandable_segments:True")
    if tried and "model" in work:
        yield f"plan again with {' or '.join(tried)}"


_SHRINK = {"batch_size": "--batch-size", "seq_len": "--seq-len"}
