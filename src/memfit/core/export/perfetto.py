"""A run for ui.perfetto.dev (and chrome://tracing): counters by category, phases, and the largest allocations.

The format is the JSON "trace event format": https://perfetto.dev/docs/getting-started/other-formats
Times are microseconds since the first event. A prediction has none: there, one event is one microsecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from memfit.core.alive import largest
from memfit.core.annotations import spans
from memfit.core.labels import ALL_CATEGORIES
from memfit.core.lifetimes import BEFORE
from memfit.core.run import Run, stack_lines
from memfit.core.timeline_samples import group_sums, sampled

MAX_SAMPLES = 40_000
MAX_ALLOCATIONS = 3000
PID, PHASES, SCOPES, BLOCKS = 1, 1, 2, 3


def perfetto_trace(run: Run) -> dict[str, Any]:
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
    samples = sampled(run.course, MAX_SAMPLES)
    used = [i for i in range(len(ALL_CATEGORIES)) if (run.labels.category == i).any()]
    table = np.zeros(len(ALL_CATEGORIES), dtype=np.int64)
    table[used] = np.arange(len(used))
    sums = group_sums(run.course, samples, table[run.labels.category], len(used))
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
    lives, labels = run.course.lives, run.labels
    real = np.flatnonzero((run.course.size > 0) & (lives.death != BEFORE))
    for block in largest(run.course, real, MAX_ALLOCATIONS).tolist():
        begin, end = _at(run, int(lives.birth[block])), _at(run, int(lives.death[block]))
        where = labels.lines[labels.line[block]] or run.trace.module(block) or run.trace.op(block) or "(no name)"
        common = {"cat": "allocation", "id": block, "pid": PID, "tid": BLOCKS, "name": where}
        args = {
            "bytes": int(run.course.size[block]), "category": ALL_CATEGORIES[labels.category[block]],
            "stack": stack_lines(run.frames(block), 20),
        }  # fmt: skip
        yield {"ph": "b", "ts": begin, **common, "args": args}
        yield {"ph": "e", "ts": max(end, begin), **common}
