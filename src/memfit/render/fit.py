"""The answers of `memfit fit` for a person: what to change and what each change saves; the ladder of batches.

show_fit(document, Console())         # document: memfit.fit/1, as `memfit fit --json` prints it
show_ladder(document, Console())      # document: memfit.ladder/1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.render.pieces import (
    bullets,
    category_word,
    clean,
    grid,
    indented,
    job_file_section,
    job_file_warnings,
    next_step,
    percent,
    phase_words,
    printed,
    section,
    time_basis,
    time_words,
    usable_bytes,
)
from memfit.units import gib

Fitted = Mapping[str, Any]

STYLES = {"fits already": "bold green", "fits": "bold green", "nothing fits": "bold red"}
COST_STYLES = {"free": "green", "time": "yellow", "precision": "magenta", "experiment": "red"}
COST_WORDS = {
    "free": "costs nothing", "time": "costs time", "precision": "costs precision",
    "experiment": "changes the experiment",
}  # fmt: skip
WHERE = (("memfit", "memfit"), ("trainer", "HF Trainer"), ("accelerate", "accelerate"))
PETA, GIGA = 10**15, 10**9
NO_MORE = ("+0 %", "-0 %")


@printed
def show_fit(fitted: Fitted, console: Console) -> Iterator[RenderableType]:
    yield say_fit(fitted)
    yield indented(_before(fitted))
    yield from map(indented, job_file_warnings(fitted))
    if fitted["duration"]:
        yield indented(Text(f"time: {time_words(fitted['duration'])} (estimated)"))
    if fitted["changes"]:
        title = "change this" if fitted["answer"] == "fits" else "the nearest that was found"
        yield section(title, _changes(fitted))
        once = "in all" if fitted["global_batch"] is None else "a step"
        parts = ((clean(c["name"]), (clean(c["price"]), _step(c, once), clean(c["risk"]))) for c in fitted["changes"])
        costs = ((name, Text("; ".join(filter(None, said)))) for name, said in parts)
        yield section("what it costs", grid("left", "left", rows=costs))
        yield section("how to switch it on", _how(fitted["changes"]))
    if fitted["answer"] == "fits":
        yield section("why not less", _proof(fitted))
    if fitted["whole_model"]:
        yield section("beside it: the whole model on the card", Text(_whole_model(fitted)))
    if fitted["alternatives"]:
        yield section("or instead", _alternatives(fitted["alternatives"]))
    if fitted["set_aside"]:
        yield section("not in the answer", _set_aside(fitted["set_aside"]))
    yield from job_file_section(fitted)
    yield section("assumed", bullets([*fitted["notes"], *time_basis(fitted), _search(fitted)]))
    yield from next_step(_next(fitted))


def say_fit(fitted: Fitted) -> Text:
    after, capacity = fitted["after"], usable_bytes(fitted["gpu"])
    taken = after["use_bytes"] or after["device_bytes"]
    use = f"{gib(taken)} of {gib(capacity)} ({percent(taken, capacity)})"
    answer = fitted["answer"]
    if answer == "fits already":
        rest = f"{use}, nothing to change"
    elif answer == "fits":
        rest = f"{use} with {_kinds(fitted['changes'])}"
    else:
        least = gib(fitted["smallest_gpu_bytes"])
        runs = "it runs, with less room than that" if after["verdict"] == "tight" else f"it needs {least} to run at all"
        rest = f"no set of changes leaves {_share(fitted['margin'])} of {gib(capacity)} free; with the nearest {runs}"
    return Text.assemble((answer, STYLES[answer]), f": {rest}")


def _kinds(changes: Sequence[Mapping[str, Any]]) -> str:
    """By the dearest of them."""
    number, dearest = len(changes), changes[-1]["cost"]
    if dearest == "free" and number > 1:
        return f"{number} changes that cost nothing"
    some = "1 change that" if number == 1 else f"{number} changes, the dearest of which"
    return f"{some} {COST_WORDS[dearest]}"


def _before(fitted: Fitted) -> Text:
    before, capacity = fitted["before"], usable_bytes(fitted["gpu"])
    at, alive = before["at_peak"], before["breakdown"]
    most = sorted(((size, name) for name, size in alive.items() if size), reverse=True)[:3]
    what = ", ".join(f"{gib(size)} {category_word(name)}" for size, name in most)
    batch = f"; global batch {fitted['global_batch']} throughout" if fitted["global_batch"] else ""
    return Text(
        f"as it is: {gib(before['device_bytes'])} on a card of {gib(capacity)}, most of it held in "
        f"{phase_words(at['phase'], at['step'])}: {what}{batch}{_estimated_context(before)}"
    )


def _estimated_context(forecast: Mapping[str, Any]) -> str:
    low, high = forecast["context"]["low_bytes"], forecast["context"]["high_bytes"]
    said = f"; what CUDA itself takes is estimated at {gib(low)} to {gib(high)}, and the upper end counts"
    return "" if low == high else said


def _changes(fitted: Fitted) -> Table:
    heads = ("", "change", "cost", "before", "after", "")
    table = grid("right", "left", "left", "right", "right", "left", heads=heads)
    for number, change in enumerate(fitted["changes"], 1):
        name, cost = Text(clean(change["name"]), "bold"), Text(change["cost"], COST_STYLES[change["cost"]])
        sizes = gib(change["before_bytes"]), gib(change["after_bytes"])
        table.add_row(f"{number}.", name, cost, *sizes, Text(clean(change["says"]), "dim"))
    return table


def _step(change: Mapping[str, Any], once: str) -> str:
    """What the change does to one optimizer step, or to all the rows that were asked for, by counted ops."""
    before, after = change["step_before"], change["step_after"]
    if before is None or after is None:
        return ""
    said = []
    if _more(before["flops"], after["flops"]) not in NO_MORE:
        said.append(f"{_more(before['flops'], after['flops'])} FLOPs ({after['flops'] / PETA:.3g} PFLOP {once})")
    if after["host_bytes"] - before["host_bytes"] > GIGA / 10:
        said.append(f"{(after['host_bytes'] - before['host_bytes']) / GIGA:,.1f} GB {once} over PCIe")
    if before["seconds"] and after["seconds"] and _more(before["seconds"], after["seconds"]) not in NO_MORE:
        said.append(f"at the least {_more(before['seconds'], after['seconds'])} time {once}")
    return ", ".join(said)


def _more(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.0f} %"


def _how(changes: Sequence[Mapping[str, Any]]) -> Table:
    table = grid("left", "left", "left")
    for change in changes:
        for number, (key, name) in enumerate(WHERE):
            way = Text(clean(change["how"][key]), overflow="fold")
            table.add_row(clean(change["name"]) if number == 0 else "", name, way)
    return table


def _proof(fitted: Fitted) -> Table:
    """Each change left out by itself; and where the last one has a weaker form, that in its place."""
    table = grid("left", "right", "left")
    for change in fitted["changes"]:
        less = change["without"]
        said = f"does not go: {clean(less['refused'])}" if less["refused"] else _too_much(less, fitted)
        table.add_row(f"without {clean(change['name'])}", _size(less), Text(said))
    if weaker := fitted["one_step_back"]:
        table.add_row(f"with {clean(weaker['change'])} instead", _size(weaker), Text(_too_much(weaker, fitted)))
    return table


def _size(less: Mapping[str, Any]) -> str:
    return "" if less["device_bytes"] is None else gib(less["device_bytes"])


def _too_much(less: Mapping[str, Any], fitted: Fitted) -> str:
    less_free = f"runs, but leaves less than {_share(fitted['margin'])} free"
    return "does not run" if less["verdict"] == "fails" else less_free


def _whole_model(fitted: Fitted) -> str:
    whole, capacity = fitted["whole_model"], fitted["gpu"]["capacity_bytes"]
    fails = whole["verdict"] == "fails"
    verdict = f"does not run on {gib(capacity)}" if fails else f"runs on {gib(capacity)} as well"
    formulas = " and ".join(f"{each['gib']:.1f} GiB" for each in whole["guides"])
    return (
        f"the public Wanda code keeps all weights and two buffers of hidden states there: predicted "
        f"{gib(whole['device_bytes'])}, {verdict}; it needs {gib(whole['smallest_gpu_bytes'])} (by the guides' own "
        f"formulas {formulas}). memfit prune brings one block at a time"
    )


def _alternatives(alternatives: Sequence[Mapping[str, Any]]) -> Table:
    table = grid("right", "left")
    for each in alternatives:
        names = " + ".join(f"{clean(change['name'])} ({change['cost']})" for change in each["changes"])
        instead = f"   without {clean(each['instead_of'])}"
        table.add_row(gib(each["device_bytes"]), Text.assemble(names, (instead, "dim")))
    return table


def _set_aside(levers: Sequence[Mapping[str, Any]]) -> Table:
    table = grid("left", "left")
    for lever in levers:
        if lever["why"] != "not needed":
            table.add_row(clean(lever["name"]), Text(f"{lever['why']}: {clean(lever['reason'])}"))
    if others := [clean(lever["name"]) for lever in levers if lever["why"] == "not needed"]:
        table.add_row("the others", Text(f"not needed: {', '.join(others)}"))
    return table


def _search(fitted: Fitted) -> str:
    number = fitted["predictions"]
    return f"{number} prediction{'' if number == 1 else 's'} in {fitted['seconds']:.1f} s"


def _next(fitted: Fitted) -> str:
    if fitted["answer"] == "nothing fits":
        steps = [f"a card with {gib(fitted['enough_gpu_bytes'])}, on which this leaves {_share(fitted['margin'])} free"]
        if left := fitted["margin_left"]:
            steps.insert(0, f"--margin {left:g}, which it leaves on this card")
        if smaller := fitted["smaller_model"]:
            steps.append(f"{smaller['name']}, which takes {gib(smaller['device_bytes'])} with these changes")
        return ", or ".join(steps)
    if fitted["workload"]["kind"] == "prune":
        return "--emit args writes the command of memfit prune"
    if fitted["global_batch"] is None or fitted["answer"] == "fits already":
        return "run it with these settings" if fitted["changes"] else "run it as it is"
    if fitted.get("from"):
        return "--emit FILE writes the same file with only these keys changed; --ladder shows more room"
    if any(change["name"] == "torch.compile" for change in fitted["changes"]):
        alone = "without --try-compile, --emit yaml one for `memfit train`"
        return f"--emit python writes a file for the HF Trainer; {alone}"
    other = "--emit yaml writes a config for `memfit train`, --emit python one for the HF Trainer"
    return f"{other}; --ladder shows more room"


def _share(margin: float) -> str:
    return f"{100 * margin:g} %"


Ladder = Mapping[str, Any]
RUNG_STYLES = {"Safe": "green", "Medium": "cyan", "Aggressive": "yellow", "Maximum": "red"}


@printed
def show_ladder(ladder: Ladder, console: Console) -> Iterator[RenderableType]:
    yield _ladder_headline(ladder)
    if ladder["changes"]:
        names = ", ".join(f"{clean(change['name'])} ({change['cost']})" for change in ladder["changes"])
        yield indented(Text(f"not a single row fits without these, which all rungs have: {names}"))
    if ladder["rungs"]:
        yield section("the ladder", _rungs(ladder["rungs"]))
        risks = ((_names(rung), Text("; ".join(map(clean, rung["risks"])))) for rung in ladder["rungs"])
        yield section("what else can push it over", grid("left", "left", rows=risks))
    if ladder["above"]:
        above = ladder["above"]
        rows = f"micro-batch {above['micro_batch']} x {above['grad_accum']}"
        yield section("the next rung", Text(f"{rows} takes {gib(above['device_bytes'])} and does not run"))
    if ladder["guide"]:
        title = "the guide's own ladder, as its authors ran it: their attention, checkpointing, bf16 over fp32 weights"
        yield section(title, _guide(ladder["guide"], ladder["gpu"]["capacity_bytes"]))
    first = ladder["rungs"][0]["names"][0] if ladder["rungs"] else ""
    bound = f"step time is a roofline of counted FLOPs and bytes, relative to {first}: a bound, good for the ratio only"
    search = f"{ladder['predictions']} predictions in {ladder['seconds']:.1f} s"
    yield section("assumed", bullets([*ladder["notes"], bound, search]))


def _ladder_headline(ladder: Ladder) -> Text:
    work, card = ladder["workload"], ladder["gpu"]
    gpus = f"{work['world_size']} x " if work["world_size"] > 1 else ""
    job = f"{clean(work['kind'])} of {clean(work['model'])}, {ladder['global_batch']} rows a step"
    there = f"on {gpus}{clean(card['name'])} ({gib(card['capacity_bytes'])})"
    if not ladder["rungs"]:
        return Text.assemble(("nothing fits", "bold red"), f": {job}, {there}")
    top = ladder["rungs"][-1]
    return Text.assemble((f"up to micro-batch {top['micro_batch']}", "bold green"), f": {job}, {there}")


def _rungs(rungs: Sequence[Mapping[str, Any]]) -> Table:
    heads = ("", "micro-batch x steps", "rows", "device", "of the card", "step time")
    table = grid("left", "right", "right", "right", "right", "right", heads=heads)
    for rung in rungs:
        relative = "n/a" if rung["relative_step_time"] is None else f"{100 * rung['relative_step_time']:.0f} %"
        name, rows = Text(_names(rung), RUNG_STYLES[rung["names"][-1]]), f"{rung['micro_batch']} x {rung['grad_accum']}"
        use = f"{100 * rung['use']:.0f} %"
        table.add_row(name, rows, str(rung["global_batch"]), gib(rung["device_bytes"]), use, relative)
    return table


def _names(rung: Mapping[str, Any]) -> str:
    """There may be no micro-batch between two of the four."""
    first, last = rung["names"][0], rung["names"][-1]
    return clean(first) if first == last else f"{clean(first)} to {clean(last)}"


def _guide(guide: Sequence[Mapping[str, Any]], capacity: int) -> Table:
    heads = ("", "micro-batch x steps", "tokens", "rows", "predicted", "of the card", "it says")
    table = grid("left", "right", "right", "right", "right", "right", "left", heads=heads)
    for rung in guide:
        wrong = f"; but {'; '.join(clean(each) for each in rung['wrong'])}" if rung["wrong"] else ""
        table.add_row(
            clean(rung["name"]),
            f"{rung['micro_batch']} x {rung['grad_accum']}",
            str(rung["seq_len"]),
            str(rung["global_batch"]),
            gib(rung["device_bytes"]),
            f"{100 * rung['device_bytes'] / capacity:.0f} %",
            Text(f"{clean(rung['claims'])}{wrong}"),
        )
    return table
