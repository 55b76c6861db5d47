"""What each block of a run is: its category, module, op and line of code, as columns of numbers into lists of names.

A prediction says it itself. Of a recording, what its stacks and lifetimes show is derived by the same definitions with
which predictions are labelled (docs/concepts.md); the rest is unknown, and called so.

    loading     `nn.Module` and what fills it                                    weights
    optimizer   frames of an optimizer; still alive when it is done              optimizer
    backward    no Python frame: autograd's thread; still alive afterwards       gradients
    otherwise   made by Python code, freed during a backward pass                activations
    all         made and gone within one phase                                   temporaries

What a recorded stack says about the allocation it belongs to: the line of code, and which kind of work it was.

Nothing is guessed from sizes. A stack without a Python frame was made by autograd's own thread, which runs the backward
pass in C++; frames of `torch/optim` are an optimizer's; and so on. What says nothing is `OTHER`.

The phases of a run: as the trace marks them or, in a recording that has no marks, as its stacks show them.

A training step shows itself: memory asked for by Python code, then by autograd's thread, then by an optimizer. Only
what is seen is named. A recording without a backward pass has no phases: nothing tells a forward pass from other code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from memfit.analysis.course import BEFORE, Course, Ints
from memfit.replay.events import CATEGORIES, Action, Trace
from memfit.snapshots.read import Annotation, Snapshot
from memfit.snapshots.schema import Frame, clean

_TORCH = re.compile(r"(?:^|[/\\])torch[/\\]")
_OPTIMIZER = re.compile(r"(?:^|[/\\])(?:torch[/\\]optim|bitsandbytes[/\\]optim|apex[/\\]optimizers)[/\\]")
_AUTOGRAD = re.compile(r"(?:^|[/\\])torch[/\\](?:autograd|utils[/\\]checkpoint\.py)")
_LOSS = re.compile(r"(?:^|[/\\])(?:torch[/\\]nn[/\\]modules[/\\]loss\.py|transformers[/\\]loss[/\\])")
_LOSS_FUNCTIONS = {"cross_entropy", "nll_loss", "mse_loss", "l1_loss", "binary_cross_entropy_with_logits", "kl_div"}
_FUNCTIONAL = re.compile(r"(?:^|[/\\])torch[/\\]nn[/\\]functional\.py$")
_MODULE = re.compile(r"(?:^|[/\\])torch[/\\]nn[/\\](?:modules[/\\]|parameter\.py)")
_MAKING_WEIGHTS = {"__init__", "_apply", "reset_parameters", "load_state_dict", "__new__"}
_LOADING = {"from_pretrained", "_load_pretrained_model", "_load_state_dict_into_meta_model"}
_PYTHON = (".py", ".pyx", ".pyi")


class Work(IntEnum):
    """Which part of a training step asked for memory, as far as its stack tells."""

    OTHER = 0
    BACKWARD = 1
    OPTIMIZER = 2
    LOADING = 3
    LOSS = 4


def is_python(frame: Frame) -> bool:
    return frame.filename.endswith(_PYTHON) or frame.filename.startswith("<")


def code_line(frames: Sequence[Frame]) -> str:
    """Where a person would look: the innermost Python line outside torch, or else the innermost one.

    >>> code_line([Frame("site-packages/torch/nn/functional.py", 9, "linear"), Frame("/home/me/gpt/model.py", 3, "up")])
    'me/gpt/model.py:3 up'
    """
    found = None
    for frame in frames:
        if is_python(frame):
            found = found or frame
            if not _TORCH.search(frame.filename):
                return line_text(frame)
    return line_text(found) if found else ""


def line_text(frame: Frame) -> str:
    return f"{short_path(frame.filename)}:{frame.line} {frame.name}".rstrip()


def short_path(path: str) -> str:
    """From the package on, or the last three parts."""
    path = path.replace("\\", "/")
    for home in ("site-packages/", "dist-packages/"):
        if home in path:
            return path.rpartition(home)[2]
    return "/".join(path.rsplit("/", 3)[-3:]) if path.count("/") > 2 else path


def work_of(frames: Sequence[Frame], *, other_thread: bool = False) -> Work:
    """`other_thread`: the stack does not begin where the program's own stacks begin."""
    python = [frame for frame in frames if is_python(frame)]
    if not python:
        return Work.BACKWARD
    if any(_OPTIMIZER.search(frame.filename) for frame in python):
        return Work.OPTIMIZER
    if other_thread or any(_AUTOGRAD.search(f.filename) and f.name in ("backward", "grad", "apply") for f in python):
        return Work.BACKWARD
    if any(_makes_weights(frame) for frame in python):
        return Work.LOADING
    return Work.LOSS if any(_makes_loss(frame) for frame in python) else Work.OTHER


