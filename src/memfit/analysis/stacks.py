"""Which lines of code made what is alive: what recorded stacks say of a run, and the lines of a person's own files.

By the same definitions with which predictions are labelled (docs/concepts.md); the rest is unknown, and called so.

    loading     `nn.Module` and what fills it                                    weights
    optimizer   frames of an optimizer; still alive when it is done              optimizer
    backward    no Python frame: autograd's thread; still alive afterwards       gradients
    otherwise   made by Python code, freed during a backward pass                activations
    all         made and gone within one phase                                   temporaries

Nothing is guessed from sizes. A stack without a Python frame was made by autograd's own thread, which runs the backward
pass in C++; frames of `torch/optim` are an optimizer's; and so on. What says nothing is `OTHER`.

A training step shows itself: memory asked for by Python code, then by autograd's thread, then by an optimizer. Only
what is seen is named. A recording without a backward pass has no phases: nothing tells a forward pass from other code.

A line of a person's own is the innermost one that no library has: libraries below it are not where they look.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from memfit.analysis.labels import (
    ALL_CATEGORIES,
    UNKNOWN,
    Labels,
    Names,
    Phase,
    make_labels,
    marked_phases,
    phase_numbers,
)
from memfit.events import FrameRow
from memfit.replay.timeline import BEFORE, Ints, Timeline
from memfit.snapshots.schema import Frame, clean

if TYPE_CHECKING:
    from memfit.snapshots.read import Annotation, Snapshot


BEFORE_RECORDING = "(there before the recording)"
NO_PYTHON = "(no Python frame: the backward pass)"
NO_LINE = "(no line of code)"
Bools = npt.NDArray[np.bool_]
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
    elsewhere = (python & ~rooted & ends_in_module).tolist()
    found = [work_of(each, other_thread=other) for each, other in zip(frames, elsewhere, strict=True)]
    return np.array(found, dtype=np.int64)


NOISE = 3  # that few allocations of one kind between many of another are a part of those


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


def labels_of_trace(timeline: Timeline, categories: Names = ALL_CATEGORIES) -> Labels:
    """As the trace itself says. Where no block at all has a known category, all have the last of these."""
    trace = timeline.trace
    frames = [Frame(clean(file), line, clean(name)) for file, line, name in trace.frames]
    stack_of = np.zeros(len(trace.requested), dtype=np.int64)
    stack_of[: len(trace.stack_of)] = np.frombuffer(trace.stack_of, dtype=np.int32)
    lines, line, stacks = _own_lines(timeline, [[frames[i] for i in stack] for stack in trace.stacks], stack_of)
    return make_labels(timeline, None, line, lines, marked_phases(trace), stacks=stacks, categories=categories)


def _own_lines(timeline: Timeline, stacks: Sequence[Sequence[Frame]], stack_of: Ints) -> tuple[Names, Ints, bool]:
    """Of what memfit itself wrote: the lines, of each block its line, and whether any stack has one."""
    if not any(is_python(frame) for stack in stacks for frame in stack):
        return ("",), np.zeros(len(stack_of), dtype=np.int64), False
    without = NO_LINE if timeline.trace.origin == "predicted" else NO_PYTHON
    return (*_lines(stacks, stack_of, timeline.lives.birth != BEFORE, True, without), True)


def labels_of_snapshot(timeline: Timeline, snapshot: Snapshot, device: int) -> Labels:
    trace = timeline.trace
    stack_of = np.frombuffer(snapshot.stack_of[device], dtype=np.int32).astype(np.int64)
    frames = [[snapshot.frame_table[i] for i in stack] for stack in snapshot.stacks]
    phases = marked_phases(trace)
    if phases:
        lines, line, stacks = _own_lines(timeline, frames, stack_of)
        return make_labels(timeline, None, line, lines, phases, stacks=stacks)
    work = works(snapshot.stacks, snapshot.frame_table, np.bincount(stack_of, minlength=len(snapshot.stacks)))[stack_of]
    stacks = any(any(is_python(snapshot.frame_table[i]) for i in stack) for stack in snapshot.stacks)
    born = timeline.lives.birth != BEFORE
    if stacks:
        steps = _optimizer_steps(snapshot.annotations, device)
        phases = derived_phases(timeline.lives.birth[born], work[born], len(trace), steps)
    lines, line = _lines(frames, stack_of, born, stacks)
    derived = _categories(timeline, work, stack_of, phases, stacks)
    return make_labels(timeline, derived, line, lines, phases, stacks=stacks)


def _categories(timeline: Timeline, work: Ints, stack_of: Ints, phases: tuple[Phase, ...], stacks: bool) -> Ints:
    birth, death = timeline.lives.birth, timeline.lives.death
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
    died_in = np.where(death < len(timeline.trace), phase_numbers(phases, death), len(phases))
    kinds = np.array([*(phase.name for phase in phases), "", ""])
    in_code = (birth != BEFORE) & np.isin(work, (Work.OTHER, Work.LOSS))
    category[in_code & (kinds[died_in] == "backward")] = number["activations"]
    category[in_code & (work == Work.LOSS)] = number["loss"]
    category[(birth != BEFORE) & (kinds[born_in] == "backward") & ~(work == Work.LOADING)] = number["gradients"]
    within = (birth != BEFORE) & (born_in == died_in) & (work != Work.LOSS)
    category[within] = number["temporaries"]
    return category


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


# -- the lines of a person's own files --------------------------------------------------------------------------------

BACKWARD_OF = "backward of "
SHOWN = 12
_LIBRARY = re.compile(
    r"^<(?!cell>|stdin>|ipython-input)|[/\\](?:site-packages|dist-packages|lib[/\\]python\d[\d.]*)[/\\]"
)
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class OwnLine:
    """Blocks of one category that one line has made, by itself or in the backward pass of what it did."""

    file: str
    line: int
    code: str
    backward: bool
    category: str
    count: int
    allocated_bytes: int


def is_own(file: str) -> bool:
    """
    >>> is_own("/home/me/train.py"), is_own("/usr/lib/python3.12/runpy.py"), is_own("<frozen runpy>"), is_own("<cell>")
    (True, False, False, True)
    """
    return not _LIBRARY.search(file) and not any(
        file.startswith(folder) and _holds_packages(folder) for folder in sys.path[1:] if folder
    )


@lru_cache
def _holds_packages(folder: str) -> bool:
    """As `pip install --target` fills one, for PYTHONPATH."""
    return any(Path(folder).glob("*.dist-info"))


def lines_alive(timeline: Timeline, labels: Labels, blocks: Ints) -> tuple[OwnLine, ...]:
    """The largest first. What no line of their own has made, a library's workspace for one, is not there."""
    trace = timeline.trace
    if not trace.frames:
        return ()
    places = [_place([trace.frames[i] for i in stack]) for stack in trace.stacks]
    sums: dict[tuple[FrameRow, bool, int], tuple[int, int]] = {}
    column = np.frombuffer(trace.stack_of, dtype=np.int32)
    for block in blocks[blocks < len(column)].tolist():
        frame, backward = places[column[block]]
        if frame is not None:
            key = (frame, backward, int(labels.category[block]))
            count, total = sums.get(key, (0, 0))
            sums[key] = count + 1, total + int(timeline.size[block])
    order = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))[:SHOWN]
    return tuple(
        OwnLine(file, line, code_at(file, line), backward, labels.categories[category], count, total)
        for ((file, line, _), backward, category), (count, total) in order
    )


def _place(frames: Sequence[FrameRow]) -> tuple[FrameRow | None, bool]:
    backward = any(name.startswith(BACKWARD_OF) for _, _, name in frames)
    own = next((frame for frame in frames if is_own(frame[0])), None)
    return (None if own is None else (own[0], first_line(own[0], own[1]), "")), backward


def first_line(file: str, line: int) -> int:
    """Of the statement to which the line belongs, where the file is here."""
    if Path(file).suffix != ".py":
        return line
    linecache.checkcache(file)
    return _first_lines("".join(linecache.getlines(file))).get(line, line)


@lru_cache(maxsize=16)
def _first_lines(text: str) -> dict[int, int]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, int] = {}
    for node in ast.walk(tree):  # from the outside in: an inner statement has the last word
        if isinstance(node, ast.stmt):
            inner = getattr(node, "body", None)
            end = inner[0].lineno - 1 if inner else node.end_lineno or node.lineno
            found |= dict.fromkeys(range(node.lineno, end + 1), node.lineno)
    return found


def code_at(file: str, line: int) -> str:
    """As it stands in the file now; nothing where that is not here."""
    if Path(file).suffix != ".py":
        return ""
    linecache.checkcache(file)
    return linecache.getline(file, line).strip()[:_LONGEST]
