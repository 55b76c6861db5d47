"""Two runs as a document (memfit.diff/1): how their peaks differ and why, then everything event by event.

Either may be predicted or measured, whole or one step of it; addresses play no part. Every block that is alive at one
of the two peaks falls into exactly one of these, and together they are the difference to the byte:

    only a, only b     an allocation that the other run does not make
    longer a, longer b both make it, but at its own peak the other run has freed it already
    earlier a, b       both make it, but at its own peak the other run has not come to it
    block size         both hold it, in blocks of different size

What a recording does not say of a block (its category, its module) is taken from the block's partner, if that does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from memfit.analysis.compare import Comparison, Hunk, Lifetime, compare
from memfit.analysis.labels import ALL_CATEGORIES, QUIET_PHASES, UNKNOWN, Labels, Phase, any_layer
from memfit.analysis.run import Run, is_trace_file, open_run
from memfit.analysis.run_folder import beginning, looks_like_a_log
from memfit.analysis.summary import PhasePeak
from memfit.errors import InputError, UsageError
from memfit.events import Mark, between, kept_blocks
from memfit.replay.timeline import BEFORE, Ints, Lifetimes, Timeline
from memfit.snapshots.schema import clean

SCHEMA = "memfit.diff/1"
LISTED = 40
GROUPS = 6

REASONS = {
    "only_b": "only b makes these", "only_a": "only a makes these",
    "longer_b": "b still holds these, a has freed them", "longer_a": "a still holds these, b has freed them",
    "earlier_b": "at its peak b has made these, a not yet", "earlier_a": "at its peak a has made these, b not yet",
    "block_size": "both hold these, in blocks of different size",
}  # fmt: skip


def diff_runs(a: Run, b: Run) -> dict[str, Any]:
    marks_a, marks_b = _marks(a), _marks(b)
    found = compare(a.trace, b.trace, marks_a=marks_a, marks_b=marks_b)
    pairs = _paired_again(a, b, *found.pairs)
    sides = _Side(a, pairs[0]), _Side(b, pairs[1])
    labels = _shared_labels(*sides)
    document: dict[str, Any] = {
        "schema": SCHEMA, "a": _summary(a), "b": _summary(b),
        "messages": [
            {"side": name, "kind": message.kind, "text": str(message)}
            for name, run in (("a", a), ("b", b))
            for message in run.messages
        ],
        "same": found.same,
        "peak": {
            f"{name}_bytes": _pair(*(_summary(run)["peak"][f"{name}_bytes"] for run in (a, b)))
            for name in ("allocated", "reserved")
        },
        "explained": [asdict(reason) for reason in _explained(*sides, labels)],
        "by_category": list(_by(sides, labels.category)), "by_phase": list(_by_phase(a, b)),
        "by_module": list(_by(sides, labels.module)), "allocations": asdict(found.allocs),
        "frees": asdict(found.frees), "places": [_place(hunk) for hunk in found.hunks[:LISTED]],
        "lifetimes": [_lifetime(lifetime) for lifetime in found.lifetimes[:LISTED]],
        "totals": [{**asdict(total), "bytes": total.nbytes} for total in found.totals[:LISTED]],
        "left_out": _left_out(found),
    }  # fmt: skip
    document["notes"] = list(_notes(a, b, labels))
    document["next"] = list(_next(a, b))
    return document


def _marks(run: Run) -> list[tuple[int, Mark]]:
    """Where phases begin. What is done between two of them, such as making a batch, is a part of the next."""
    found: list[tuple[int, Mark]] = []
    begin: int | None = None
    for phase in run.labels.phases:
        if phase.name == "data":
            begin = phase.begin if begin is None else begin
        elif phase.name not in QUIET_PHASES:
            found.append((phase.begin if begin is None else begin, Mark(phase.name, phase.step)))
            begin = None
    return found


def _summary(run: Run) -> dict[str, Any]:
    timeline, at = run.timeline, run.summary.at_peak
    return {
        "origin": run.origin,
        "events": len(run.trace),
        "peak": {"allocated_bytes": timeline.peak_allocated, "reserved_bytes": timeline.peak_reserved},
        "at_peak": {"event": at.event, "phase": at.phase, "step": at.step},
    }


def _pair(a: int | None, b: int | None) -> dict[str, int | None]:
    return {"a": a, "b": b, "difference": None if a is None or b is None else b - a}


# -- what explains the difference -----------------------------------------------------------------------------------


def _paired_again(a: Run, b: Run, of_a: Ints, of_b: Ints) -> tuple[Ints, Ints]:
    """What was there before was paired by its bytes alone: of equal ones, those in blocks of equal size are a pair."""
    before = (a.timeline.lives.birth[of_a] == BEFORE) & (b.timeline.lives.birth[of_b] == BEFORE)
    sorted_pairs = []
    for run, blocks in ((a, of_a), (b, of_b)):
        found = blocks[before]
        requested = np.frombuffer(run.trace.requested, dtype=np.int64)[found]
        ordered = blocks.copy()
        ordered[before] = found[np.lexsort((found, run.timeline.size[found], requested))]
        sorted_pairs.append(ordered)
    return sorted_pairs[0], sorted_pairs[1]


class _Side:
    """One run, and for each of its blocks the number of its pair (-1: it has none)."""

    def __init__(self, run: Run, paired: Ints) -> None:
        self.run = run
        self.pair = np.full(len(run.timeline.size), -1, dtype=np.int64)
        self.pair[paired] = np.arange(len(paired))
        self.blocks = paired
        self.peak = run.timeline.peak_event
        self.alive = run.summary.alive


Names = tuple[list[str], list[str]]
"""Of each side's blocks a name."""


