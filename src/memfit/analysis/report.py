"""A run as a document (memfit.report/1): the peak, why it is what it is, and everything else there is to know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from memfit.analysis import alive
from memfit.analysis.alive import growth, idle_at, temporaries
from memfit.analysis.labels import ALL_CATEGORIES
from memfit.analysis.run import Run, stack_lines
from memfit.analysis.stacks import code_line
from memfit.analysis.summary import breakdown, moment
from memfit.events import Action
from memfit.replay.timeline import BEFORE, Ints
from memfit.units import format_bytes

MAX_SPANS = 60


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    begin_event: int
    end_event: int
    begin_seconds: float | None
    end_seconds: float | None
    allocated_bytes: int  # the peak in it


def spans(run: Run) -> tuple[Span, ...]:
    """The longest ones, in order. memfit's own files name their phases there once more; those are left out."""
    if run.snapshot is None or run.labels.phase_source == "marks":
        return ()
    opened: dict[str, list[int]] = {}
    found: list[tuple[int, int, str]] = []
    for each in run.snapshot.annotations:
        if each.device != run.device:
            continue
        if each.stage == "START":
            opened.setdefault(each.name, []).append(each.event)
        elif opened.get(each.name):
            found.append((opened[each.name].pop(), each.event, each.name))
    longest = sorted(found, key=lambda span: span[0] - span[1])[:MAX_SPANS]
    return tuple(_span(run, begin, end, name) for begin, end, name in sorted(longest))


def _span(run: Run, begin: int, end: int, name: str) -> Span:
    inside = run.timeline.allocated[begin:end]
    peak = max(run.timeline.allocated_at(begin - 1), int(inside.max(initial=0)))
    return Span(name, begin, end, run.seconds(begin), run.seconds(max(end - 1, begin)), peak)


SCHEMA = "memfit.report/1"
LARGEST = 20
MAX_PHASES = 3000
MAX_OOMS = 5
MAX_SEGMENT_GROUPS = 50
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def report_run(run: Run) -> dict[str, Any]:
    timeline, labels, blocks = run.timeline, run.labels, run.summary.alive
    idle = {"reserved_peak": timeline.reserved_peak_event, "end": len(run.trace) - 1}
    document = {
        "schema": SCHEMA, "origin": run.origin,
        "messages": [{"kind": message.kind, "text": str(message)} for message in run.messages], "device": run.device,
        "events": _counts(run), "seconds": run.seconds(len(run.trace)),
        "peak": {
            "allocated_bytes": timeline.peak_allocated,
            "reserved_bytes": timeline.peak_reserved,
            "requested_bytes": int(np.frombuffer(run.trace.requested, dtype=np.int64)[blocks].sum()),
        },
        "at_peak": _moment(run, timeline.peak_event), "breakdown": run.summary.breakdown,
        "category_source": labels.source, "there_before": alive.there_before(timeline, blocks),
        **_groups(run, blocks),
        "largest": [_allocation(run, alike) for alike in alive.largest_kinds(timeline, labels, blocks, LARGEST)],
        "phases": _phase_rows(run), "phase_source": labels.phase_source,
        "annotations": [asdict(span) for span in spans(run)],
        "idle": {name: _idle(run, at) for name, at in idle.items()}, "segments": _segments(run),
        "temporaries": _temporaries(run), "growth": asdict(growth(timeline, labels)), "ooms": list(_ooms(run)),
        "settings": {} if run.snapshot is None else run.snapshot.settings, "notes": list(_notes(run)),
    }  # fmt: skip
    document["next"] = list(_next(document))
    return document


def _counts(run: Run) -> dict[str, int]:
    actions = np.bincount(np.frombuffer(run.trace.actions, dtype=np.uint8), minlength=len(Action))
    return {
        "total": len(run.trace), "allocations": int(actions[Action.ALLOC]),
        "frees": int(actions[Action.FREE] + actions[Action.FREE_REQUESTED]),
        "segments_added": int(actions[Action.SEGMENT_ALLOC] + actions[Action.SEGMENT_MAP]),
        "segments_released": int(actions[Action.SEGMENT_FREE] + actions[Action.SEGMENT_UNMAP]),
        "never_freed": int((run.timeline.lives.death == len(run.trace)).sum()),
    }  # fmt: skip


