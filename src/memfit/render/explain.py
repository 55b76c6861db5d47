"""An explanation for a person: the sentence, the numbers that add up, the tensor, what helps, what does not.

show_explanation(document, Console())      # document: memfit.explain/1, as `memfit explain --json` prints it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.render.pieces import (
    Document,
    Glyphs,
    bullets,
    category_word,
    clean,
    grid,
    indented,
    labelled,
    percent,
    printed,
    section,
    small,
    tail,
)
from memfit.units import format_bytes, gib

BAR = 60
STYLES = {
    "allocated": "blue", "private pools": "magenta", "cached": "cyan", "outside torch": "yellow",
    "other processes": "red", "not told apart": "yellow", "free": "green", "rest": "bright_black",
}  # fmt: skip
READINGS, FIXES, HOLDERS, MODELS = 3, 8, 5, 3
PASSES = ("forward", "backward")
SIZES = ("batch_size", "seq_len", "rank", "nsamples")


@printed
def show_explanation(document: Document, console: Console) -> Iterator[RenderableType]:
    glyphs, width = Glyphs(console.encoding), console.width
    account, tensor, fragmentation = document["account"], document["tensor"], document["cause"]["fragmentation"]
    known = document["cause"]["kind"] != "none"
    yield Text.assemble(("out of memory: ", "bold red") if known else ("", ""), (clean(document["answer"]), "bold"))
    yield from (indented(Text(line)) for line in _where(document, width))
    if account["rows"]:
        whole = account["capacity_bytes"]
        title = "the numbers" if whole is None else f"the card's {gib(whole)}, added up"
        yield section(title, _account(account, glyphs, width))
    yield from (indented(labelled("note", trap["text"], "yellow")) for trap in document["traps"])
    cached = any(row["name"] == "cached" for row in account["rows"])
    if fragmentation and fragmentation["verdict"] == "cannot tell" and cached:
        said = Text.assemble("fragmentation: ", ("cannot tell", "bold"), f"; {clean(fragmentation['why'])}")
        yield indented(said)
    if document["holders"]:
        yield section("who held the memory then", _holders(document["holders"], account, width))
    if tensor["readings"]:
        yield section(_asked(tensor), _readings(document, width))
    elif tensor["why_none"] and tensor["request_bytes"]:
        yield section("the tensor that failed", Text(clean(tensor["why_none"]), "dim"))
    yield from _advice(document)
    if document["growth"]:
        yield section("growth", Text(clean(document["growth"]["text"])))
    if document["notes"]:
        yield section("how to read it", bullets(document["notes"]))
    if document["next"]:
        yield Text()
        yield from (labelled("next", step) for step in document["next"])


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


def _line(message: Document) -> str:
    size = f" ({message['requested']})" if message["requested"] else ""
    return f"at line {message['line']:,}{size}"


# -- numbers -------------------------------------------------------------------------------------------------------


def _account(account: Document, glyphs: Glyphs, width: int) -> RenderableType:
    rows, whole = account["rows"], account["capacity_bytes"]
    table = grid("left", "right", "right", "left")
    for row in rows:
        size = row["bytes"]
        figure = gib(size) if abs(size) >= 1 << 27 else format_bytes(size)
        share = percent(max(size, 0), whole) if whole else ""
        table.add_row(Text(row["name"], STYLES.get(row["name"], "")), figure, share, Text(row["says"], "dim"))
    if whole is None:
        return table
    return Group(_bar(rows, whole or sum(max(row["bytes"], 0) for row in rows), glyphs, min(BAR, width - 4)), table)


def _bar(rows: Sequence[Document], whole: int, glyphs: Glyphs, cells: int) -> Text:
    """One cell at least for whatever is there; what is free has dots."""
    bar, signs = Text(), {"free": glyphs.free, "cached": glyphs.idle, "outside torch": glyphs.context}
    for row in rows:
        share = round(cells * max(row["bytes"], 0) / whole) if whole else 0
        count = min(max(share, 1 if row["bytes"] > whole // 500 else 0), cells - len(bar.plain))
        bar.append(signs.get(row["name"], glyphs.used) * max(count, 0), STYLES.get(row["name"], ""))
    return bar


def _holders(holders: Sequence[Document], account: Document, width: int) -> Table:
    total = next((row["bytes"] for row in account["rows"] if row["name"] == "allocated"), 0)
    rows = (
        (
            small(each["allocated_bytes"]),
            percent(each["allocated_bytes"], total),
            f"{each['count']:,} x",
            "" if each["category"] == "unknown" else category_word(each["category"]),
            tail(clean(each["name"]) or "(no name)", max(width - 44, 24)),
        )
        for each in holders[:HOLDERS]
    )
    return grid("right", "right", "right", "left", "left", rows=rows)


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


def _advice(document: Document) -> Iterator[RenderableType]:
    job = document["job"]
    plain = [fix for fix in document["fixes"] if fix["basis"] != "predicted"]
    predicted = [fix for fix in document["fixes"] if fix["basis"] == "predicted"]
    if plain:
        yield section("what helps", grid("left", "left", rows=map(_in_words, plain[:FIXES])))
    if predicted:
        yield section(_predicted_heading(job), _predicted_fixes(predicted, job))
        if clues := job["read_from_text"]:
            said = ", ".join(f"{name.replace('_', ' ')} by `{clean(words)}`" for name, words in clues.items())
            yield indented(Text(f"read in the text: {said}; flags win over that", "dim"))
    if document["withheld"]:
        rows = ((Text(clean(row["advice"])), Text(clean(row["why"]), "dim")) for row in document["withheld"])
        yield section("what does not help here", grid("left", "left", rows=rows))


def _in_words(fix: Document) -> tuple[str, Text]:
    how = "; ".join(f"{place}: {text}" if place != "shell" else text for place, text in fix["how"].items())
    return clean(fix["name"]), Text(clean(fix["says"] + (f" ({how})" if how else "")))


def _predicted_heading(job: Document) -> str:
    settings, plan, gpu = job["settings"], job["predicted"], job["gpu"]
    words = [f"{settings.get('kind')} of {clean(settings.get('model'))}"]
    words += [f"{name.replace('_', ' ')} {settings[name]:,}" for name in SIZES if name in settings]
    on = f" on a card of {gib(gpu['capacity_bytes'])}" if gpu else ""
    said = f": as it is {gib(plan['peak']['device_bytes'])}{on}" if plan else f",{on}" if on else ""
    fits = plan and plan["verdict"] in ("safe", "tight")
    untrue = ", which fits: not all is as in the run that failed" if fits else ""
    return f"what helps, predicted ({', '.join(words)}{said}{untrue})"


def _predicted_fixes(fixes: Sequence[Document], job: Document) -> Table:
    """Whether it then fits is said where there is a card."""
    verdicts = job["gpu"] is not None
    words = {
        "safe": Text("fits", "green"), "tight": Text("fits, tightly", "yellow"), "fails": Text("not enough", "dim"),
    }  # fmt: skip
    heads = ("saves", "then", *(("",) if verdicts else ()), "costs", "")
    table = grid("right", "right", *(("left",) if verdicts else ()), "left", "left", heads=heads)
    for fix in fixes[:FIXES]:
        how = fix["how"].get("memfit") or next(iter(fix["how"].values()), "")
        name = Text(clean(fix["name"]))
        table.add_row(
            "n/a" if fix["saved_bytes"] is None else gib(fix["saved_bytes"]),
            gib(fix["after_bytes"]),
            *((words.get(fix["verdict"], Text("n/a")),) if verdicts else ()),
            clean(fix["cost"] or ""),
            Group(name, Text(clean(how), "dim")) if how else name,
        )
    return table
