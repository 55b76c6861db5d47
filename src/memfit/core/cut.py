"""A stretch of a run as a run of its own: one step of many, for comparing it with one step of another run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memfit.core.course import Course
from memfit.core.labels import Labels
from memfit.core.lifetimes import BEFORE, Ints, Lifetimes
from memfit.core.phases import Phase
from memfit.core.run import Run
from memfit.core.window import between, kept_blocks
from memfit.errors import UsageError


def one_step(run: Run, step: int, *, flag: str = "--step") -> Run:
    """One step, counted as the first; what was there before it has no beginning in it."""
    phases = [phase for phase in run.labels.phases if phase.step == step]
    if not phases:
        known = sorted({phase.step for phase in run.labels.phases if phase.step})
        hint = (
            f"it has the steps {known[0]} to {known[-1]}"
            if known
            else "no steps are marked in it, and none can be told"
        )
        raise UsageError(f"{flag} {step}: there is no such step in it", hint=hint)
    return cut(run, phases[0].begin, phases[-1].end, first_step=step)


def cut(run: Run, begin: int, end: int, *, first_step: int = 1) -> Run:
    kept = kept_blocks(run.trace, begin, end)
    course = _course(run.course, kept, begin, end)
    return replace(
        run, course=course, labels=_labels(run.labels, kept, begin, end, first_step),
        times=None if run.times is None else run.times[begin:end],
        rows=kept if run.rows is None else run.rows[kept],
    )  # fmt: skip


def _course(course: Course, kept: Ints, begin: int, end: int) -> Course:
    return Course(
        trace=between(course.trace, begin, end), lives=_lives(course.lives, kept, begin, end), size=course.size[kept],
        address=course.address[kept], allocated=course.allocated[begin:end],
        reserved=None if course.reserved is None else course.reserved[begin:end],
        allocated_before=course.allocated_at(begin - 1), reserved_before=course.reserved_at(begin - 1) or 0,
        start=tuple(course.ranges_at(begin - 1)),
        driver=tuple((event - begin, *rest) for event, *rest in course.driver if begin <= event < end),  # type: ignore[misc]
        doubts=course.doubts,
    )  # fmt: skip


def _lives(lives: Lifetimes, kept: Ints, begin: int, end: int) -> Lifetimes:
    def shifted(column: Ints) -> Ints:
        found = column[kept]
        return np.where(found < begin, BEFORE, np.minimum(found, end) - begin)

    return Lifetimes(shifted(lives.birth), shifted(lives.death), shifted(lives.gone))


def _labels(labels: Labels, kept: Ints, begin: int, end: int, first_step: int) -> Labels:
    phases = tuple(
        Phase(each.name, each.step - first_step + 1, max(each.begin, begin) - begin, min(each.end, end) - begin)
        for each in labels.phases
        if each.begin < end and each.end > begin
    )
    columns = {name: getattr(labels, name)[kept] for name in ("category", "module", "op", "line")}
    return replace(labels, phases=phases, **columns)
