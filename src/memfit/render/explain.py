"""An explanation for a person: the sentence, the numbers that add up, the tensor, what helps, what does not.

show_explanation(document, Console())      # document: memfit.explain/1, as `memfit explain --json` prints it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.render.pieces import Glyphs, bullets, category_word, clean, grid, percent, print_parts, section, small, tail
from memfit.units import format_bytes, gib

Document = Mapping[str, Any]
BAR = 60
STYLES = {
    "allocated": "blue", "private pools": "magenta", "cached": "cyan", "outside torch": "yellow",
    "other processes": "red", "not told apart": "yellow", "free": "green", "rest": "bright_black",
}  # fmt: skip
READINGS, FIXES, HOLDERS, MODELS = 3, 8, 5, 3
PASSES = ("forward", "backward")
SIZES = ("batch_size", "seq_len", "rank", "nsamples")


def show_explanation(document: Document, console: Console) -> None:
    print_parts(_parts(document, console), console)


def _parts(document: Document, console: Console) -> Iterator[RenderableType]:
    glyphs, width = Glyphs(console.encoding), console.width
    known = document["cause"]["kind"] != "none"
    yield Text.assemble(("out of memory: ", "bold red") if known else ("", ""), (clean(document["answer"]), "bold"))
    yield from (Padding(Text(line), (0, 0, 0, 2)) for line in _where(document, width))
    if document["account"]["rows"]:
        yield section(_heading(document["account"]), _account(document["account"], glyphs, width))
    for trap in document["traps"]:
        yield Padding(Text.assemble(("note: ", "yellow"), clean(trap["text"])), (0, 0, 0, 2))
    fragmentation = document["cause"]["fragmentation"]
    cached = any(row["name"] == "cached" for row in document["account"]["rows"])
    if fragmentation and fragmentation["verdict"] == "cannot tell" and cached:
        said = Text.assemble("fragmentation: ", ("cannot tell", "bold"), f"; {clean(fragmentation['why'])}")
        yield Padding(said, (0, 0, 0, 2))
    if document["holders"]:
        yield section("who held the memory then", _holders(document["holders"], document["account"], width))
    if document["tensor"]["readings"]:
        yield section(_asked(document["tensor"]), _readings(document, width))
    elif document["tensor"]["why_none"] and document["tensor"]["request_bytes"]:
        yield section("the tensor that failed", Text(clean(document["tensor"]["why_none"]), "dim"))
    yield from _advice(document, width)
    if document["growth"]:
        yield section("growth", Text(clean(document["growth"]["text"])))
    if document["notes"]:
        yield section("how to read it", bullets(document["notes"]))
    if document["next"]:
        yield Text()
        for step in document["next"]:
            yield Text.assemble(("next: ", "bold"), clean(step))


def _where(document: Document, width: int) -> Iterator[str]:
    phase = document["phase"]
    said = []
    if phase["name"]:
        named = {each: f"while {each}" for each in ("loading", "saving")}
        named |= {"data": "while preparing data", "generation": "while generating"}
        named |= {"evaluation": "while evaluating", "calibration": "while calibrating"}
        said.append(named.get(phase["name"], f"in the {phase['name']}" + (" pass" if phase["name"] in PASSES else "")))
        if phase["detail"]:
            said.append(phase["detail"])
    if phase["code_line"]:
        said.append(f"at {tail(clean(phase['code_line']), max(width - 20, 40))}")
    if said:
        yield ", ".join(said)
    if phase["code"]:
        code, room = clean(phase["code"]), max(width - 8, 40)
        yield f"    {code if len(code) <= room else code[: room - 1] + '…'}"
    found = document["found"]
    if found and found["count"] > 1:
        ends = [_line(each) for each in (found["first"], found["last"])]
        yield f"{found['count']:,} messages: the first {ends[0]}, the last {ends[1]}"


def _line(message: Mapping[str, Any]) -> str:
    size = f" ({message['requested']})" if message["requested"] else ""
    return f"at line {message['line']:,}{size}"


# -- numbers -------------------------------------------------------------------------------------------------------


def _heading(account: Document) -> str:
    whole = account["capacity_bytes"]
    return "the numbers" if whole is None else f"the card's {gib(whole)}, added up"


def _account(account: Document, glyphs: Glyphs, width: int) -> RenderableType:
    rows = account["rows"]
    whole = account["capacity_bytes"] or sum(max(row["bytes"], 0) for row in rows)
    table = grid("left", "right", "right", "left")
    for row in rows:
        name = Text(row["name"], STYLES.get(row["name"], ""))
        share = percent(max(row["bytes"], 0), whole) if account["capacity_bytes"] else ""
        table.add_row(name, _figure(row["bytes"]), share, Text(row["says"], "dim"))
    if account["capacity_bytes"] is None:
        return table
    return Group(_bar(rows, whole, glyphs, min(BAR, width - 4)), table)


def _figure(nbytes: int) -> str:
    return gib(nbytes) if abs(nbytes) >= 1 << 27 else format_bytes(nbytes)


def _bar(rows: Sequence[Mapping[str, Any]], whole: int, glyphs: Glyphs, cells: int) -> Text:
    """One cell at least for whatever is there; what is free has dots."""
    bar = Text()
    for row in rows:
        share = round(cells * max(row["bytes"], 0) / whole) if whole else 0
        count = min(max(share, 1 if row["bytes"] > whole // 500 else 0), cells - len(bar.plain))
        sign = {"free": glyphs.free, "cached": glyphs.idle, "outside torch": glyphs.context}.get(
            row["name"], glyphs.used
        )
        bar.append(sign * max(count, 0), STYLES.get(row["name"], ""))
    return bar


def _holders(holders: Sequence[Mapping[str, Any]], account: Document, width: int) -> Table:
    total = next((row["bytes"] for row in account["rows"] if row["name"] == "allocated"), 0)
    table = grid("right", "right", "right", "left", "left")
    for each in holders[:HOLDERS]:
        category = "" if each["category"] == "unknown" else category_word(each["category"])
        table.add_row(
            small(each["allocated_bytes"]),
            percent(each["allocated_bytes"], total),
            f"{each['count']:,} x",
            category,
            tail(clean(each["name"]) or "(no name)", max(width - 44, 24)),
        )
    return table


# -- the tensor ----------------------------------------------------------------------------------------------------


def _asked(tensor: Document) -> str:
    low, high = tensor["request_bytes"][0]["low"], tensor["request_bytes"][0]["high"]
    size = format_bytes(high)
    if format_bytes(low) != size and high - low > high // 1000:
        size = f"{format_bytes(low)} to {size}"
    sure = any(each["likeliest"] for each in tensor["readings"])
    return f"the tensor that failed, {size}: {'most likely' if sure else 'could be'}"


def _readings(document: Document, width: int) -> Table:
    readings, of_one = document["tensor"]["readings"], "model" in document["job"]["settings"]
    table = grid("right", "left")
    chosen = [each for each in readings if each["likeliest"]] or readings[:READINGS]
    for each in chosen:
        lines = [Text(clean(each["tensor"]), "bold" if each["likeliest"] else ""), Text(clean(each["product"]), "dim")]
        if each["models"] and not of_one:
            more = f" and {len(each['models']) - MODELS} more" if len(each["models"]) > MODELS else ""
            lines.append(Text(f"in {', '.join(map(clean, each['models'][:MODELS]))}{more}", "dim"))
        table.add_row(format_bytes(each["bytes"]), Group(*lines) if width < 100 else Text("  ").join(lines))
    return table


# -- advice --------------------------------------------------------------------------------------------------------


def _advice(document: Document, width: int) -> Iterator[RenderableType]:
    fixes = document["fixes"]
    plain = [fix for fix in fixes if fix["basis"] != "predicted"]
    predicted = [fix for fix in fixes if fix["basis"] == "predicted"]
    if plain:
        yield section("what helps", _plain_fixes(plain))
    if predicted:
        yield section(_predicted_heading(document["job"]), _predicted_fixes(predicted, document["job"]))
        if document["job"]["read_from_text"]:
            yield Padding(Text(_read(document["job"]["read_from_text"]), "dim"), (0, 0, 0, 2))
    if document["withheld"]:
        yield section("what does not help here", _withheld(document["withheld"], width))


def _plain_fixes(fixes: Sequence[Mapping[str, Any]]) -> Table:
    table = grid("left", "left")
    for fix in fixes[:FIXES]:
        how = "; ".join(f"{place}: {text}" if place != "shell" else text for place, text in fix["how"].items())
        table.add_row(clean(fix["name"]), Text(clean(fix["says"] + (f" ({how})" if how else ""))))
    return table


def _predicted_heading(job: Document) -> str:
    settings, plan, gpu = job["settings"], job["predicted"], job["gpu"]
    words = [f"{settings.get('kind')} of {clean(settings.get('model'))}"]
    words += [f"{name.replace('_', ' ')} {settings[name]:,}" for name in SIZES if name in settings]
    on = f" on a card of {gib(gpu['capacity_bytes'])}" if gpu else ""
    said = f": as it is {gib(plan['peak']['device_bytes'])}{on}" if plan else f",{on}" if on else ""
    fits = plan and plan["verdict"] in ("safe", "tight")
    untrue = ", which fits: not all is as in the run that failed" if fits else ""
    return f"what helps, predicted ({', '.join(words)}{said}{untrue})"


def _read(clues: Mapping[str, str]) -> str:
    said = ", ".join(f"{name.replace('_', ' ')} by `{clean(words)}`" for name, words in clues.items())
    return f"read in the text: {said}; flags win over that"


def _predicted_fixes(fixes: Sequence[Mapping[str, Any]], job: Document) -> Table:
    verdicts = job["gpu"] is not None
    table = grid("right", "right", *(("left",) if verdicts else ()), "left", "left")
    heads = ("saves", "then", *(("",) if verdicts else ()), "costs", "")
    table.add_row(*(Text(word, "dim") for word in heads))
    words = {
        "safe": Text("fits", "green"),
        "tight": Text("fits, tightly", "yellow"),
        "fails": Text("not enough", "dim"),
    }
    for fix in fixes[:FIXES]:
        verdict = (words.get(fix["verdict"], Text("n/a")),) if verdicts else ()
        how = fix["how"].get("memfit") or next(iter(fix["how"].values()), "")
        said = Group(Text(clean(fix["name"])), Text(clean(how), "dim")) if how else Text(clean(fix["name"]))
        table.add_row(
            "n/a" if fix["saved_bytes"] is None else gib(fix["saved_bytes"]),
            gib(fix["after_bytes"]),
            *verdict,
            clean(fix["cost"] or ""),
            said,
        )
    return table


def _withheld(rows: Sequence[Mapping[str, Any]], width: int) -> Table:
    table = grid("left", "left")
    for row in rows:
        table.add_row(Text(clean(row["advice"])), Text(clean(row["why"]), "dim"))
    return table