def _moment(run: Run, event: int) -> dict[str, Any]:
    found = asdict(moment(run.timeline, run.labels, event))
    made = event >= 0 and run.trace.actions[event] == Action.ALLOC
    line = run.labels.lines[run.labels.line[run.trace.subjects[event]]] if made else ""
    return {"event": found.pop("event"), "seconds": run.seconds(event), **found, "code_line": line}


def _groups(run: Run, blocks: Ints) -> dict[str, Any]:
    timeline, labels = run.timeline, run.labels
    made = {
        "by_code_line": alive.by_line(timeline, labels, blocks) if labels.stacks else (),
        "by_module": alive.by_module(timeline, labels, blocks) if any(labels.module[blocks]) else (),
        "by_op": () if labels.stacks else alive.by_op(timeline, labels, blocks),
    }
    return {name: [asdict(share) for share in shares] for name, shares in made.items()}


def _allocation(run: Run, alike: Ints) -> dict[str, Any]:
    """Blocks of one size from one place, told by the first of them."""
    block, lives, labels = int(alike[0]), run.timeline.lives, run.labels
    birth, death = int(lives.birth[block]), int(lives.death[block])
    phase = run.labels.phase_at(birth) if birth != BEFORE else None
    return {
        "block": block, "count": len(alike), "each_bytes": int(run.timeline.size[block]),
        "allocated_bytes": int(run.timeline.size[alike].sum()), "requested_bytes": run.trace.requested[block],
        "category": ALL_CATEGORIES[labels.category[block]], "module": run.trace.module(block),
        "op": run.trace.op(block), "code_line": labels.lines[labels.line[block]], "stream": run.trace.streams[block],
        "born_event": birth if birth != BEFORE else None,
        "born_seconds": run.seconds(birth) if birth != BEFORE else None,
        "phase": phase.name if phase else "", "step": phase.step if phase else 0,
        "freed_event": death if death < len(run.trace) else None,
        "freed_seconds": run.seconds(death) if death < len(run.trace) else None,
        "stack": stack_lines(run.frames(block)),
    }  # fmt: skip


def _phase_rows(run: Run) -> list[dict[str, Any]]:
    phases = run.summary.phases[:MAX_PHASES]
    return [{**asdict(phase), "begin_seconds": run.seconds(phase.begin_event)} for phase in phases]


def _idle(run: Run, event: int | None) -> dict[str, Any] | None:
    idle = None if event is None else idle_at(run.timeline, event)
    return None if idle is None else asdict(idle)


def _segments(run: Run) -> list[dict[str, Any]]:
    """What the snapshot shows at its end, by pool and stream."""
    groups: dict[tuple[tuple[int, int], int, str, bool], list[int]] = {}
    for segment in run.snapshot.segments if run.snapshot is not None else ():
        if segment.device == run.device:
            key = segment.pool_id, segment.stream, segment.segment_type, segment.is_expandable
            counted = groups.setdefault(key, [0, 0, 0])
            used = sum(block.size for block in segment.blocks if block.state != "inactive")
            for i, value in enumerate((1, segment.total_size, used)):
                counted[i] += value
    rows = [
        {
            "pool": list(pool), "stream": stream, "kind": kind, "expandable": expandable, "segments": count,
            "reserved_bytes": reserved, "used_bytes": used,
        }
        for (pool, stream, kind, expandable), (count, reserved, used) in groups.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -int(row["reserved_bytes"]))[:MAX_SEGMENT_GROUPS]  # type: ignore[call-overload]


def _temporaries(run: Run) -> list[dict[str, Any]]:
    labels = run.labels
    names, number = (labels.lines, labels.line) if labels.stacks else (labels.ops, labels.op)
    return [asdict(each) for each in temporaries(run.timeline, labels, names, number)]


