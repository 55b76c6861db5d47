"""Short documents for a person: a pre-flight, models and cards, a profile, a machine's memory, a script's trials."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.render.pieces import (
    Document,
    clean,
    count,
    grid,
    indented,
    job_file_section,
    job_file_warnings,
    labelled,
    percent,
    printed,
    section,
    tail,
)
from memfit.render.plan import VERDICT_STYLES, verdict_line
from memfit.units import gib

STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
ORDER = ("failed", "warning", "ok", "skipped")


@printed
def show_check(document: Document, console: Console) -> Iterator[RenderableType]:
    yield _heading(document)
    yield from job_file_warnings(document)
    for subject in dict.fromkeys(each["subject"] for each in document["checks"]):
        yield section(clean(subject), _lines([each for each in document["checks"] if each["subject"] == subject]))
    yield from job_file_section(document)
    yield Text()
    yield _summary(document)


def _heading(document: Document) -> RenderableType:
    asked = document["asked"]
    what = "this machine"
    if asked["config"] is not None:
        what = f"config {asked['config']}"
    elif asked["workload"] is not None:
        what = f"{asked['workload']['kind']} of {asked['workload']['model']}"
    on = "" if asked["gpu"] is None else f" on {asked['gpu']}"
    return Text.assemble("check: ", (clean(what + on), "bold"))


def _lines(checks: list[Document]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in checks:
        found: RenderableType = Text(clean(each["found"]))
        if each["next"] is not None:
            found = Group(found, labelled("next", each["next"]))
        table.add_row(Text(each["status"], STYLES[each["status"]]), Text(clean(each["name"])), found)
    return table


def _summary(document: Document) -> Text:
    counts = document["counts"]
    named = {"warning": "warning" if counts["warning"] == 1 else "warnings"}
    wrong = ", ".join(dict.fromkeys(clean(each["name"]) for each in document["checks"] if each["status"] == "failed"))
    said = ", ".join(
        f"{counts[status]} {named.get(status, status)}" + (f" ({wrong})" if status == "failed" else "")
        for status in ORDER
        if counts[status]
    )
    words = {"failed": "not ready", "warning": "ready, with warnings", "ok": "ready"}
    verdict = document["verdict"]
    return Text.assemble((words[verdict], STYLES[verdict]), f": {said} ({document['seconds']:.1f} s)")


def show_models(document: Document, console: Console) -> None:
    """Ids stand under their model, a line each: whole in any terminal, to be copied."""
    models = document["models"]
    width = max((len(clean(model["name"])) for model in models), default=0)
    for model in models:
        what = f"  {count(model['parameters'])}, {clean(model['type'])}"
        console.print(Text.assemble((clean(model["name"]).ljust(width), "bold"), what), soft_wrap=True)
        stored = [(each["hub_id"], f"  {each['storage']}") for each in model["quantised"]]
        for name, storage in [*((name, "") for name in model["hub_ids"]), *stored]:
            console.print(Text(f"    {clean(name)}{clean(storage)}", "dim"), soft_wrap=True)


def show_gpus(document: Document, console: Console) -> None:
    table = _table("name", ("memory", "right"), ("context", "right"), "", ("compute capability", "right"))
    for card in document["gpus"]:
        low, high = card["context"]["low_bytes"], card["context"]["high_bytes"]
        context = gib(high) if low == high else f"{gib(low).removesuffix(' GiB')} to {gib(high)}"
        basis = Text(clean(card["context"]["basis"]), "dim")
        capability = clean(card["compute_capability"])
        table.add_row(clean(card["name"]), gib(card["capacity_bytes"]), context, basis, capability)
    console.print(table)


def _table(*columns: str | tuple[str, JustifyMethod]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        name, justify = column if isinstance(column, tuple) else (column, _LEFT)
        table.add_column(name, justify=justify, overflow="fold")
    return table


_LEFT: JustifyMethod = "left"


def show_profile(document: Document, console: Console) -> None:
    peak, origin = document["peak"], document["origin"]
    if document["verdict"] is not None:
        console.print(verdict_line(document, document["capacity_bytes"]))
    reserved = f", {gib(peak['reserved_bytes'])} reserved ({origin}, {clean(document['gpu'])})"
    console.print(Text.assemble((f"{gib(peak['allocated_bytes'])} allocated at the peak", "bold"), reserved))
    most = max((phase["allocated_bytes"] for phase in document["phases"]), default=0)
    rows = (
        (clean(phase["name"]), gib(phase["allocated_bytes"]), "peak" * (phase["allocated_bytes"] == most))
        for phase in document["phases"]
    )
    console.print(indented(grid("left", "right", "left", rows=rows)))
    for note in document["notes"]:
        console.print(Text(f"- {clean(note)}", "dim"))
    path = clean(document["snapshot"])
    console.print(Text(f"snapshot: {path}  (opens in pytorch.org/memory_viz)"))
    console.print(labelled("next", f"memfit report {path} --html report.html"))


FULL = 0.9
PROCESSES = 5


def show_watch(seen: Document, console: Console) -> None:
    console.print(watch_view(seen, console.width, console.encoding))


def watch_view(seen: Document, width: int, encoding: str) -> RenderableType:
    return Group(*_watch_parts(seen, min(width, 110), encoding.lower().startswith("utf")))


def _watch_parts(seen: Document, width: int, blocks: bool) -> Iterator[RenderableType]:
    yield Text(clean(seen["time"])[:19].replace("T", " "), "dim")
    for gpu in seen["gpus"]:
        yield Text()
        yield from _gpu(gpu, width, blocks)
    if seen["no_gpus"]:
        yield Text()
        yield Text.assemble(("no GPU seen", "bold"), f": {clean(seen['no_gpus'])}")
    yield Text()
    yield _bar_line("host", seen["host"]["used_bytes"], seen["host"]["total_bytes"], width, blocks)
    yield Text()
    yield from _jobs(seen["jobs"], width)


def _gpu(gpu: Document, width: int, blocks: bool) -> Iterator[RenderableType]:
    busy = "" if gpu["busy_percent"] is None else f", {gpu['busy_percent']} % busy"
    yield Text.assemble((f"GPU {gpu['index']}", "bold"), f"  {clean(gpu['name'])}{busy}")
    yield _bar_line("", gpu["used_bytes"], gpu["total_bytes"], width, blocks)
    table = grid("right", "right", "left")
    for process in gpu["processes"][:PROCESSES]:
        size = "n/a" if process["used_bytes"] is None else gib(process["used_bytes"])
        name = "of another container, or ended" if process["name"] is None else clean(process["name"])
        table.add_row(str(process["pid"]), size, tail(name, max(width - 30, 20)))
    if gpu["processes"]:
        yield indented(table)


def _bar_line(name: str, used: int, total: int, width: int, blocks: bool) -> Text:
    cells = max(width - 46, 10)
    filled = min(round(cells * used / total), cells) if total else 0
    on, off = ("█", "·") if blocks else ("#", ".")
    style = "red" if total and used > FULL * total else "blue"
    figures = f"  {gib(used)} of {gib(total)} ({percent(used, total)})"
    label = f"{name:6}" if name else "  "
    return Text.assemble(label, (on * filled, style), (off * (cells - filled), "bright_black"), figures, no_wrap=True)


def _jobs(jobs: list[Document], width: int) -> Iterator[RenderableType]:
    if not jobs:
        yield Text("no memfit job runs", "dim")
        return
    heads = ("job", "command", "at", "peak", "headroom", "")
    table = grid("right", "left", "left", "right", "right", "left", heads=heads)
    for job in jobs:
        done = "" if not job["total"] else f"{job['done']} of {job['total']}"
        command = tail(clean(job["command"]), max(width - 60, 16))
        sizes = ("n/a" if job[name] is None else gib(job[name]) for name in ("peak_bytes", "headroom_bytes"))
        table.add_row(str(job["pid"]), command, clean(job["at"]), *sizes, done)
    yield table


GATE_STYLES = {"ok": "green", "new": "cyan", "over limit": "bold red", "grew": "bold yellow", "no plan": "bold red"}


@printed
def show_gate(document: Document, console: Console) -> Iterator[RenderableType]:
    word = "passed" if document["passed"] else "failed"
    failed = [each for each in document["jobs"] if each["status"] not in ("ok", "new")]
    count = len(document["jobs"])
    jobs = f"{len(failed)} of {count} jobs" if failed else f"all {count} jobs"
    jobs = jobs if count > 1 else "its one job"
    style = "bold green" if document["passed"] else "bold red"
    yield Text.assemble((word, style), f": {jobs} of {clean(document['file'])}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    for name in ("job", "takes", "limit", "baseline", "grown", ""):
        table.add_column(name, justify="left" if name in ("job", "") else "right", no_wrap=name != "")
    for each in document["jobs"]:
        table.add_row(*_gate_row(each))
    yield indented(table)
    for note in document["notes"]:
        yield Text(f"note: {clean(note)}", "dim")
    if document["updated"]:
        yield Text(f"{clean(document['baseline'])} has the new figures")
    elif failed:
        accepts = "; --update accepts what grew" if any(each["status"] == "grew" for each in failed) else ""
        yield labelled("next", f"`memfit plan` and `memfit fit` tell more of a job{accepts}")


def _gate_row(job: Document) -> tuple[str | Text, ...]:
    grown, before = job["grown_bytes"], job["baseline_bytes"]
    share = "" if grown is None or not before else f"{100 * grown / before:+.1f} %"
    limit = job["limit_bytes"] if job["limit_bytes"] is not None else job["capacity_bytes"]
    said = job["status"] if job["error"] is None else f"{job['status']}: {clean(job['error'])}"
    takes = job["needed_bytes"] if job["status"] == "over limit" else job["device_bytes"]
    sizes = (gib(size) if size is not None else "" for size in (takes, limit, before))
    return clean(job["name"]), *sizes, share, Text(said, GATE_STYLES[job["status"]])


@printed
def show_trials(document: Document, console: Console) -> Iterator[RenderableType]:
    runs = document["runs"]
    keys = list(runs[0]["changed"])
    right: list[JustifyMethod] = ["right"]
    table = grid(*right * (len(keys) + 3), "left", "right")
    table.add_row(*(Text(clean(word), "bold") for word in (*keys, "allocated", "reserved", "device", "", "to spare")))
    for run in runs:
        values = [clean(run["changed"][key]) for key in keys]
        if run["plan"] is None:
            table.add_row(*values, "", "", "", Text("no answer", "bold red"), "")
            continue
        plan, peak = run["plan"], run["plan"]["peak"]
        verdict = plan["verdict"] or ""
        spare = "" if plan["headroom_bytes"] is None else gib(plan["headroom_bytes"])
        figures = (gib(peak[f"{name}_bytes"]) for name in ("allocated", "reserved", "device"))
        table.add_row(*values, *figures, Text(verdict, VERDICT_STYLES.get(verdict, "")), spare)
    card = next((run["plan"]["gpu"] for run in document["runs"] if run["plan"]), None)
    on = f" on {clean(card['name'])}" if card else ""
    yield section(f"{clean(' '.join(document['command']))}{on}, predicted", table)
    for run in document["runs"]:
        said = ", ".join(f"{clean(key)}={clean(value)}" for key, value in run["changed"].items())
        if run["error"]:
            yield Text(f"{said}: {clean(run['error'])}", "red")
    for note in document["notes"]:
        yield Text(f"  {clean(note)}")
    notes = dict.fromkeys(note for run in document["runs"] if run["plan"] for note in run["plan"]["notes"][:1])
    for note in notes:
        yield Text(f"  {clean(note)}", "dim")
