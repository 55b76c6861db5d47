"""Does memory grow from step to step, and which lines of code make it grow?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.core.alive import Share, by_line, by_module
from memfit.core.course import Course
from memfit.core.labels import Labels
from memfit.core.lifetimes import BEFORE, Ints
from memfit.core.phases import Phase

SETTLED = 2  # the first step makes what stays: optimizer state, workspaces


@dataclass(frozen=True, slots=True)
class Step:
    step: int
    begin: int
    end: int
    peak_bytes: int
    left_bytes: int  # allocated when it ends


@dataclass(frozen=True, slots=True)
class Growth:
    steps: tuple[Step, ...]
    per_step_bytes: int | None  # what each step after the second leaves behind, in the middle; None if too few
    grows: bool | None  # whether every step after the second left more than the one before
    survivors: tuple[Share, ...]  # made in those steps and never freed


def growth(course: Course, labels: Labels) -> Growth:
    steps = tuple(_steps(course, labels.phases))
    later = [step.left_bytes for step in steps if step.step >= SETTLED]
    changes = np.diff(later)
    if len(changes) < 2:
        return Growth(steps, None, None, ())
    grows = bool((changes > 0).all())
    survivors: tuple[Share, ...] = ()
    if grows:
        begin = next(step.end for step in steps if step.step >= SETTLED)
        blocks = _survivors(course, begin, steps[-1].end)
        survivors = (by_line if labels.stacks else by_module)(course, labels, blocks, limit=8)
    return Growth(steps, int(np.median(changes)), grows, survivors)


def _steps(course: Course, phases: tuple[Phase, ...]) -> list[Step]:
    found: dict[int, tuple[int, int]] = {}
    for phase in phases:
        if phase.step > 0:
            begin, _ = found.get(phase.step, (phase.begin, 0))
            found[phase.step] = begin, phase.end
    complete = {phase.step for phase in phases if phase.name in ("step", "backward")}
    return [
        Step(step, begin, end, int(course.allocated[begin:end].max()), course.allocated_at(end - 1))
        for step, (begin, end) in found.items()
        if begin < end and step in complete
    ]


def _survivors(course: Course, begin: int, end: int) -> Ints:
    birth, death = course.lives.birth, course.lives.death
    return np.flatnonzero((birth != BEFORE) & (birth >= begin) & (birth < end) & (death >= end))
