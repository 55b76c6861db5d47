"""A run in the formats of other tools: torch's viewer, Perfetto, speedscope, spreadsheets.

memory-viz   a snapshot as torch writes it (pickle, protocol 4): pytorch.org/memory_viz and every other reader
json         the same as JSON, which newer viewers read too
perfetto     counters, phases and the largest allocations for ui.perfetto.dev
speedscope   what is alive at the peak as a flame graph for speedscope.app
csv          one row an allocation
"""

from __future__ import annotations

import csv
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memfit.analysis.labels import ALL_CATEGORIES
from memfit.analysis.page import group_sums, sample
from memfit.analysis.report import spans
from memfit.analysis.run import Run, paths, stack_lines
from memfit.analysis.summary import largest
from memfit.errors import UnknownName
from memfit.events import Action, Trace
from memfit.files import written_whole
from memfit.replay.timeline import BEFORE
from memfit.snapshots.read import Snapshot, SnapshotSegment
from memfit.snapshots.write import (
    SEGMENT_ACTIONS,
    as_json,
    block_events,
    driver_event,
    placed_snapshot,
    segment_entry,
)

MAX_SAMPLES = 40_000
MAX_ALLOCATIONS = 3000
PID, PHASES, SCOPES, BLOCKS = 1, 1, 2, 3


def perfetto_trace(run: Run) -> dict[str, Any]:
    """The JSON "trace event format": https://perfetto.dev/docs/getting-started/other-formats

    Times are microseconds since the first event. A prediction has none: there, one event is one microsecond."""
    events = [*_names(run), *_counters(run), *_phases(run), *_scopes(run), *_allocations(run)]
    unit = "microseconds" if run.times is not None else "events"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"made_by": "memfit", "time_unit": unit}}


def _at(run: Run, event: int) -> float:
    seconds = run.seconds(event)
    return float(max(event, 0)) if seconds is None else round(seconds * 1e6, 3)


def _names(run: Run) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": PID, "name": "process_name", "args": {"name": f"GPU {run.device} ({run.origin})"}}
    for thread, name in ((PHASES, "phases"), (SCOPES, "scopes of the program"), (BLOCKS, "largest allocations")):
        yield {"ph": "M", "pid": PID, "tid": thread, "name": "thread_name", "args": {"name": name}}


def _counters(run: Run) -> Iterator[dict[str, Any]]:
    samples = sample(run.timeline, MAX_SAMPLES)
    used = [i for i in range(len(ALL_CATEGORIES)) if (run.labels.category == i).any()]
    table = np.zeros(len(ALL_CATEGORIES), dtype=np.int64)
    table[used] = np.arange(len(used))
    sums = group_sums(run.timeline, samples, table[run.labels.category], len(used))
    for column, event in enumerate(samples.event.tolist()):
        at = _at(run, event)
        values = {ALL_CATEGORIES[number]: int(sums[row, column]) for row, number in enumerate(used)}
        yield {"ph": "C", "pid": PID, "ts": at, "name": "allocated bytes", "args": values}
        if samples.reserved is not None:
            reserved = {"reserved": int(samples.reserved[column])}
            yield {"ph": "C", "pid": PID, "ts": at, "name": "reserved bytes", "args": reserved}


def _phases(run: Run) -> Iterator[dict[str, Any]]:
    for phase in run.labels.phases:
        begin, end = _at(run, phase.begin), _at(run, phase.end)
        name = f"{phase.name} {phase.step}" if phase.step else phase.name
        yield _slice(name, begin, end, PHASES, {"step": phase.step})


def _scopes(run: Run) -> Iterator[dict[str, Any]]:
    for span in spans(run):
        begin, end = _at(run, span.begin_event), _at(run, span.end_event)
        yield _slice(span.name, begin, end, SCOPES, {"peak_bytes": span.allocated_bytes})


