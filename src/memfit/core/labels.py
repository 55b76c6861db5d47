"""What each block of a run is: its category, module, op and line of code, as columns of numbers into lists of names.

A prediction says it itself. Of a recording, what its stacks and lifetimes show is derived by the same definitions with
which predictions are labelled (docs/concepts.md); the rest is unknown, and called so.

    loading     `nn.Module` and what fills it                                    weights
    optimizer   frames of an optimizer; still alive when it is done              optimizer
    backward    no Python frame: autograd's thread; still alive afterwards       gradients
    otherwise   made by Python code, freed during a backward pass                activations
    all         made and gone within one phase                                   temporaries
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memfit.core.course import Course
from memfit.core.events import CATEGORIES
from memfit.core.lifetimes import BEFORE, Ints
from memfit.core.phases import Phase, derived_phases, marked_phases, phase_numbers
from memfit.core.snapshot import Annotation, Snapshot
from memfit.core.snapshot_schema import Frame, clean
from memfit.core.stack_reading import Work, code_line, is_python, works

UNKNOWN = "unknown"
ALL_CATEGORIES = (*CATEGORIES, UNKNOWN)
BEFORE_RECORDING = "(there before the recording)"
NO_PYTHON = "(no Python frame: the backward pass)"
NO_LINE = "(no line of code)"
Names = tuple[str, ...]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Labels:
    """Columns have one entry a block; `category` counts in ALL_CATEGORIES, the others in lists of their own."""

    category: Ints
    module: Ints
    op: Ints
    line: Ints
    modules: Names
    ops: Names
    lines: Names
    phases: tuple[Phase, ...]
    source: str  # of categories: "labels", "derived", "both" or "none"
    phase_source: str  # "marks", "derived" or "none"
    stacks: bool  # whether stacks were recorded at all


def labels_of_trace(course: Course) -> Labels:
    """Of a trace that carries its own labels."""
    trace = course.trace
    frames = [Frame(clean(file), line, clean(name)) for file, line, name in trace.frames]
    stack_of = np.zeros(len(course.size), dtype=np.int64)
    stack_of[: len(trace.stack_of)] = np.frombuffer(trace.stack_of, dtype=np.int32)
    return _labels_given(course, [[frames[i] for i in stack] for stack in trace.stacks], stack_of)


def _labels_given(course: Course, stacks: Sequence[Sequence[Frame]], stack_of: Ints) -> Labels:
    given = _given(course)
    category = np.where(given < 0, ALL_CATEGORIES.index("other"), given)
    has_lines = any(is_python(frame) for stack in stacks for frame in stack)
    without = NO_LINE if course.trace.origin == "predicted" else NO_PYTHON
    lines, line = _lines(stacks, stack_of, course.lives.birth != BEFORE, has_lines, without)
    if not has_lines:
        lines, line = ("",), np.zeros(len(category), dtype=np.int64)
    phases = marked_phases(course.trace)
    source, named = ("labels", "marks") if (given >= 0).any() else ("none", "marks")
    if source == "none":
        category[:] = ALL_CATEGORIES.index(UNKNOWN)
    return _labels(course, category, line, lines, phases, source, named if phases else "none", stacks=has_lines)


def labels_of_snapshot(course: Course, snapshot: Snapshot, device: int) -> Labels:
    trace = course.trace
    stack_of = np.frombuffer(snapshot.stack_of[device], dtype=np.int32).astype(np.int64)
    frames = [[snapshot.frame_table[i] for i in stack] for stack in snapshot.stacks]
    phases = marked_phases(trace)
    if phases:
        return _labels_given(course, frames, stack_of)
    work = works(snapshot.stacks, snapshot.frame_table, np.bincount(stack_of, minlength=len(snapshot.stacks)))[stack_of]
    stacks = any(any(is_python(snapshot.frame_table[i]) for i in stack) for stack in snapshot.stacks)
    born = course.lives.birth != BEFORE
    if stacks:
        steps = _optimizer_steps(snapshot.annotations, device)
        phases = derived_phases(course.lives.birth[born], work[born], len(trace), steps)
    given = _given(course)
    derived = _derived(course, work, stack_of, phases, stacks)
    category = np.where(given < 0, derived, given)
    lines, line = _lines(frames, stack_of, born, stacks)
    unknown = ALL_CATEGORIES.index(UNKNOWN)
    source = _SOURCES[bool((given >= 0).any()), bool((derived[given < 0] != unknown).any())]
    return _labels(course, category, line, lines, phases, source, "derived" if phases else "none", stacks=stacks)


def _labels(
    course: Course, category: Ints, line: Ints, lines: Names, phases: tuple[Phase, ...], source: str,
    phase_source: str, *, stacks: bool,
) -> Labels:  # fmt: skip
    trace = course.trace
    names = tuple(trace.names)
    return Labels(
        category=category,
        module=np.frombuffer(trace.module_of, dtype=np.int32).astype(np.int64), modules=names,
        op=np.frombuffer(trace.op_of, dtype=np.int32).astype(np.int64), ops=names,
        line=line, lines=lines, phases=phases, source=source, phase_source=phase_source, stacks=stacks,
    )  # fmt: skip


def _given(course: Course) -> Ints:
    """The category that a block carries; -1 for none, or one that is not known."""
    trace = course.trace
    known = {name: i for i, name in enumerate(CATEGORIES)}
    table = np.array([known.get(name, -1) for name in trace.names], dtype=np.int64)
    return table[np.frombuffer(trace.category_of, dtype=np.int32)]


def _derived(course: Course, work: Ints, stack_of: Ints, phases: tuple[Phase, ...], stacks: bool) -> Ints:
    birth, death = course.lives.birth, course.lives.death
    number = {name: i for i, name in enumerate(ALL_CATEGORIES)}
    category = np.full(len(birth), number[UNKNOWN], dtype=np.int64)
    if not stacks:
        return category
    known = (birth != BEFORE) | (stack_of > 0)  # else there is no stack because recording was off when it was made
    category[known & (work == Work.LOADING)] = number["weights"]
    category[known & (work == Work.OPTIMIZER)] = number["optimizer"]
    category[known & (work == Work.LOSS)] = number["loss"]
    if not phases:
        return category
    born_in = phase_numbers(phases, birth)
    died_in = np.where(death < len(course.trace), phase_numbers(phases, death), len(phases))
    kinds = np.array([*(phase.name for phase in phases), "", ""])
    in_code = (birth != BEFORE) & np.isin(work, (Work.OTHER, Work.LOSS))
    category[in_code & (kinds[died_in] == "backward")] = number["activations"]
    category[in_code & (work == Work.LOSS)] = number["loss"]
    category[(birth != BEFORE) & (kinds[born_in] == "backward") & ~(work == Work.LOADING)] = number["gradients"]
    within = (birth != BEFORE) & (born_in == died_in) & (work != Work.LOSS)
    category[within] = number["temporaries"]
    return category


_SOURCES = {(True, True): "both", (True, False): "labels", (False, True): "derived", (False, False): "none"}


def _optimizer_steps(annotations: tuple[Annotation, ...], device: int) -> list[tuple[int, int]]:
    """torch itself marks them: `Optimizer.step#AdamW.step`."""
    found, begin = [], None
    for each in annotations:
        if each.device == device and each.name.startswith("Optimizer.step#"):
            if each.stage == "START":
                begin = each.event
            elif begin is not None:
                found.append((begin, each.event))
                begin = None
    return found


def _lines(
    frames: Sequence[Sequence[Frame]], stack_of: Ints, born: Bools, stacks: bool, without: str = NO_PYTHON
) -> tuple[Names, Ints]:
    """Of each block its line of code. Those without one are told apart by why they have none."""
    names = {"": 0, BEFORE_RECORDING: 1, without: 2}
    table = np.array([names.setdefault(code_line(stack), len(names)) for stack in frames], dtype=np.int64)
    line = table[stack_of]
    line[(line == 0) & ~born] = names[BEFORE_RECORDING]
    if stacks:
        line[(line == 0) & born] = names[without]
    return tuple(names), line
