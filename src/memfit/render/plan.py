"""A plan for a person: verdict, why, what is alive at the peak, phases, largest tensors, what next.

    show_plan(document, Console())      # document: memfit.plan/1, as `memfit plan --json` prints it

Only what the document says is written. Text from elsewhere goes in as rich `Text`, never as markup. Colour repeats what
a word or a glyph says already.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
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
    count,
    grid,
    indented,
    job_file_section,
    job_file_warnings,
    next_step,
    percent,
    phase_words,
    printed,
    section,
    short_op,
    small,
    steps_table,
    tail,
    time_basis,
    time_words,
    usable_bytes,
)
from memfit.render.shown import Renderer, stands_in_front
from memfit.units import format_bytes, gib

Plan = Mapping[str, Any]

VERDICT_STYLES = {"safe": "bold green", "tight": "bold yellow", "fails": "bold red"}
LARGEST = 10
PADDING = "beyond that, if the card pads some products and not others: at most"


@printed
def show_plan(plan: Plan, console: Console) -> Iterator[RenderableType]:
    glyphs = Glyphs(console.encoding)
    yield say_verdict(plan)
    yield indented(say_why(plan))
    yield from (indented(Text(note, style="yellow")) for note in plan["notes"] if stands_in_front(note))
    yield from map(indented, job_file_warnings(plan))
    if plan.get("duration"):
        yield indented(Text(f"time: {time_words(plan['duration'])} (estimated)"))
    yield section("memory", _memory(plan, glyphs, console.width))
    yield section(_alive_title(plan), alive_bars(plan["breakdown"], glyphs, console.width))
    if plan["phases"]:
        peak = plan["at_peak"]["phase"], plan["at_peak"]["step"]
        yield section("phases", steps_table(plan["phases"], peak, glyphs.peak))
    if plan.get("largest"):
        yield section("largest at the peak, by module and op", _largest(plan, console.width))
    if plan.get("lines"):
        yield section("at the peak, by the lines of your code", _own_lines(plan, console.width))
    if plan.get("advice"):
        yield section("what would take less", bullets(map(_advice_words, plan["advice"])))
    yield section("the job", _job(plan))
    yield from job_file_section(plan)
    yield section("assumed", bullets([*plan["notes"], *time_basis(plan)]))
    yield from next_step(_what_next(plan))


def say_verdict(plan: Plan) -> Text:
    if plan["verdict"] is None:
        peak = gib(plan["peak"]["device_bytes"])
        return Text.assemble(("no verdict", "bold"), f": {peak} at the peak, no card named")
    return verdict_line(plan, usable_bytes(plan["gpu"]))


def verdict_line(document: Mapping[str, Any], capacity: int) -> Text:
    verdict, spare = document["verdict"], document["headroom_bytes"]
    if verdict == "fails":
        rest = f"needs {gib(document['smallest_gpu_bytes'])}, has {gib(capacity)}: {gib(-spare)} too little"
    else:
        rest = f"{gib(capacity - spare)} of {gib(capacity)}, {gib(spare)} to spare"
    return Text.assemble((verdict, VERDICT_STYLES[verdict]), f": {rest}")


def say_why(plan: Plan) -> Text:
    peak, at = plan["peak"], plan["at_peak"]
    name, most = max(plan["breakdown"].items(), key=lambda item: item[1])
    where = phase_words(at["phase"] or "the traced code", at["step"])
    return Text(
        f"most is held in {where}: {gib(peak['allocated_bytes'])} of "
        f"tensors ({percent(most, peak['allocated_bytes'])} {category_word(name)}); torch reserves up to "
        f"{gib(peak['reserved_bytes'])}, CUDA itself takes {_context_words(plan)}{_undecided_words(peak)}"
    )


def undecided_bytes(peak: Mapping[str, int]) -> int:
    """Of the device, what the card may yet decide to take."""
    return peak["device_bytes"] - peak["reserved_bytes"] - peak["context_bytes"]


def _undecided_words(peak: Mapping[str, int]) -> str:
    more = undecided_bytes(peak)
    return f", products that the card may pad up to {gib(more)}" if more else ""


def _context_words(plan: Plan) -> str:
    """A range where it is one; the upper end is the one in all sums."""
    low, high = _context_ends(plan)
    return gib(high) if low == high else f"{gib(low)} to {gib(high)} (estimated: the upper end counts)"


def _context_ends(plan: Plan) -> tuple[int, int]:
    """Documents of before there was a range have one figure."""
    high: int = plan["peak"]["context_bytes"]
    return plan.get("context", {}).get("low_bytes", high), high


def _memory(plan: Plan, glyphs: Glyphs, width: int) -> RenderableType:
    """One bar for the card: tensors, what the allocator holds beyond them, CUDA's own, and what is left."""
    peak, card = plan["peak"], plan["gpu"]
    allocated, reserved, context, device = (
        peak[f"{name}_bytes"] for name in ("allocated", "reserved", "context", "device")
    )
    spare, undecided = max(card["capacity_bytes"] - device, 0) if card else 0, undecided_bytes(peak)
    sums = "all of these: what the verdict is of" if undecided else "reserved and context: what nvidia-smi shows"
    smallest = plan["smallest_gpu_bytes"]
    gives_back = "; there torch gives back what is idle" if smallest < device else ""
    parts = zip(
        (glyphs.used, glyphs.idle, glyphs.context, glyphs.free),
        ("blue", "cyan", "magenta", "bright_black"),
        _shares([allocated, reserved - allocated + undecided, context, spare], max(width - 2, 10)),
        strict=True,
    )
    bar = Text.assemble(*((glyph * cells, style) for glyph, style, cells in parts), no_wrap=True)
    rows = [
        (glyphs.used, "allocated", allocated, "tensors that are alive, at their peak"),
        (glyphs.idle, "reserved", reserved, "what torch's allocator holds for them, at its peak"),
        (glyphs.context, "context", context, _context_meaning(plan)),
        *([("", "padding", undecided, PADDING)] if undecided else []),
        ("", "device", device, sums),
        ("", "at least", smallest, _least_meaning(plan) + gives_back),
    ]  # fmt: skip
    if card:
        named = clean(card["name"])
        size = card["capacity_bytes"]
        rows.append((glyphs.free, "card", size, "as given" if named == gib(size) else named))
    cells = ((glyph, name, gib(size), Text(meaning, "dim")) for glyph, name, size, meaning in rows)
    return Group(bar, grid("left", "left", "right", "left", rows=cells))


