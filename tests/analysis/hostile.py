"""Files that nobody should open, by the thousand, from a seed: snapshots, traces and logs, mutated or made by hand.

    python tests/analysis/hostile.py --count 20000 --seed 1

Each goes through the whole of `memfit report`: document, terminal, page; some through `diff` and every export. What may
come of it is a report or one `MemfitError`, within two seconds, in bounded memory, with nothing run and nothing
unescaped. Anything else is printed with the file that did it, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import math
import os
import pickle
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from made import DATA, random_trace, training

from memfit.analysis.diff import diff_files
from memfit.analysis.export import FORMATS
from memfit.analysis.report import Report, report_file
from memfit.errors import MemfitError
from memfit.render.html import page
from memfit.render.plan import as_text
from memfit.render.report import show_diff, show_report
from memfit.replay.alloc_config import AllocatorConfig
from memfit.snapshots.write import placed_snapshot

SECONDS = 2.0
MARKER = "ran"

MARKUP = [
    "<script>document.title='ran'</script>", "</script><script>document.title='ran'</script>", "]]>", "<!--", "-->",
    "<img src=x onerror=alert(1)>", "\"'><svg/onload=alert(1)>", "{{SCRIPT}}{{DATA}}", "&lt;b&gt;", "\x1b[2J\x1b[31m",
    "\u2028alert(1)\u2029", "javascript:alert(1)", "\ud800", "\0", "=cmd|' /C calc'!A0", "a" * 3000, "\u202egnp.exe",
    "../../etc/passwd", "[bold]x[/bold]", "`$(touch ran)`", "__proto__", "constructor", "%s%n{0}",
]  # fmt: skip
NUMBERS = [
    -1, 0, 1, 511, 512, 513, 1 << 31, 1 << 32, (1 << 53) + 1, 1 << 59, (1 << 60) - 1, 1 << 60, 1 << 62, (1 << 63) - 1,
    1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), 1 << 70, 0.5, -0.0, 1e308, float("inf"), float("nan"), True, False,
    None,
]  # fmt: skip


# -- what is mutated -------------------------------------------------------------------------------------------------


@cache
def bases() -> list[dict[str, Any]]:
    oom: dict[str, Any] = pickle.loads((DATA / "snap-oom.pickle").read_bytes())
    events = oom["device_traces"][0]
    oom["device_traces"] = [events[:40] + events[-60:]]
    several = training(120, layers=2, depth=4).snapshot()
    several["device_traces"] = [[], several["device_traces"][0], copy.deepcopy(several["device_traces"][0])]
    several["segments"] = [{**segment, "device": 1, "segment_pool_id": (0, 3)} for segment in several["segments"]]
    predicted = placed_snapshot(random_trace(3, 150), AllocatorConfig())
    expandable = placed_snapshot(random_trace(4, 150), AllocatorConfig(expandable_segments=True), begin=40)
    annotated = training(150, layers=1, depth=2).snapshot()
    annotated["external_annotations"] = [
        {
            "name": f"ProfilerStep#{i}",
            "stage": stage,
            "device": 0,
            "time_us": annotated["device_traces"][0][i]["time_us"],
        }
        for i in (3, 40)
        for stage in ("START", "END")
    ]
    return [oom, several, predicted, expandable, annotated]


@cache
def logs() -> list[str]:
    head = "Timestamp,Checkpoint,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,CPU_Percent\n"
    rows = "".join(f"2025-12-28T00:15:{i:02d},0{i}_point,{i}.300,{i}.500,{i}.900,2.450,6.10\n" for i in range(9))
    parts = "Timestamp,Stage,Part,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,Seconds\n"
    return [head + rows, head + "2025-12-28T00:15:45,01_start,,,,2.450,6.10\n", parts + "x,a,block 0,1,2,3,4,5\n"]


def nasty(chance: random.Random, depth: int = 0) -> Any:
    dice = chance.random()
    if dice < 0.45:
        return chance.choice(NUMBERS)
    if dice < 0.8:
        return chance.choice(MARKUP)
    if dice < 0.9 and depth < 3:
        return [nasty(chance, depth + 1) for _ in range(chance.randrange(4))]
    if depth < 3:
        return {chance.choice(MARKUP): nasty(chance, depth + 1) for _ in range(chance.randrange(3))}
    return ""


def mutated(raw: Any, chance: random.Random) -> Any:
    """A few values replaced, removed, doubled or moved, anywhere."""
    raw = copy.deepcopy(raw)
    for _ in range(chance.choice([1, 1, 2, 5, 20])):
        node, key = raw, None
        parent: Any = None
        for _ in range(chance.randrange(1, 7)):
            if type(node) is dict and node:
                parent, key = node, chance.choice(list(node))
            elif type(node) is list and node:
                parent, key = node, chance.randrange(len(node))
            else:
                break
            node = parent[key]
        if parent is None:
            continue
        dice = chance.random()
        if dice < 0.6:
            parent[key] = nasty(chance)
        elif dice < 0.75:
            del parent[key]
        elif type(parent) is list:
            parent.insert(chance.randrange(len(parent) + 1), copy.deepcopy(node))
        else:
            parent[chance.choice(MARKUP)] = copy.deepcopy(node)
    return raw


def renamed(raw: dict[str, Any], chance: random.Random) -> Any:
    """The same numbers under hostile names: of files, functions, labels, categories, scopes, phases."""
    raw = copy.deepcopy(raw)
    for events in raw["device_traces"]:
        for event in events:
            event["frames"] = [
                {**frame, "filename": f"{chance.choice(MARKUP)}.py", "name": chance.choice(MARKUP)}
                for frame in event.get("frames", [])[:3]
            ]
            event["user_metadata"] = chance.choice(MARKUP)
            if chance.random() < 0.5:
                event["category"] = chance.choice([*MARKUP, "weights", "unknown"])
    for note in raw.get("external_annotations", []):
        note["name"] = chance.choice(MARKUP)
    for mark in raw.get("memfit", {}).get("marks", []):
        if "phase" in mark:
            mark["phase"] = chance.choice(MARKUP)
    raw["allocator_settings"] = {chance.choice(MARKUP): chance.choice(MARKUP) for _ in range(4)}
    return raw


def disordered(raw: dict[str, Any], chance: random.Random) -> Any:
    """Events that contradict each other and the final state."""
    raw = copy.deepcopy(raw)
    for events in raw["device_traces"]:
        dice = chance.random()
        if dice < 0.3:
            chance.shuffle(events)
        elif dice < 0.5:
            events.extend(copy.deepcopy(events))
        elif dice < 0.7:
            for event in events:
                event["size"] = chance.choice([0, 1, 1 << 20, 1 << 40, (1 << 60) - 1])
        else:
            for event in chance.sample(events, len(events) // 3):
                event["addr"] = chance.choice([0, 512, (1 << 64) - 512, 1 << 63, event.get("addr", 7)])
    if chance.random() < 0.3:
        raw["segments"] = []
    return raw


class _Payload:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


def by_hand(chance: random.Random, folder: Path) -> bytes:
    """Payloads, bombs, depths, soups of opcodes."""
    raw = chance.choice(bases())
    bomb: list[Any] = []
    for _ in range(chance.randrange(5, 60)):
        bomb = [bomb, bomb]
    circle: list[Any] = []
    circle.append(circle)
    payload = _Payload(f"touch {folder / MARKER}")
    codes = [
        b"(", b"]", b"}", b"a", b"e", b"s", b"u", b"N", b"\x88", b"\x94", b"K\x01", b"M\x01\x02", b"K\x01K\x02\x86",
        b"h\0", b"q\0", b"\x8c\x08segments", b"\x8c\x0ddevice_traces", b"\x8c\x06action", b"cos\nsystem\n", b"R",
        b"\x93", b"\x81", b"0",
    ]  # fmt: skip
    choices = [
        lambda: pickle.dumps({**raw, "extra": payload}, protocol=chance.randrange(2, 6)),
        lambda: pickle.dumps(payload, protocol=chance.randrange(2, 6)),
        lambda: pickle.dumps({**raw, chance.choice(list(raw)): bomb}, protocol=4),
        lambda: pickle.dumps({**raw, chance.choice(list(raw)): circle}, protocol=4),
        lambda: b"\x80\x04" + b"]" * chance.randrange(1, 300_000) + b".",
        lambda: b"[" * chance.randrange(1, 300_000),
        lambda: b'{"segments":' * chance.randrange(1, 50_000),
        lambda: b"\x80\x04}" + b"".join(chance.choice(codes) for _ in range(60)) + b".",
        lambda: bytes(chance.randrange(256) for _ in range(chance.randrange(300))),
        lambda: gzip.compress(bytes(chance.randrange(1, 8) << 20)),
        lambda: b"\x80\x04]r\xff\xff\xff\x7f.",
        lambda: b"PK\x03\x04" + bytes(chance.randrange(256) for _ in range(200)),
        lambda: json.dumps(raw)[: chance.randrange(2000)].encode(),
    ]  # fmt: skip
    return chance.choice(choices)()


def broken_bytes(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 8)):
        at = chance.randrange(len(changed) + 1)
        dice = chance.random()
        if dice < 0.4:
            changed[at : at + 1] = bytes([chance.randrange(256)])
        elif dice < 0.6:
            changed[at:at] = bytes(chance.randrange(256) for _ in range(chance.randrange(6)))
        elif dice < 0.8:
            del changed[at : at + chance.randrange(20)]
        elif dice < 0.9:
            changed[at:at] = changed[at // 2 : at // 2 + 60]
        else:
            del changed[at:]
    return bytes(changed)


def written(raw: Any, chance: random.Random) -> bytes:
    dice = chance.random()
    if dice < 0.6:
        return pickle.dumps(raw, protocol=chance.randrange(2, 6))
    try:
        text = json.dumps(raw).encode("utf-8", "replace")
    except (TypeError, ValueError):
        return pickle.dumps(raw, protocol=4)
    return gzip.compress(text, 1) if dice < 0.7 else text


def a_log(chance: random.Random) -> bytes:
    lines = chance.choice(logs()).splitlines()
    for _ in range(chance.randrange(1, 6)):
        row = chance.randrange(len(lines))
        cells = lines[row].split(",")
        cells[chance.randrange(len(cells))] = str(nasty(chance, 3)) if chance.random() < 0.8 else '"'
        lines[row] = ",".join(cells)
    text = chance.choice(["\n", "\r\n", "\n\n"]).join(lines).encode("utf-8", "replace")
    return broken_bytes(text, chance) if chance.random() < 0.3 else text


def a_trace(chance: random.Random, path: Path) -> bytes:
    """A saved trace whose columns say impossible things, or whose archive is damaged."""
    trace = random_trace(chance.randrange(50), 80)
    trace.names[0:] = ["", chance.choice(MARKUP)]
    trace.marks.clear()
    if chance.random() < 0.7:
        for _ in range(6):
            trace.subjects[chance.randrange(len(trace))] = chance.randrange(len(trace.requested))
            trace.actions[chance.randrange(len(trace))] = chance.randrange(5)
            trace.requested[chance.randrange(len(trace.requested))] = chance.choice([0, 1, 1 << 40, (1 << 60) - 1])
    try:
        trace.save(path)
    except (ValueError, OverflowError):
        return b""
    data = path.read_bytes()
    return broken_bytes(data, chance) if chance.random() < 0.4 else data


def make(number: int, seed: int, path: Path) -> Path:
    chance = random.Random(seed * 1_000_003 + number)
    dice = chance.random()
    raw = chance.choice(bases())
    if dice < 0.25:
        data = broken_bytes(written(raw, chance), chance)
    elif dice < 0.55:
        data = written(mutated(raw, chance), chance)
    elif dice < 0.65:
        data = written(renamed(raw, chance), chance)
    elif dice < 0.78:
        data = written(disordered(raw, chance), chance)
    elif dice < 0.86:
        data = by_hand(chance, path.parent)
    elif dice < 0.95:
        data = a_log(chance)
    else:
        data = a_trace(chance, path.with_suffix(".npz"))
    path.write_bytes(data)
    return path


# -- what may come of it ---------------------------------------------------------------------------------------------


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)


@cache
def honest_tags() -> list[str]:
    return tags_of(page(report_file(DATA / "snap-oom.pickle")))


def tags_of(html: str) -> list[str]:
    parser = _Tags()
    parser.feed(html)
    return parser.tags


def check_page(html: str) -> None:
    assert tags_of(html) == honest_tags(), "the page has other elements than it should"
    data = html.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    assert not set(data) & set("<>&\u2028\u2029"), "something is unescaped"
    json.loads(data)


def check_text(text: str) -> None:
    odd = {c for c in text if not c.isprintable()} - {"\n"}
    assert not odd, f"control characters reach the terminal: {odd!r}"


def finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def use(path: Path, *, all_of_it: bool) -> str:
    """One file through everything; what became of it in a word."""
    try:
        reported = report_file(path)
    except MemfitError as error:
        check_text(error.message.replace(repr(str(path)), ""))
        assert "\n" not in error.message
        return "refused"
    json.dumps(reported.document, allow_nan=False)
    check_sums(reported)
    check_text(as_text(show_report, reported.document))
    check_page(page(reported))
    if all_of_it and reported.run is not None:
        try:
            for name in FORMATS:
                FORMATS[name].write(reported.run)
            check_text(as_text(show_diff, diff_files(path, path)))
        except MemfitError:
            return "reported, not exported"
    return "reported"


def check_sums(reported: Report) -> None:
    document = reported.document
    if "breakdown" in document:
        assert sum(document["breakdown"].values()) == document["peak"]["allocated_bytes"]
        assert all(size >= 0 for size in document["breakdown"].values())


def run(count: int, seed: int, *, first: int = 0, limit: float = SECONDS) -> Counter[str]:
    """Every outcome, counted; a failure is printed and counted as such."""
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(first, first + count):
            path = make(number, seed, folder / "given.pickle")
            start = time.process_time()
            try:
                outcome = use(path, all_of_it=number % 5 == 0)
            except BaseException:
                print(f"file {number} of seed {seed}:")
                traceback.print_exc(limit=-4, file=sys.stdout)
                outcome = "FAILED"
                if isinstance(sys.exc_info()[1], KeyboardInterrupt):
                    raise
            took = time.process_time() - start
            if took > limit:
                print(f"file {number} of seed {seed} took {took:.2f} s")
                outcome = "FAILED"
            if (folder / MARKER).exists():
                print(f"file {number} of seed {seed} was run")
                outcome = "FAILED"
                (folder / MARKER).unlink()
            outcomes[outcome] += 1
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    started = time.process_time()
    outcomes = run(given.count, given.seed, first=given.first)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{dict(outcomes)}, {time.process_time() - started:.0f} s of CPU, at most {most:.0f} MiB resident")
    return 1 if outcomes["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