def _ooms(run: Run) -> Iterator[dict[str, Any]]:
    actions = np.frombuffer(run.trace.actions, dtype=np.uint8)
    for event in np.flatnonzero(actions == Action.OOM)[-MAX_OOMS:].tolist():
        number = run.trace.subjects[event]
        blocks = run.timeline.lives.alive_at(event)
        frames = run.range_frames(number)
        idle = idle_at(run.timeline, event)
        reserved = run.timeline.reserved_at(event)
        allocated = run.timeline.allocated_at(event)
        yield {
            **_moment(run, event),
            "requested_bytes": run.trace.range_sizes[number],
            "segment_bytes": run.config.segment_size(run.trace.range_sizes[number]),
            "device_free_bytes": run.trace.range_addresses[number],
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "cached_bytes": None if reserved is None else reserved - allocated,
            "largest_hole_bytes": None if idle is None else idle.largest_hole_bytes,
            "breakdown": breakdown(run.timeline, run.labels, blocks),
            "there_before": alive.there_before(run.timeline, blocks),
            "by_code_line": [asdict(share) for share in alive.by_line(run.timeline, run.labels, blocks, limit=10)],
            "code_line": code_line(frames),
            "stack": stack_lines(frames),
        }


def _notes(run: Run) -> Iterator[str]:
    labels = run.labels
    if run.origin == "predicted":
        yield "predicted, not measured: every block is where memfit's model of the allocator puts it"
    else:
        yield "measured: every block is where the recording saw it; bytes outside torch's allocator are not in it"
    if labels.source in ("derived", "both"):
        yield (
            "categories are derived from stacks and lifetimes: activations are freed in a backward pass, gradients are "
            "made in one and kept (as is a library's workspace that is made there), the optimizer's are made in "
            "torch.optim and kept, temporaries end in the phase they begin in; what fits none is unknown"
        )
    if labels.phase_source == "derived":
        yield "phases are derived: no Python frame is a backward pass, frames of torch.optim are the optimizer's step"
    if run.snapshot is not None:
        pools = {segment.pool_id for segment in run.snapshot.segments if segment.device == run.device} - {(0, 0)}
        if pools:
            yield f"{len(pools)} private pools (CUDA graphs) are in it, counted like all other memory"
        others = sorted({segment.device for segment in run.snapshot.segments} - {run.device})
        if others:
            yield f"also recorded: GPU {', '.join(map(str, others))} (--device N reports another one)"
    if run.times is None and run.origin == "measured" and len(run.trace):
        yield "no times in it (torch 2.2 and newer record them): events are counted instead"


def _next(document: dict[str, Any]) -> Iterator[str]:
    """What can be done now. Savings are not promised: a plan computes them."""
    oom = document["ooms"][-1] if document["ooms"] else None
    if oom is not None and oom["cached_bytes"] is not None:
        asked, cached = oom["requested_bytes"], oom["cached_bytes"]
        if cached >= asked and (oom["largest_hole_bytes"] or 0) < asked:
            pieces = format_bytes(oom["largest_hole_bytes"])
            yield f"{format_bytes(cached)} were cached, but in pieces of at most {pieces}: try {EXPANDABLE}"
    grown = document["growth"]
    if grown["grows"] and grown["survivors"]:
        first = grown["survivors"][0]["name"] or "code without a name"
        yield f"every step leaves {format_bytes(grown['per_step_bytes'])} more behind: look at {first}"
    idle = document["idle"]["reserved_peak"]
    if idle and not oom and idle["idle_bytes"] > idle["reserved_bytes"] // 4:
        yield f"{format_bytes(idle['idle_bytes'])} of the reserved memory were idle at its peak: try {EXPANDABLE}"
    kinds = {message["kind"] for message in document["messages"]}
    if "overflowed" in kinds or "empty" in kinds:
        yield "record again: torch.cuda.memory._record_memory_history(max_entries=1000000) before the model is made"
    elif "late" in kinds and document["there_before"]["allocated_bytes"] > document["peak"]["allocated_bytes"] // 2:
        yield "start recording before the model is made, to know what the rest is"