def _least_meaning(plan: Plan) -> str:
    if plan["workload"].get("kind") == "prune":
        return "the smallest card for what is held on it here; with less, less is held"
    return "the smallest card it runs on"


def _context_meaning(plan: Plan) -> str:
    low, high = _context_ends(plan)
    return "CUDA itself" if low == high else f"CUDA itself, estimated: {gib(low)} at the least"


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


def _largest(plan: Plan, width: int) -> Table:
    total, shown = plan["peak"]["allocated_bytes"], plan["largest"][:LARGEST]
    figures = [
        (small(group["allocated_bytes"]), percent(group["allocated_bytes"], total), f"{group['count']:,} x")
        for group in shown
    ]
    labels = [category_word(group["category"]) for group in shown]
    taken = 2 + sum(max(map(len, column)) + 2 for column in (*zip(*figures, strict=True), labels))
    table = grid("right", "right", "right", "left", "left")
    for group, row, label in zip(shown, figures, labels, strict=True):
        style = CATEGORY_STYLES.get(group["category"], "")
        table.add_row(*row, Text(label, style), _made_where(group, max(width - taken, 24)))
    return table


def _made_where(group: Mapping[str, Any], room: int) -> Text:
    """The module and the op; weights are made by being loaded, which says nothing about them."""
    op = "" if group["category"] == "weights" else tail(clean(short_op(group["op"])), room)
    module = tail(clean(group["module"]), room - len(op) - 2) if room - len(op) > 6 else ""
    return Text.assemble(module, "  " if module and op else "", (op, "dim"))