@dataclass(frozen=True, slots=True)
class _SharedNames:
    category: Names
    module: Names
    lent: int  # blocks that took a partner's category


def _shared_labels(a: _Side, b: _Side) -> _SharedNames:
    categories = {side: [ALL_CATEGORIES[i] for i in side.run.labels.category.tolist()] for side in (a, b)}
    modules = {side: _modules(side.run) for side in (a, b)}
    lent = 0
    for block_a, block_b in zip(a.blocks.tolist(), b.blocks.tolist(), strict=True):
        for mine, other, own, its in ((a, b, block_a, block_b), (b, a, block_b, block_a)):
            if categories[mine][own] == UNKNOWN and categories[other][its] != UNKNOWN:
                categories[mine][own] = categories[other][its]
                lent += 1
            if not modules[mine][own]:
                modules[mine][own] = modules[other][its]
    return _SharedNames((categories[a], categories[b]), (modules[a], modules[b]), lent)


def _modules(run: Run) -> list[str]:
    names, module = run.labels.modules_anywhere()
    return [names[i] for i in module.tolist()]


@dataclass(frozen=True, slots=True)
class Reason:
    """A part of the difference: bytes that b has more, or (below 0) less."""

    reason: str
    text: str
    difference_bytes: int
    count: int
    largest: list[dict[str, Any]]


def _explained(a: _Side, b: _Side, labels: _SharedNames) -> Iterator[Reason]:
    parts: dict[str, list[tuple[int, int, int]]] = defaultdict(list)  # side (0 or 1), block, bytes
    for number, (mine, other, sign) in enumerate(((a, b, -1), (b, a, 1))):
        name = "ab"[number]
        lives = other.run.timeline.lives
        for block in mine.alive.tolist():
            size, pair = sign * int(mine.run.timeline.size[block]), int(mine.pair[block])
            if pair < 0:
                parts[f"only_{name}"].append((number, block, size))
                continue
            partner = int(other.blocks[pair])
            if lives.birth[partner] > other.peak:
                parts[f"earlier_{name}"].append((number, block, size))
            elif lives.death[partner] <= other.peak:
                parts[f"longer_{name}"].append((number, block, size))
            elif number == 1 and (grown := size - int(other.run.timeline.size[partner])):
                parts["block_size"].append((1, block, grown))
    found = [
        Reason(key, text, sum(size for *_, size in parts[key]), len(parts[key]), _largest(parts[key], a, b, labels))
        for key, text in REASONS.items()
        if parts[key]
    ]
    yield from sorted(found, key=lambda reason: -abs(reason.difference_bytes))


