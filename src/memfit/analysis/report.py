"""Whatever memfit can report on, as a document (memfit.report/1): the peak, why it is so, all else there is to know.

reported = report_file("run7/")     # a snapshot, a trace, a memory log, or the folder of a run
reported.document
reported.run                        # for drawing; None if there is only a log
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memfit.analysis.labels import ALL_CATEGORIES
from memfit.analysis.run import Run, is_trace_file, open_run, pick, runs_of_file, stack_lines
from memfit.analysis.run_folder import (
    LOG,
    PARTS,
    PRECISION_BYTES,
    RESULT,
    MemoryLogFile,
    beginning,
    log_part,
    looks_like_a_log,
    read_memory_log,
    read_result,
)
from memfit.analysis.stacks import code_line
from memfit.analysis.summary import breakdown, growth, idle_at, largest_kinds, moment, shares, temporaries, there_before
from memfit.errors import InputError, UsageError
from memfit.events import Action
from memfit.replay.timeline import BEFORE, Ints
from memfit.snapshots.schema import Malformed, clean, scalar
from memfit.units import format_bytes

SCHEMA = "memfit.report/1"
LARGEST = 20
MAX_SPANS = 60
MAX_PHASES = 3000
MAX_OOMS = 5
MAX_SEGMENT_GROUPS = 50
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


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


def report_run(run: Run) -> dict[str, Any]:
    timeline, labels, blocks = run.timeline, run.labels, run.summary.alive
    idle = {"reserved_peak": timeline.reserved_peak_event, "end": len(run.trace) - 1}
    document = {
        "schema": SCHEMA, "origin": run.origin,
        "messages": [{"kind": message.kind, "text": str(message)} for message in run.messages], "device": run.device,
        "gpu": run.gpu,
        "events": _counts(run), "seconds": run.seconds(len(run.trace)),
        "peak": {
            "allocated_bytes": timeline.peak_allocated,
            "reserved_bytes": timeline.peak_reserved,
            "requested_bytes": int(np.frombuffer(run.trace.requested, dtype=np.int64)[blocks].sum()),
        },
        "at_peak": _moment(run, timeline.peak_event), "breakdown": run.summary.breakdown,
        "category_source": labels.source, "there_before": there_before(timeline, blocks),
        **_groups(run, blocks),
        "largest": [_allocation(run, alike) for alike in largest_kinds(timeline, labels, blocks, LARGEST)],
        "phases": [
            {**asdict(phase), "begin_seconds": run.seconds(phase.begin_event)}
            for phase in run.summary.phases[:MAX_PHASES]
        ],
        "phase_source": labels.phase_source,
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
        "by_code_line": shares(timeline, labels, blocks, "line") if labels.stacks else (),
        "by_module": shares(timeline, labels, blocks, "module") if any(labels.module[blocks]) else (),
        "by_op": () if labels.stacks else shares(timeline, labels, blocks, "op"),
    }
    return {name: [asdict(share) for share in found] for name, found in made.items()}


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
            "there_before": there_before(run.timeline, blocks),
            "by_code_line": [asdict(share) for share in shares(run.timeline, run.labels, blocks, "line", limit=10)],
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


# -- a memory log --------------------------------------------------------------------------------------------------


def report_log(log: MemoryLogFile, parts: MemoryLogFile | None = None) -> dict[str, Any]:
    """The log alone, as a report of its own."""
    found = log_part(log, parts)
    peak = log.peak
    least = _least_reserved(log, found["peak_bytes"])
    document = {
        "schema": SCHEMA, "origin": "measured",
        "messages": [
            {"kind": warning.kind, "text": str(warning)}
            for warning in dict.fromkeys((*log.warnings, *(parts.warnings if parts else ())))
        ],
        "device": None, "gpu": None,
        "peak": {
            "allocated_bytes": found["peak_bytes"], "reserved_bytes": None, "reserved_at_least_bytes": least,
            "requested_bytes": None,
        },
        "at_peak": None if peak is None else {"phase": found["peak_between"], "checkpoint": peak.name},
        "log": found,
        "notes": [
            "measured at checkpoints: what is alive, and where it was made, is not in a memory log",
            f"its figures have three decimals of GiB, so each may be {format_bytes(PRECISION_BYTES)} off",
            *([] if least is None else [NO_PEAK_OF_RESERVED]),
        ],
    }  # fmt: skip
    document["next"] = list(_next_of_log(found))
    return document


NO_PEAK_OF_RESERVED = (
    "what was reserved is known at checkpoints only, its peak is not in a memory log: at least the most of these, "
    "and at least what was allocated"
)


def _least_reserved(log: MemoryLogFile, allocated: int | None) -> int | None:
    """The peak of reserved memory lies between checkpoints, where nobody looked."""
    reserved = [point.reserved_bytes for point in log.checkpoints if point.reserved_bytes is not None]
    return max([*reserved, *([] if allocated is None else [allocated])]) if reserved else None


def _next_of_log(found: dict[str, Any]) -> Iterator[str]:
    if found["peak_between"].startswith("between"):
        yield (
            f"record that stretch to see what is alive {found['peak_between']}: "
            "torch.cuda.memory._record_memory_history, then memfit report on the snapshot"
        )


# -- a file ---------------------------------------------------------------------------------------------------------

ENDINGS = (".pickle", ".pkl", ".npz", ".json", ".pickle.gz", ".pkl.gz", ".json.gz")
MAX_FILES = 24
MAX_FOLDER_BYTES = 256 << 20
MAX_RESULT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Report:
    document: dict[str, Any]
    run: Run | None = None


def report_file(
    path: str | Path,
    *,
    device: int | None = None,
    alloc_conf: str | None = None,
    on_read: Callable[[int], None] = lambda events: None,
) -> Report:
    """`on_read` is told of how many events, once the file itself has been read."""
    path = Path(path)
    if _is_folder(path):
        return _folder(path, device)
    if _is_log(path):
        if device is not None or alloc_conf is not None:
            raise UsageError(f"--device and --alloc-conf say nothing about {str(path)!r}, which is a memory log")
        return Report(_named(report_log(read_memory_log(path)), path, "memory_log"))
    if is_trace_file(path):
        run = open_run(path, device=device, alloc_conf=alloc_conf)
        return Report(_named(report_run(run), path, "trace"), run)
    if alloc_conf is not None:
        open_run(path, device=device, alloc_conf=alloc_conf)
    runs = runs_of_file(path, on_read)
    run = pick(runs, device)
    document = _named(report_run(run), path, "snapshot")
    document["devices"] = [_device(each) for each in runs]
    return Report(document, run)


def files_read(path: Path) -> list[Path]:
    """What a report on this path may read, and so must not be written over."""
    if not _is_folder(path):
        return [path]
    return [each for each in _files(path) if each.name.endswith((*ENDINGS, ".csv"))]


def _named(document: dict[str, Any], path: Path, kind: str) -> dict[str, Any]:
    schema = document.pop("schema")
    return {"schema": schema, "source": {"path": clean(str(path)), "kind": kind, "files": []}, **document}


def _device(run: Run) -> dict[str, Any]:
    return {
        "device": run.device,
        "events": len(run.trace),
        "allocated_bytes": run.timeline.peak_allocated,
        "reserved_bytes": run.timeline.peak_reserved,
    }


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _is_log(path: Path) -> bool:
    start = beginning(path)
    return start is not None and (path.suffix == ".csv" or looks_like_a_log(start))


# -- a folder ----------------------------------------------------------------------------------------------------


def _folder(folder: Path, device: int | None) -> Report:
    """The recording that needed most is reported; the log, the result and the other recordings stand beside it."""
    files = sorted(_files(folder))
    log = _log(folder / LOG, files)
    parts = _log(folder / PARTS, files)
    passed_over: list[str] = []
    rows, best = [], None
    for path in _recordings(files):
        try:
            reported = report_file(path, device=device)
        except InputError as error:
            passed_over.append(error.message)
            continue
        rows.append(_file_row(path, reported.document))
        if best is None or _peak(reported) > _peak(best[1]):
            best = path, reported
    if best is None and log is None:
        raise InputError(
            f"nothing to report on in {str(folder)!r}",
            hint="a run's folder has a memory_log.csv, a snapshot (*.pickle, *.json) or a trace (*.npz)",
        )
    if best is not None:
        document, run = best[1].document, best[1].run
    else:
        assert log is not None
        document, run = _named(report_log(log, parts), folder, "run_folder"), None
    document["messages"] += [{"kind": "passed_over", "text": text} for text in passed_over[:5]]
    document["source"] = {
        "path": clean(str(folder)), "kind": "run_folder", "files": rows,
        "reported": clean(best[0].name) if best is not None else LOG,
    }  # fmt: skip
    document["log"] = None if log is None else log_part(log, parts)
    document["result"] = _result(folder / RESULT)
    return Report(document, run)


def _files(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and _is_file(entry):
                    yield Path(entry.path)
    except OSError as error:
        raise InputError(f"cannot read the folder {str(folder)!r}: {error.strerror}") from error


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to where nobody may look
        return False


def _recordings(files: list[Path]) -> list[Path]:
    """Newest first, as many as can be read in a while."""
    found = [path for path in files if path.name.endswith(ENDINGS) and may_be_recording(path)]
    found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    kept: list[Path] = []
    size = 0
    for path in found[:MAX_FILES]:
        size += path.stat().st_size
        if kept and size > MAX_FOLDER_BYTES:
            break
        kept.append(path)
    return sorted(kept)


def may_be_recording(path: Path) -> bool:
    """Of JSON files only those that begin as a snapshot does."""
    return not path.name.endswith(".json") or b'"segments"' in (beginning(path) or b"")


def _log(path: Path, files: list[Path]) -> MemoryLogFile | None:
    if path not in files:
        return None
    try:
        return read_memory_log(path)
    except InputError:
        return None


def _peak(reported: Report) -> int:
    return int(reported.document["peak"]["allocated_bytes"] or 0)


def _file_row(path: Path, document: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": clean(path.name), "kind": document["source"]["kind"], "origin": document["origin"],
        "allocated_bytes": document["peak"]["allocated_bytes"], "reserved_bytes": document["peak"]["reserved_bytes"],
    }  # fmt: skip


def _result(path: Path) -> dict[str, Any] | None:
    """Plain values of the result's top level; what is nested is for programs that know it."""
    values = read_result(path, MAX_RESULT_BYTES)
    if values is None:
        return None
    plain: dict[str, Any] = {}
    for key, value in list(values.items())[:100]:
        try:
            plain[clean(key)] = scalar(value, RESULT)
        except Malformed:
            plain[clean(key)] = f"({type(value).__name__})"
    return plain
