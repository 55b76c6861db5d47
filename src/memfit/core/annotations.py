"""Scopes that a program named itself (`torch.profiler.record_function`), and the peak in each."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.run import Run

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
    inside = run.course.allocated[begin:end]
    peak = max(run.course.allocated_at(begin - 1), int(inside.max(initial=0)))
    return Span(name, begin, end, run.seconds(begin), run.seconds(max(end - 1, begin)), peak)