def _largest(parts: list[tuple[int, int, int]], a: _Side, b: _Side, labels: _SharedNames) -> list[dict[str, Any]]:
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for number, block, size in parts:
        side, names = ((a, labels.category[0]), (b, labels.category[1]))[number]
        found = sums[_where(side.run, block), names[block]]
        found[0] += size
        found[1] += 1
    order = sorted(sums.items(), key=lambda item: -abs(item[1][0]))
    return [
        {"name": where, "category": category, "difference_bytes": size, "count": count}
        for (where, category), (size, count) in order[:GROUPS]
    ]


def _where(run: Run, block: int) -> str:
    labels = run.labels
    line = labels.lines[labels.line[block]]
    parts = any_layer(labels.modules[labels.module[block]]), labels.ops[labels.op[block]]
    return line or "  ".join(part for part in parts if part)


# -- by name ---------------------------------------------------------------------------------------------------------


def _by(sides: tuple[_Side, _Side], names: Names) -> Iterator[dict[str, Any]]:
    """What is alive at each side's own peak."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for number, (side, of_block) in enumerate(zip(sides, names, strict=True)):
        sizes = side.run.timeline.size[side.alive].tolist()
        for block, size in zip(side.alive.tolist(), sizes, strict=True):
            sums[of_block[block]][number] += size
    order = sorted(sums.items(), key=lambda item: (-abs(item[1][1] - item[1][0]), -max(item[1])))
    for name, found in order[:LISTED]:
        yield {"name": name, **_pair(*found)}


def _by_phase(a: Run, b: Run) -> Iterator[dict[str, Any]]:
    rows: dict[tuple[int, str], dict[str, PhasePeak]] = defaultdict(dict)
    for side, run in (("a", a), ("b", b)):
        for phase in run.summary.phases:
            rows[phase.step, phase.name][side] = phase
    for (step, name), sides in list(rows.items())[:LISTED]:
        both = sides.get("a"), sides.get("b")
        yield {
            "name": name,
            "step": step,
            "allocated_bytes": _pair(*(None if side is None else side.allocated_bytes for side in both)),
            "reserved_bytes": _pair(*(None if side is None else side.reserved_bytes for side in both)),
        }


# -- event by event --------------------------------------------------------------------------------------------------


def _place(hunk: Hunk) -> dict[str, Any]:
    made = asdict(hunk)
    return {**made, "only_a": made["only_a"][:LISTED], "only_b": made["only_b"][:LISTED]}


def _lifetime(lifetime: Lifetime) -> dict[str, Any]:
    made = asdict(lifetime)
    pairs = made.pop("pairs")
    made["bytes"] = made.pop("nbytes")
    return {**made, "items": [pair[0] for pair in pairs[:5]]}


def _left_out(found: Comparison) -> dict[str, int]:
    return {
        "places": max(len(found.hunks) - LISTED, 0) + found.left_out,
        "lifetimes": max(len(found.lifetimes) - LISTED, 0),
        "totals": max(len(found.totals) - LISTED, 0),
    }


def _notes(a: Run, b: Run, labels: _SharedNames) -> Iterator[str]:
    yield "allocations are paired by their bytes and order, never by address; a difference is b less a"
    if labels.lent:
        yield f"{labels.lent:,} blocks without a category of their own take that of their partner"
    if a.timeline.doubts or b.timeline.doubts:
        yield "a recording that contradicts itself is compared all the same: see the messages"


def _next(a: Run, b: Run) -> Iterator[str]:
    """A recording of a part of a run is best compared with the same part of the other."""
    steps = [sorted({phase.step for phase in run.labels.phases if phase.step > 0}) for run in (a, b)]
    if not all(steps) or len(steps[0]) == len(steps[1]):
        return
    few = 0 if len(steps[0]) < len(steps[1]) else 1
    many = steps[1 - few]
    flags = {"ab"[few]: steps[few][0], "ab"[1 - few]: many[1] if len(many) > 1 else many[0]}
    such = f"--step-a {flags['a']} --step-b {flags['b']}"
    yield f"{'ab'[few]} has {len(steps[few])} of {len(many)} steps: compare one with one, such as {such}"


def one_step(run: Run, step: int, *, flag: str = "--step") -> Run:
    """One step, counted as the first; what was there before it has no beginning in it."""
    phases = [phase for phase in run.labels.phases if phase.step == step]
    if not phases:
        known = sorted({phase.step for phase in run.labels.phases if phase.step})
        none = "no steps are marked in it, and none can be told"
        hint = f"it has the steps {known[0]} to {known[-1]}" if known else none
        raise UsageError(f"{flag} {step}: there is no such step in it", hint=hint)
    return cut(run, phases[0].begin, phases[-1].end, first_step=step)


def cut(run: Run, begin: int, end: int, *, first_step: int = 1) -> Run:
    kept = kept_blocks(run.trace, begin, end)
    timeline = _cut_timeline(run.timeline, kept, begin, end)
    return replace(
        run,
        timeline=timeline,
        labels=_cut_labels(run.labels, kept, begin, end, first_step),
        times=None if run.times is None else run.times[begin:end],
        rows=kept if run.rows is None else run.rows[kept],
    )


def _cut_timeline(timeline: Timeline, kept: Ints, begin: int, end: int) -> Timeline:
    return Timeline(
        trace=between(timeline.trace, begin, end),
        known_lives=_cut_lives(timeline.lives, kept, begin, end),
        size=timeline.size[kept],
        address=None if timeline.address is None else timeline.address[kept],
        allocated=timeline.allocated[begin:end],
        reserved=None if timeline.reserved is None else timeline.reserved[begin:end],
        allocated_before=timeline.allocated_at(begin - 1),
        reserved_before=timeline.reserved_at(begin - 1) or 0,
        start=tuple(timeline.ranges_at(begin - 1)),
        driver=tuple((event - begin, *rest) for event, *rest in timeline.driver if begin <= event < end),  # type: ignore[misc]
        doubts=timeline.doubts,
    )


def _cut_lives(lives: Lifetimes, kept: Ints, begin: int, end: int) -> Lifetimes:
    def shifted(column: Ints) -> Ints:
        found = column[kept]
        return np.where(found < begin, BEFORE, np.minimum(found, end) - begin)

    return Lifetimes(shifted(lives.birth), shifted(lives.death), shifted(lives.gone))


def _cut_labels(labels: Labels, kept: Ints, begin: int, end: int, first_step: int) -> Labels:
    phases = tuple(
        Phase(each.name, each.step - first_step + 1, max(each.begin, begin) - begin, min(each.end, end) - begin)
        for each in labels.phases
        if each.begin < end and each.end > begin
    )
    columns = {name: getattr(labels, name)[kept] for name in ("category", "module", "op", "line")}
    return replace(labels, phases=phases, **columns)


def diff_files(
    a: str | Path, b: str | Path, *, step_a: int | None = None, step_b: int | None = None, device: int | None = None
) -> dict[str, Any]:
    traces = is_trace_file(a), is_trace_file(b)
    of_a, of_b = (
        None if is_trace and not all(traces) else device for is_trace in traces
    )  # beside a recording it is for that
    document = diff_runs(_opened(a, step_a, "--step-a", of_a), _opened(b, step_b, "--step-b", of_b))
    for side, path in (("a", a), ("b", b)):
        document[side] = {"path": clean(str(path)), **document[side]}
    return document


def _opened(path: str | Path, step: int | None, flag: str, device: int | None) -> Run:
    if looks_like_a_log(beginning(Path(path)) or b""):
        raise InputError(
            f"{str(path)!r} is a memory log: it has checkpoints, no events to compare",
            hint="compare snapshots or traces; `memfit report` shows a log",
        )
    run = open_run(path, device=device)
    return run if step is None else one_step(run, step, flag=flag)