def _slice(name: str, begin: float, end: float, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "pid": PID, "tid": thread, "ts": begin, "dur": max(round(end - begin, 3), 0.0), "name": name or "?",
        "args": args,
    }  # fmt: skip


def _allocations(run: Run) -> Iterator[dict[str, Any]]:
    """As asynchronous slices, for they overlap."""
    lives, labels = run.timeline.lives, run.labels
    real = np.flatnonzero((run.timeline.size > 0) & (lives.death != BEFORE))
    for block in largest(run.timeline, real, MAX_ALLOCATIONS).tolist():
        begin, end = _at(run, int(lives.birth[block])), _at(run, int(lives.death[block]))
        where = labels.lines[labels.line[block]] or run.trace.module(block) or run.trace.op(block) or "(no name)"
        common = {"cat": "allocation", "id": block, "pid": PID, "tid": BLOCKS, "name": where}
        args = {
            "bytes": int(run.timeline.size[block]), "category": ALL_CATEGORIES[labels.category[block]],
            "stack": stack_lines(run.frames(block), 20),
        }  # fmt: skip
        yield {"ph": "b", "ts": begin, **common, "args": args}
        yield {"ph": "e", "ts": max(end, begin), **common}


COLUMNS = (
    "block", "allocated_bytes", "requested_bytes", "category", "module", "op", "code_line", "stream", "born_event",
    "freed_event", "born_seconds", "freed_seconds", "phase", "step",
)  # fmt: skip
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_text(run: Run) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    lives, labels, trace = run.timeline.lives, run.labels, run.trace
    for block in range(len(run.timeline.size)):
        birth, death = int(lives.birth[block]), int(lives.death[block])
        born, freed = birth if birth != BEFORE else None, death if 0 <= death < len(trace) else None
        phase = None if born is None else run.labels.phase_at(born)
        names = (_text(each) for each in (trace.module(block), trace.op(block), labels.lines[labels.line[block]]))
        category = ALL_CATEGORIES[labels.category[block]]
        row = (
            block, int(run.timeline.size[block]), trace.requested[block], category, *names, trace.streams[block], born,
            freed, _seconds(run, born), _seconds(run, freed),
            _text(phase.name) if phase else None, phase.step if phase else None,
        )  # fmt: skip
        writer.writerow(row)
    return out.getvalue()


def _text(name: str) -> str:
    """Names come from the file that is exported, and a spreadsheet would run one that begins as a formula does."""
    return f"'{name}" if name.startswith(FORMULA) else name


def _seconds(run: Run, event: int | None) -> str:
    seconds = None if event is None else run.seconds(event)
    return "" if seconds is None else f"{seconds:.6f}"


def speedscope_profile(run: Run) -> dict[str, Any]:
    """https://github.com/jlfwong/speedscope/wiki/Importing-from-custom-sources"""
    numbers: dict[str, int] = {}
    samples, weights = [], []
    for path, nbytes, _ in paths(run, run.summary.alive):
        samples.append([numbers.setdefault(name, len(numbers)) for name in path])
        weights.append(nbytes)
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "exporter": "memfit",
        "name": f"alive at the peak, GPU {run.device} ({run.origin})",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": name} for name in numbers]},
        "profiles": [
            {
                "type": "sampled", "name": "alive at the peak", "unit": "bytes", "startValue": 0,
                "endValue": sum(weights), "samples": samples, "weights": weights,
            }
        ],
    }  # fmt: skip


def viewer_pickle(run: Run) -> bytes:
    return pickle.dumps(viewer_snapshot(run), protocol=4)  # the newest that every version of the viewer reads


def viewer_snapshot(run: Run) -> dict[str, Any]:
    """A recording is written anew from what was read of it: plain types, shared stacks, nothing that it may have held
    besides. A prediction is placed by the model of the allocator first."""
    if run.snapshot is None:
        return placed_snapshot(run.trace, run.config, alloc_conf=run.config.to_text())
    return _rewritten(run.snapshot)