def _makes_weights(frame: Frame) -> bool:
    return frame.name in _LOADING or (frame.name in _MAKING_WEIGHTS and bool(_MODULE.search(frame.filename)))


def _makes_loss(frame: Frame) -> bool:
    if _LOSS.search(frame.filename):
        return True
    return frame.name in _LOSS_FUNCTIONS and bool(_FUNCTIONAL.search(frame.filename))


def works(
    stacks: Sequence[Sequence[int]], table: Sequence[Frame], count: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Of each stack its `Work`. `count` is how many allocations it has: where most of those stacks end in the
    program's `<module>`, one that does not was made in another thread, by a hook of the backward pass."""
    frames = [[table[i] for i in stack] for stack in stacks]
    rooted = np.array([any(frame.name == "<module>" for frame in each) for each in frames], dtype=bool)
    python = np.array([any(map(is_python, each)) for each in frames], dtype=bool)
    ends_in_module = 2 * int(count[rooted].sum()) > int(count[python].sum())
    return np.array(
        [
            work_of(each, other_thread=ends_in_module and not rooted[i] and bool(python[i]))
            for i, each in enumerate(frames)
        ],
        dtype=np.int64,
    )


NOISE = 3  # that few allocations of one kind between many of another are a part of those


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    step: int
    begin: int  # its first event
    end: int  # and the first that is no longer in it


def marked_phases(trace: Trace) -> tuple[Phase, ...]:
    actions = np.frombuffer(trace.actions, dtype=np.uint8)
    begins = np.flatnonzero(actions == Action.MARK).tolist()
    found = []
    for begin, end in pairwise([*begins, len(trace)]):
        mark = trace.marks[trace.subjects[begin]]
        found.append(Phase(mark.phase, mark.step, begin, end))
    return tuple(found)


def derived_phases(birth: Ints, work: Ints, length: int, steps: Sequence[tuple[int, int]] = ()) -> tuple[Phase, ...]:
    """`birth` and `work` of the allocations that have an event; `steps`: where an optimizer is known to have run."""
    order = np.argsort(birth, kind="stable")
    birth, kind = birth[order], np.where(work[order] == Work.LOSS, Work.OTHER, work[order])
    for begin, end in steps:
        kind[np.searchsorted(birth, begin) : np.searchsorted(birth, end)] = Work.OPTIMIZER
    if not (kind == Work.BACKWARD).any() or (kind == Work.BACKWARD).all():
        return ()
    runs = _without_noise(_runs(kind))
    edges = [int(birth[first]) for _, first, _ in runs]
    edges[0] = 0
    names = [which for which, _, _ in runs]
    return tuple(_numbered(names, [*edges, length]))


def phase_numbers(phases: Sequence[Phase], events: Ints) -> Ints:
    """In which phase each event lies; -1 for before the first."""
    begins = np.array([phase.begin for phase in phases], dtype=np.int64)
    return np.searchsorted(begins, events, side="right") - 1


def _runs(kind: Ints) -> list[tuple[int, int, int]]:
    """(kind, first, how many)"""
    edges = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(kind)]
    return [(int(kind[a]), a, b - a) for a, b in pairwise(edges)]


def _without_noise(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    kept: list[tuple[int, int, int]] = []
    for i, (kind, first, count) in enumerate(runs):
        around = kept[-1] if kept else None
        inside = around is not None and i + 1 < len(runs) and runs[i + 1][0] == around[0] and count < NOISE
        if around is not None and (inside or around[0] == kind):
            kept[-1] = (around[0], around[1], around[2] + count)
        else:
            kept.append((kind, first, count))
    return kept


def _numbered(kinds: Sequence[int], edges: Sequence[int]) -> Iterator[Phase]:
    """A step ends with the optimizer; where none is seen, with the backward pass."""
    last = Work.OPTIMIZER if Work.OPTIMIZER in kinds else Work.BACKWARD
    step = 0 if kinds[0] == Work.LOADING else 1
    for i, kind in enumerate(kinds):
        if i and (kinds[i - 1] == last or (step == 0 and kind != Work.LOADING)):
            step += 1
        yield Phase(_NAMES[kind], step, edges[i], edges[i + 1])


_NAMES = {
    int(Work.OTHER): "forward", int(Work.BACKWARD): "backward", int(Work.OPTIMIZER): "step", int(Work.LOADING): "load",
}  # fmt: skip


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
