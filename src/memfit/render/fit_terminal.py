"""The answer of `memfit fit` for a person: what to change, in order, with the peak before and after each change.

show_fit(document, Console())      # document: memfit.fit/1, as `memfit fit --json` prints it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.render.pieces import MAX_WIDTH, bullets, category_word, grid, phase_words, section
from memfit.render.words import clean, percent
from memfit.units import gib

Fitted = Mapping[str, Any]

STYLES = {"fits already": "bold green", "fits": "bold green", "nothing fits": "bold red"}
COST_STYLES = {"free": "green", "time": "yellow", "precision": "magenta", "experiment": "red"}
WHERE = (("memfit", "memfit"), ("trainer", "HF Trainer"), ("accelerate", "accelerate"))
PETA, GIGA = 10**15, 10**9


def show_fit(fitted: Fitted, console: Console) -> None:
    console.width = min(console.width, MAX_WIDTH)
    for part in _parts(fitted):
        console.print(part)


def _parts(fitted: Fitted) -> Iterator[RenderableType]:
    yield _headline(fitted)
    yield Padding(_before(fitted), (0, 0, 0, 2))
    if fitted["changes"]:
        title = "change this" if fitted["answer"] == "fits" else "the nearest that was found"
        yield section(title, _changes(fitted))
        yield section("what it costs", _costs(fitted["changes"]))
        yield section("how to switch it on", _how(fitted["changes"]))
    if fitted["without_last"]:
        yield section("why not less", Text(_proof(fitted)))
    if fitted["whole_model"]:
        yield section("beside it: the whole model on the card", Text(_whole_model(fitted)))
    if fitted["alternatives"]:
        yield section("or instead", _alternatives(fitted["alternatives"]))
    if fitted["set_aside"]:
        yield section("not in the answer", _set_aside(fitted["set_aside"]))
    yield section("assumed", bullets([*fitted["notes"], _search(fitted)]))
    yield Text()
    yield Text.assemble(("next: ", "bold"), clean(_next(fitted)))


def _headline(fitted: Fitted) -> Text:
    after, capacity = fitted["after"], fitted["gpu"]["capacity_bytes"]
    use = f"{gib(after['device_bytes'])} of {gib(capacity)} ({percent(after['device_bytes'], capacity)})"
    answer = fitted["answer"]
    if answer == "fits already":
        rest = f"{use}, nothing to change"
    elif answer == "fits":
        number = len(fitted["changes"])
        rest = f"{use} with {number} change{'' if number == 1 else 's'}, {_kinds(fitted['changes'])}"
    else:
        runs = "it runs, with less room than that" if after["verdict"] == "tight" else f"it needs {_least(fitted)}"
        rest = f"no set of changes leaves {_share(fitted['margin'])} of {gib(capacity)} free; with the nearest {runs}"
    return Text.assemble((answer, STYLES[answer]), f": {rest}")


def _kinds(changes: Sequence[Mapping[str, Any]]) -> str:
    dearest = changes[-1]["cost"]
    words = {
        "free": "none of which costs anything", "time": "which cost time",
        "precision": "which cost precision", "experiment": "which change the experiment",
    }  # fmt: skip
    return (
        words[dearest]
        if len(changes) > 1
        else words[dearest]
        .replace("none of which costs", "which costs no")
        .replace("no anything", "nothing")
        .replace("which cost ", "which costs ")
        .replace("which change ", "which changes ")
    )


def _before(fitted: Fitted) -> Text:
    before, capacity = fitted["before"], fitted["gpu"]["capacity_bytes"]
    at, alive = before["at_peak"], before["breakdown"]
    most = sorted(((size, name) for name, size in alive.items() if size), reverse=True)[:3]
    what = ", ".join(f"{gib(size)} {category_word(name)}" for size, name in most)
    batch = f"; global batch {fitted['global_batch']} throughout" if fitted["global_batch"] else ""
    return Text(
        f"as it is: {gib(before['device_bytes'])} on a card of {gib(capacity)}, most of it held in "
        f"{phase_words(at['phase'], at['step'])}: {what}{batch}"
    )


def _changes(fitted: Fitted) -> Table:
    table = grid("right", "left", "left", "right", "right", "left")
    table.add_row("", Text("change", "dim"), Text("cost", "dim"), Text("before", "dim"), Text("after", "dim"), "")
    for number, change in enumerate(fitted["changes"], 1):
        table.add_row(
            f"{number}.", Text(clean(change["name"]), "bold"), Text(change["cost"], COST_STYLES[change["cost"]]),
            gib(change["before_bytes"]), gib(change["after_bytes"]), Text(clean(change["says"]), "dim"),
        )  # fmt: skip
    return table


def _costs(changes: Sequence[Mapping[str, Any]]) -> Table:
    table = grid("left", "left")
    for change in changes:
        price = "; ".join(part for part in (clean(change["price"]), _step(change), clean(change["risk"])) if part)
        table.add_row(clean(change["name"]), Text(price))
    return table


def _step(change: Mapping[str, Any]) -> str:
    """What the change does to one optimizer step, by counted ops."""
    before, after = change["step_before"], change["step_after"]
    if before is None or after is None:
        return ""
    said = []
    if after["flops"] != before["flops"]:
        said.append(f"{_more(before['flops'], after['flops'])} FLOPs ({after['flops'] / PETA:.3g} PFLOP a step)")
    if after["host_bytes"] != before["host_bytes"]:
        said.append(f"{(after['host_bytes'] - before['host_bytes']) / GIGA:,.1f} GB a step over PCIe")
    if before["seconds"] and after["seconds"]:
        said.append(f"at the least {_more(before['seconds'], after['seconds'])} time a step")
    return ", ".join(said)


def _more(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.0f} %"


def _how(changes: Sequence[Mapping[str, Any]]) -> Table:
    table = grid("left", "left", "left")
    for change in changes:
        for number, (key, name) in enumerate(WHERE):
            table.add_row(clean(change["name"]) if number == 0 else "", name, Text(clean(change["how"][key])))
    return table


def _proof(fitted: Fitted) -> str:
    proof, capacity = fitted["without_last"], fitted["gpu"]["capacity_bytes"]
    less = f"without {clean(proof['change'])} it takes {gib(proof['device_bytes'])}"
    if proof["verdict"] == "fails":
        return f"{less}: it does not run on {gib(capacity)}"
    room = gib(int(capacity * (1 - fitted["margin"])))
    return f"{less}: it runs, but not within {room}, which leaves {_share(fitted['margin'])} free"


def _whole_model(fitted: Fitted) -> str:
    whole, capacity = fitted["whole_model"], fitted["gpu"]["capacity_bytes"]
    fails = whole["device_bytes"] > capacity
    verdict = f"more than the {gib(capacity)} of the card" if fails else f"of {gib(capacity)}"
    return (
        f"all weights and one window through them take {gib(whole['device_bytes'])}, {verdict}, and the calibration "
        f"buffers of that way {gib(whole['buffers_bytes'])} on top; memfit prune brings one block at a time"
    )


def _alternatives(alternatives: Sequence[Mapping[str, Any]]) -> Table:
    table = grid("right", "left")
    for each in alternatives:
        names = " + ".join(f"{clean(change['name'])} ({change['cost']})" for change in each["changes"])
        table.add_row(
            gib(each["device_bytes"]), Text.assemble(names, (f"   without {clean(each['instead_of'])}", "dim"))
        )
    return table


def _set_aside(levers: Sequence[Mapping[str, Any]]) -> Table:
    table = grid("left", "left", "left")
    for lever in levers:
        table.add_row(clean(lever["name"]), Text(lever["why"], "dim"), Text(clean(lever["reason"]), "dim"))
    return table


def _search(fitted: Fitted) -> str:
    return f"{fitted['predictions']} predictions in {fitted['seconds']:.1f} s"


def _next(fitted: Fitted) -> str:
    if fitted["answer"] == "nothing fits":
        steps = [f"a card with {_least(fitted)} or more"]
        if smaller := fitted["smaller_model"]:
            steps.append(f"{smaller['name']}, which takes {gib(smaller['device_bytes'])} with these changes")
        return ", or ".join(steps)
    if fitted["workload"]["kind"] == "prune":
        return f"memfit prune --model {fitted['workload']['model']} --save out/pruned"
    if fitted["global_batch"] is None:
        return "run it with these settings"
    return (
        "--emit yaml writes a config for `memfit train`, --emit python one for the HF Trainer; --ladder shows more room"
    )


def _least(fitted: Fitted) -> str:
    return gib(fitted["smallest_gpu_bytes"])


def _share(margin: float) -> str:
    return f"{100 * margin:g} %"