def _rewritten(snapshot: Snapshot) -> dict[str, Any]:
    writer = _Rewriter(snapshot)
    traces = [list(writer.events(device)) for device in range(len(snapshot.traces))]
    return {
        "segments": [writer.segment(segment) for segment in snapshot.segments],
        "device_traces": traces,
        "allocator_settings": snapshot.settings,
        "external_annotations": [
            {"name": each.name, "stage": each.stage, "device": each.device, "time_us": each.time_us}
            for each in snapshot.annotations
        ],
    }


class _Rewriter:
    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        frames = [{"filename": f.filename, "line": f.line, "name": f.name} for f in snapshot.frame_table]
        self.stacks = [[frames[i] for i in stack] for stack in snapshot.stacks]
        self.at_end = [{at: block for block, at in enumerate(trace.addresses)} for trace in snapshot.traces]
        """Which block lies at an address: the last one that was put there."""

    def events(self, device: int) -> Iterator[dict[str, Any]]:
        trace, times = self.snapshot.traces[device], self.snapshot.times[device]
        labelled = any(trace.category_of)
        for (action, subject), time in zip(trace.events(), times, strict=True):
            if action <= Action.FREE_COMPLETED:
                yield from self._block_events(trace, device, action, subject, time, labelled)
            elif action in SEGMENT_ACTIONS or action == Action.OOM:
                yield self._driver_event(trace, device, action, subject, time)
        if labelled:  # the viewer fails on categories unless one of them is this
            yield {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": 0, "category": "unknown"}

    def _block_events(
        self, trace: Trace, device: int, action: int, block: int, time: int, labelled: bool
    ) -> Iterator[dict[str, Any]]:
        event = {
            "addr": trace.addresses[block], "size": trace.requested[block], "stream": trace.streams[block],
            "time_us": time, "frames": self.stacks[self.snapshot.stack_of[device][block]],
        }  # fmt: skip
        return block_events(action, event, **({"category": trace.category(block) or "unknown"} if labelled else {}))

    def _driver_event(self, trace: Trace, device: int, action: int, number: int, time: int) -> dict[str, Any]:
        place = (c[number] for c in (trace.range_addresses, trace.range_sizes, trace.range_streams))
        stack = self.stacks[self.snapshot.range_stack_of[device][number]]
        return driver_event(action, *place, time_us=time, frames=stack)

    def segment(self, segment: SnapshotSegment) -> dict[str, Any]:
        blocks = []
        for block in segment.blocks:
            number = self.at_end[segment.device].get(block.address) if block.state != "inactive" else None
            stack = 0 if number is None else self.snapshot.stack_of[segment.device][number]
            facts = {name: getattr(block, name) for name in ("address", "size", "requested_size", "state")}
            blocks.append({**facts, "frames": self.stacks[stack]})
        return segment_entry(segment, blocks)


@dataclass(frozen=True, slots=True)
class Format:
    ending: str
    write: Callable[[Run], bytes]
    opens_in: str


FORMATS = {
    "memory-viz": Format(".memory-viz.pickle", viewer_pickle, "pytorch.org/memory_viz"),
    "json": Format(".memory-viz.json", lambda run: as_json(viewer_snapshot(run)), "pytorch.org/memory_viz"),
    "perfetto": Format(".perfetto.json", lambda run: as_json(perfetto_trace(run)), "ui.perfetto.dev"),
    "speedscope": Format(".speedscope.json", lambda run: as_json(speedscope_profile(run)), "speedscope.app"),
    "csv": Format(".csv", lambda run: csv_text(run).encode("utf-8", "replace"), "any spreadsheet"),
}


def find_format(name: str) -> Format:
    found = FORMATS.get(name.replace("_", "-"))
    if found is None:
        raise UnknownName("export format", name, FORMATS, more=f"there are {', '.join(FORMATS)}")
    return found


def write_export(run: Run, format_: Format, path: str | Path) -> None:
    data = format_.write(run)
    with written_whole(path) as beside:
        beside.write_bytes(data)
