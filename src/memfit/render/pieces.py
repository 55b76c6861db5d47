"""What reports in a terminal are built of: sections, columns, bars, words for categories, rows of phases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.render.shown import NOT_MODELLED, Renderer
from memfit.units import duration, gib, two_figures

Document = Mapping[str, Any]


def usable_bytes(gpu: Mapping[str, Any]) -> int:
    """What the process may use of the card."""
    return int(gpu.get("usable_bytes", gpu["capacity_bytes"]))


def count(number: int) -> str:
    """`7.62 billion`, `135 million`, `12,345`."""
    for size, name in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= 0.9995 * size:  # else 999.9 million would be 1e+03 million
            return f"{number / size:.3g} {name}"
    return f"{number:,}"


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "n/a"


def clean(text: object) -> str:
    """Names of modules and files come from elsewhere: no control character of theirs reaches a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def short_op(op: str) -> str:
    """`aten._log_softmax.default` is `_log_softmax` to people."""
    return op.removeprefix("aten.").removesuffix(".default")


def tail(text: str, width: int) -> str:
    """The end of a long path says more than its beginning."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def time_words(time: Mapping[str, Any]) -> str:
    """How long a training takes, as `duration` of a document has it: all of it where that is known, and a step."""
    step, pace = _span(time["step_seconds"]), two_figures(time["tokens_per_second"]["likely"])
    said = f"about {step} a step, {pace} tokens a second"
    if time["total_seconds"] is None:
        return said
    steps = time["steps"]
    return f"about {_span(time['total_seconds'])} for {steps:,} step{'' if steps == 1 else 's'}; {said}"


def time_basis(document: Mapping[str, Any]) -> list[str]:
    """What the time rests on, where there is one."""
    time = document.get("duration")
    return [f"the time is estimated: {clean(time['basis'])}"] if time else []


def _span(seconds: Mapping[str, float]) -> str:
    return f"{duration(seconds['likely'])} ({duration(seconds['least'])} to {duration(seconds['most'])})"


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


def section(title: str, body: RenderableType) -> RenderableType:
    return Group(Text(), Text(title, style="bold"), indented(body))


def grid(*columns: JustifyMethod, heads: Sequence[str] = (), rows: Iterable[Sequence[RenderableType]] = ()) -> Table:
    """Only the last column may wrap: figures are never cut."""
    table = Table.grid(padding=(0, 2))
    for number, justify in enumerate(columns, 1):
        table.add_column(justify=justify, no_wrap=number < len(columns))
    if heads:
        table.add_row(*(Text(head, "dim") for head in heads))
    for row in rows:
        table.add_row(*row)
    return table


def printed(parts: Callable[[Document, Console], Iterator[RenderableType]]) -> Renderer:
    """Writes the parts of a document one after the other, within a width that they may ask the console for."""

    def show(document: Document, console: Console) -> None:
        console.width = min(console.width, MAX_WIDTH)
        for part in parts(document, console):
            console.print(part)

    return show


def indented(body: RenderableType) -> Padding:
    return Padding(body, (0, 0, 0, 2))


def labelled(label: str, text: object, style: str = "bold") -> Text:
    """`next: ...` and its likes."""
    return Text.assemble((f"{label}: ", style), clean(text))


def next_step(text: str) -> Iterator[RenderableType]:
    yield Text()
    yield labelled("next", text)


def bullets(notes: Iterable[str]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for note in notes:
        table.add_row("-", Text(clean(note)))
    return table


def job_file_warnings(document: Mapping[str, Any]) -> Iterator[Text]:
    """Of a job file: what the figures below do not have, to be read before them."""
    job = document.get("from") or {}
    for note in job.get("notes", ()):
        if note.startswith(NOT_MODELLED):
            yield Text(clean(note), "yellow")
    if job.get("unknown"):
        yield Text(f"unknown keys, which may mean anything: {', '.join(map(clean, job['unknown']))}", "yellow")
    if job.get("left_out"):
        yield Text(f"planned as if these keys were not there: {', '.join(map(clean, job['left_out']))}", "yellow")


def job_file_section(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What became of each of its keys."""
    job = document.get("from")
    if not job:
        return
    used, usual = (
        ", ".join(f"{clean(key)} {_value_word(value)}" for key, value in job[each].items() if value not in ("", [], {}))
        for each in ("used", "defaults")
    )
    lines = [f"read: {used}", f"by default: {usual}", *job["notes"]]
    lines += [f"of no influence on memory: {', '.join(job['without_influence'])}"] * bool(job["without_influence"])
    named = " and ".join(
        f"{clean(file)} ({clean(form)})" for file, form in zip(job["files"], job["formats"], strict=True)
    )
    yield section(f"from {named}", bullets(note for note in lines if not note.startswith(NOT_MODELLED)))


def _value_word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return clean(", ".join(map(str, value)) if isinstance(value, list) else value)


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
    rows = (
        (
            category_word(name),
            Text(glyphs.bar(size, total, cells).ljust(cells), CATEGORY_STYLES.get(name, "")),
            small(size),
            percent(size, total),
        )
        for name, size in sorted(breakdown.items(), key=lambda item: -item[1])
        if size
    )
    return grid("left", "left", "right", "right", rows=rows)


Phase = Mapping[str, Any]


def steps_table(phases: Sequence[Phase], peak: tuple[str, int], mark: str) -> Table:
    table = grid("left", "left", "right", "right", "left", heads=("", "", "allocated", "reserved", ""))
    for steps, found in _steps(phases, peak[1]):
        label = _label(steps)
        for phase in found:
            peaks = phase["name"] == peak[0] and peak[1] in steps
            sizes = (gib(phase["allocated_bytes"]), gib(phase["reserved_bytes"]))
            table.add_row(label, clean(phase["name"]), *sizes, Text(mark, "bold") if peaks else "")
            label = ""
        if not found:
            table.add_row(label, "", "", "", "")
    return table


def _steps(phases: Sequence[Phase], peak: int) -> Iterator[tuple[list[int], list[Phase]]]:
    """Steps that are alike are one; of many different ones, the first, the last and the peak's are shown."""
    figures = itemgetter("name", "allocated_bytes", "reserved_bytes")
    merged: list[tuple[list[int], list[Phase]]] = []
    for step, found in groupby(phases, key=lambda phase: phase["step"]):
        rows = list(found)
        if merged and list(map(figures, merged[-1][1])) == list(map(figures, rows)):
            merged[-1][0].append(step)
        else:
            merged.append(([step], rows))
    kept = [i for i, (steps, _) in enumerate(merged) if i < 4 or i == len(merged) - 1 or peak in steps]
    for before, i in zip([-1, *kept], kept, strict=False):
        if i > before + 1:
            yield [], []
        yield merged[i]


def _label(steps: Sequence[int]) -> str:
    if not steps:
        return "..."
    if steps == [0]:
        return "start"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"
