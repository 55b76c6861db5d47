"""A pre-flight for a person: by subject, a line for each check with its status, what was found, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.render.pieces import print_parts, section
from memfit.render.words import clean

STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
ORDER = ("failed", "warning", "ok", "skipped")


def show_check(document: Mapping[str, Any], console: Console) -> None:
    print_parts(_parts(document), console)


def _parts(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield _heading(document)
    for subject in dict.fromkeys(each["subject"] for each in document["checks"]):
        yield section(clean(subject), _lines([each for each in document["checks"] if each["subject"] == subject]))
    yield Text()
    yield _summary(document)


def _heading(document: Mapping[str, Any]) -> RenderableType:
    asked = document["asked"]
    what = "this machine"
    if asked["config"] is not None:
        what = f"config {asked['config']}"
    elif asked["workload"] is not None:
        what = f"{asked['workload']['kind']} of {asked['workload']['model']}"
    on = "" if asked["gpu"] is None else f" on {asked['gpu']}"
    return Text.assemble("check: ", (clean(what + on), "bold"))


def _lines(checks: list[Mapping[str, Any]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in checks:
        found: RenderableType = Text(clean(each["found"]))
        if each["next"] is not None:
            found = Group(found, Text.assemble(("next: ", "bold"), clean(each["next"])))
        table.add_row(Text(each["status"], STYLES[each["status"]]), Text(clean(each["name"])), found)
    return table


def _summary(document: Mapping[str, Any]) -> Text:
    counts = document["counts"]
    named = {"warning": "warning" if counts["warning"] == 1 else "warnings"}
    wrong = ", ".join(dict.fromkeys(clean(each["name"]) for each in document["checks"] if each["status"] == "failed"))
    said = ", ".join(
        f"{counts[status]} {named.get(status, status)}" + (f" ({wrong})" if status == "failed" else "")
        for status in ORDER if counts[status]
    )  # fmt: skip
    words = {"failed": "not ready", "warning": "ready, with warnings", "ok": "ready"}
    verdict = document["verdict"]
    return Text.assemble((words[verdict], STYLES[verdict]), f": {said} ({document['seconds']:.1f} s)")