def _own_lines(plan: Plan, width: int) -> Table:
    total = plan["peak"]["allocated_bytes"]
    table = grid("right", "right", "left", "left", "left")
    for each in plan["lines"][:LARGEST]:
        place = f"{clean(each['file']).replace(chr(92), '/').rpartition('/')[2]}:{each['line']}"
        made = f"{'backward of ' * each['backward']}{clean(each['code'])}"
        table.add_row(
            small(each["allocated_bytes"]),
            percent(each["allocated_bytes"], total),
            Text(category_word(each["category"]), CATEGORY_STYLES.get(each["category"], "")),
            place,
            Text(made, "dim", overflow="ellipsis", no_wrap=True),
        )
    return table


def _advice_words(each: Mapping[str, Any]) -> str:
    """As replayed by itself: together they may save less than their sum."""
    place = f"{clean(each['place'])}: " if each["place"] else ""
    saved = each["saves_allocated_bytes"]
    reserved = f", {format_bytes(each['saves_reserved_bytes'])} reserved" if each["saves_reserved_bytes"] > 0 else ""
    saves = f" (saves {format_bytes(saved)} of the peak{reserved})" if saved else ""
    return f"{place}{clean(each['what'])}: {clean(each['how'])}{saves}"


def _job(plan: Plan) -> RenderableType:
    model, work = plan["model"], plan["workload"]
    trained = f", {count(model['trainable_parameters'])} trained" if model["trainable_parameters"] else ""
    head = f"{clean(work.get('kind', ''))} of {clean(model['name'])}: {count(model['parameters'])} parameters{trained}"
    unsaid = ("kind", "model", "gpu", *(("world_size", "parallel") if work.get("world_size") == 1 else ()))
    settings = (_setting(name, value) for name, value in work.items() if name not in unsaid)
    return Group(Text(head), Text(", ".join(said for said in settings if said), "dim"))


def _setting(name: str, value: object) -> str:
    """`batch-size 4`, `grad-checkpointing`; what is off or empty goes without saying."""
    word = clean(name).replace("_", "-")
    if value is None or value is False or value in ("", "none", [], 0.0):
        return ""
    if value is True:
        return word
    return f"{word} {clean(' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value)}"


def _what_next(plan: Plan) -> str:
    """What can be done now. Savings are not guessed at: `memfit fit` computes them on this very job."""
    smallest, verdict = gib(plan["smallest_gpu_bytes"]), plan["verdict"]
    if verdict is None:
        return "add --gpu 24GB or --gpu 'RTX 4090' to ask about a card; `memfit gpus` lists them"
    if verdict == "safe":
        return "nothing to change"
    first = "keep other programs off the card" if verdict == "tight" else f"a card with {smallest} or more"
    return ", or ".join([first, *_levers(plan)])


def _levers(plan: Plan) -> Iterator[str]:
    """Where no setting can help, none is looked for."""
    work, peak, alive = plan["workload"], plan["peak"], plan["breakdown"]
    room = usable_bytes(plan["gpu"]) - peak["context_bytes"]
    if work.get("kind") == "script":
        yield "less at a time: `--try batch_size=1,2,4` plans the script with other values of its arguments"
        yield "gradient checkpointing in it; `memfit fit` shows what that and other levers save in a job of this kind"
    elif alive["weights"] > room and work.get("kind") != "lora":
        yield f"a smaller model: the weights alone take {gib(alive['weights'])}"
    elif "model" in work:
        files = " ".join(f"--from {clean(each)}" for each in (plan.get("from") or {}).get("files", ()))
        in_few_bits = work.get("kind") == "lora" and work.get("quant", "none") != "none"
        kind = "lora` or `memfit fit qlora" if in_few_bits else clean(work.get("kind", ""))
        same = f"{files}` with this card" if files else f"{kind}` with these flags"
        does = "leaves more room" if plan.get("verdict") == "tight" else "makes it fit"
        yield f"`memfit fit {same}: the smallest change that {does}"


WIDTH = 100


def as_text(show: Renderer, document: Plan, *, width: int = WIDTH, encoding: str = "utf-8") -> str:
    """What `show` writes to an output of that encoding, without the blanks that rich pads lines with."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    console = Console(file=out, width=width, color_system=None, force_terminal=False, highlight=False, markup=False)
    show(document, console)
    out.seek(0)
    return "\n".join(line.rstrip() for line in out.read().splitlines())
