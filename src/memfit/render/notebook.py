"""A plan, a fit or a report as a piece of HTML for a notebook: the bar and the table, without script or outside file.

Text from elsewhere is escaped. Colours are safe for the colour-blind, sit on whatever the notebook's background is, and
repeat what the table says in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from typing import Any

from memfit.render.fit import say_fit
from memfit.render.pieces import category_word, clean, job_file_warnings, percent
from memfit.render.plan import say_verdict, say_why, undecided_bytes
from memfit.render.shown import NOT_MODELLED
from memfit.units import gib

Document = Mapping[str, Any]
Part = tuple[str, int, str]
"""A name, bytes, a colour."""

COLOURS = {
    "weights": "#0072b2", "gradients": "#009e73", "optimizer": "#cc79a7", "activations": "#e69f00", "loss": "#d55e00",
    "calibration": "#56b4e9", "kv_cache": "#56b4e9",
}  # fmt: skip
OTHER, CACHED, CONTEXT = "#999999", "#bfbfbf", "#7a7a7a"
STYLE = (
    ".memfit{font:13px/1.45 system-ui,sans-serif;color:inherit;max-width:56em;color-scheme:light dark}"
    ".memfit .bar{display:flex;height:1.5em;margin:.4em 0;border:1px solid currentColor;overflow:hidden}"
    ".memfit .bar i{display:block;height:100%}.memfit table{border-collapse:collapse;margin:.4em 0;color:inherit}"
    ".memfit td,.memfit th{padding:.1em .9em .1em 0;text-align:left;border:0;background:none;color:inherit}"
    ".memfit td.n,.memfit th.n{text-align:right;font-variant-numeric:tabular-nums}"
    ".memfit .k{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border:1px solid currentColor}"
    ".memfit p{margin:.2em 0}.memfit .w{border-left:3px solid #d55e00;padding-left:.5em}"
    "@media (prefers-color-scheme:dark){.memfit .bar i{filter:brightness(1.1)}}"
)


def as_html(document: Document) -> str | None:
    """None for documents that have no picture: a notebook then shows their text."""
    make = _PICTURES.get(str(document.get("schema")))
    return None if make is None else f'<div class="memfit"><style>{STYLE}</style>{"".join(make(document))}</div>'


def _plan(plan: Document) -> Iterator[str]:
    peak, card = plan["peak"], plan["gpu"]
    on = f" on {clean(card['name'])}" if card else ""
    yield _line(f"{clean(plan['workload'].get('kind', ''))} of {clean(plan['model']['name'])}{on}", "strong")
    yield _line(say_verdict(plan).plain, "b")
    yield _line(say_why(plan).plain)
    yield from (_line(each, warns=True) for each in plan["notes"] if each.startswith(NOT_MODELLED))
    yield from (_line(each.plain, warns=True) for each in job_file_warnings(plan))
    parts = [
        *_categories(plan["breakdown"]),
        ("held by the allocator beyond that", peak["reserved_bytes"] - peak["allocated_bytes"], CACHED),
        ("CUDA itself", peak["context_bytes"], CONTEXT),
        ("products that the card may pad", undecided_bytes(peak), OTHER),
    ]
    yield from _picture(parts, card["capacity_bytes"] if card else peak["device_bytes"])
    yield _phases(plan["phases"])


def _fit(fitted: Document) -> Iterator[str]:
    capacity = fitted["gpu"]["capacity_bytes"]
    job = f"{clean(fitted['workload']['kind'])} of {clean(fitted['model']['name'])}"
    yield _line(f"{job} on {clean(fitted['gpu']['name'])}", "strong")
    yield _line(say_fit(fitted).plain, "b")
    yield from (_line(each.plain, warns=True) for each in job_file_warnings(fitted))
    for name in ("before", "after"):
        size = fitted[name]["device_bytes"]
        yield _line(f"{name}: {gib(size)}")
        yield _bar([(name, size, COLOURS["weights" if name == "after" else "loss"])], capacity)
    rows = [
        (str(number), clean(each["name"]), clean(each["cost"]), gib(each["before_bytes"]), gib(each["after_bytes"]))
        for number, each in enumerate(fitted["changes"], 1)
    ]
    yield _table(("", "change", "cost", "before", "after"), rows, numbers=(3, 4)) if rows else ""


def _report(report: Document) -> Iterator[str]:
    peak = report["peak"]
    yield _line(clean(report["source"]["path"]), "strong")
    yield from (_line(clean(each["text"]), warns=True) for each in report["messages"])
    if not peak["allocated_bytes"]:
        yield _line("no figures of a GPU", "b")
        return
    held = "" if peak["reserved_bytes"] is None else f", {gib(peak['reserved_bytes'])} reserved"
    yield _line(f"peak: {gib(peak['allocated_bytes'])} allocated{held} ({report['origin']})", "b")
    if "breakdown" in report:
        beyond = (peak["reserved_bytes"] or peak["allocated_bytes"]) - peak["allocated_bytes"]
        parts = [*_categories(report["breakdown"]), ("held by the allocator beyond that", beyond, CACHED)]
        yield from _picture(parts, sum(size for _, size, _ in parts))
        yield _phases(report["phases"])


_PICTURES: dict[str, Callable[[Document], Iterator[str]]] = {
    "memfit.plan/1": _plan, "memfit.fit/1": _fit, "memfit.report/1": _report,
}  # fmt: skip


def _categories(breakdown: Mapping[str, int]) -> Iterator[Part]:
    for name, size in sorted(breakdown.items(), key=lambda item: -item[1]):
        if size:
            yield category_word(name), size, COLOURS.get(name, OTHER)


def _picture(parts: Iterable[Part], whole: int) -> Iterator[str]:
    shown = [part for part in parts if part[1] > 0]
    yield _bar(shown, whole)
    rows = [(name, gib(size), percent(size, whole)) for name, size, _ in shown]
    yield _table(("", "size", "share"), rows, numbers=(1, 2), keys=[colour for *_, colour in shown])


def _bar(parts: list[Part], whole: int) -> str:
    """The whole is the card; what is more than it fills the bar and is said in words."""
    total = max(whole, sum(size for _, size, _ in parts), 1)
    cells = (
        f'<i style="width:{100 * size / total:.3f}%;background:{colour}" title="{escape(f"{name}: {gib(size)}")}"></i>'
        for name, size, colour in parts
    )
    return f'<div class="bar" role="img" aria-label="{escape(gib(whole))}">{"".join(cells)}</div>'


def _phases(phases: Iterable[Mapping[str, Any]]) -> str:
    names = ((f"{each['name']} {each['step']}" if each.get("step") else str(each["name"]), each) for each in phases)
    rows = [(name, gib(each["allocated_bytes"]), gib(each["reserved_bytes"])) for name, each in names]
    return _table(("phase", "allocated", "reserved"), rows, numbers=(1, 2)) if rows else ""


def _table(
    head: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, numbers: tuple[int, ...], keys: list[str] | None = None
) -> str:
    def cell(tag: str, place: int, text: str, key: str = "") -> str:
        sign = f'<span class="k" style="background:{key}"></span>' if key and not place else ""
        named = ' class="n"' if place in numbers else ""
        return f"<{tag}{named}>{sign}{escape(clean(text))}</{tag}>"

    lines = ["".join(cell("th", place, text) for place, text in enumerate(head))]
    for number, row in enumerate(rows):
        key = keys[number] if keys else ""
        lines.append("".join(cell("td", place, text, key) for place, text in enumerate(row)))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _line(text: str, tag: str = "span", *, warns: bool = False) -> str:
    named = ' class="w"' if warns else ""
    return f"<p{named}><{tag}>{escape(text)}</{tag}></p>"
