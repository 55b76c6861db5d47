"""The one record in the middle: a stream of allocation events.

A job traced without a GPU, the same job recorded on one, and a snapshot from any program all become a `Trace`;
no consumer asks which. It is columnar, because a large job has a million events:

    blocks   one row an allocation: requested bytes, stream, category, op, module, address (0 if modelled)
    events   one row an event: an action and its subject (a block, a mark or a driver range)
    marks    where a phase of a step begins
    stacks   the lines of code that asked for blocks, if they were kept: innermost first, each stack and frame once
    ranges   what the driver was seen to hand out or take back (recorded traces only)

    >>> trace = Trace()
    >>> trace.mark("forward", step=1)
    >>> x = trace.alloc(1000, category="activations", op="aten.mm", module="layers.0.mlp")
    >>> trace.free(x)
    >>> len(trace), trace.requested[x]
    (3, 1000)
"""

from __future__ import annotations

import json
import zipfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.errors import InputError
from memfit.files import written_whole

FORMAT = "memfit.trace/1"
MAX_INFLATED_BYTES = 2 << 30

CATEGORIES = (
    "weights", "gradients", "optimizer", "activations", "loss",
    "calibration", "kv_cache", "temporaries", "workspaces", "other",
)  # fmt: skip

BLOCK_COLUMNS = ("streams", "addresses", "category_of", "op_of", "module_of")
"""What is known of each block beside its size."""
STACKS = "stack_of"
LISTS = "lists"
CARD = "gpu"
"""Of a trace that was saved for a card: the fact of its name."""
"""The fact that says which blocks are lists of pointers, and to what."""
FrameRow = tuple[str, int, str]


class OpCost(NamedTuple):
    """What one call of an op costs. `wide`: its products are in fp32, which have a speed of their own."""

    flops: int
    wide: bool
    moved: int
    over_link: int


class Action(IntEnum):
    ALLOC = 0
    FREE = 1  # requested and completed at once: the ordinary case
    FREE_REQUESTED = 2  # used on another stream: no longer allocated, not yet reusable
    FREE_COMPLETED = 3
    EMPTY_CACHE = 4
    MARK = 5
    SEGMENT_ALLOC = 6  # from here on: what a recording saw the driver do; replay checks, never obeys
    SEGMENT_FREE = 7
    SEGMENT_MAP = 8
    SEGMENT_UNMAP = 9
    OOM = 10


@dataclass(frozen=True, slots=True)
class Mark:
    phase: str
    step: int


@dataclass(slots=True)
class Trace:
    origin: str = "predicted"  # or "measured"
    facts: dict[str, Any] = field(default_factory=dict)  # how it came about; JSON values only

    actions: array[int] = field(default_factory=lambda: array("B"))
    subjects: array[int] = field(default_factory=lambda: array("q"))

    requested: array[int] = field(default_factory=lambda: array("q"))
    streams: array[int] = field(default_factory=lambda: array("q"))
    addresses: array[int] = field(default_factory=lambda: array("Q"))
    category_of: array[int] = field(default_factory=lambda: array("i"))
    op_of: array[int] = field(default_factory=lambda: array("i"))
    module_of: array[int] = field(default_factory=lambda: array("i"))

    range_addresses: array[int] = field(default_factory=lambda: array("Q"))
    range_sizes: array[int] = field(default_factory=lambda: array("q"))
    range_streams: array[int] = field(default_factory=lambda: array("q"))

    stack_of: array[int] = field(default_factory=lambda: array("i"))
    """Of each block its stack, 0 for none; empty where stacks were not kept."""
    stacks: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    frames: list[FrameRow] = field(default_factory=list)
    """File, line and function."""

    marks: list[Mark] = field(default_factory=list)
    names: list[str] = field(default_factory=lambda: [""])
    _name_ids: dict[str, int] = field(default_factory=lambda: {"": 0})
    _stack_ids: dict[tuple[int, ...], int] = field(default_factory=lambda: {(): 0})
    _frame_ids: dict[FrameRow, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.actions)

    def events(self) -> Iterator[tuple[int, int]]:
        return zip(self.actions, self.subjects, strict=True)

    # -- writing ---------------------------------------------------------------------------------------------

    def alloc(
        self, nbytes: int, *, stream: int = 0, category: str = "", op: str = "", module: str = "", address: int = 0
    ) -> int:
        block = len(self.requested)
        self.requested.append(nbytes)
        self.streams.append(stream)
        self.addresses.append(address)
        self.category_of.append(self.name_id(category))
        self.op_of.append(self.name_id(op))
        self.module_of.append(self.name_id(module))
        self._event(Action.ALLOC, block)
        return block

    def free(self, block: int) -> None:
        self._event(Action.FREE, block)

    def free_requested(self, block: int) -> None:
        self._event(Action.FREE_REQUESTED, block)

    def free_completed(self, block: int) -> None:
        self._event(Action.FREE_COMPLETED, block)

    def empty_cache(self) -> None:
        self._event(Action.EMPTY_CACHE, 0)

    def mark(self, phase: str, step: int = 0) -> None:
        self.marks.append(Mark(phase, step))
        self._event(Action.MARK, len(self.marks) - 1)

    def driver(self, action: Action, *, address: int, size: int, stream: int = 0) -> None:
        """What a recording saw happen below the allocator."""
        self.range_addresses.append(address)
        self.range_sizes.append(size)
        self.range_streams.append(stream)
        self._event(action, len(self.range_sizes) - 1)

    def set_category(self, block: int, category: str) -> None:
        self.category_of[block] = self.name_id(category)

    def truncate(self, length: int) -> None:
        """Forget the events from `length` on."""
        del self.actions[length:], self.subjects[length:]

    def name_id(self, name: str) -> int:
        found = self._name_ids.get(name)
        if found is None:
            found = self._name_ids[name] = len(self.names)
            self.names.append(name)
        return found

    def stack_id(self, frames: Sequence[FrameRow]) -> int:
        """A stack, innermost frame first, kept once."""
        ids = []
        for frame in frames:
            found = self._frame_ids.get(frame)
            if found is None:
                found = self._frame_ids[frame] = len(self.frames)
                self.frames.append(frame)
            ids.append(found)
        stack = tuple(ids)
        number = self._stack_ids.get(stack)
        if number is None:
            number = self._stack_ids[stack] = len(self.stacks)
            self.stacks.append(stack)
        return number

    def _event(self, action: int, subject: int) -> None:
        self.actions.append(action)
        self.subjects.append(subject)

    # -- reading ---------------------------------------------------------------------------------------------

    def category(self, block: int) -> str:
        return self.names[self.category_of[block]]

    def op(self, block: int) -> str:
        return self.names[self.op_of[block]]

    def module(self, block: int) -> str:
        return self.names[self.module_of[block]]

    def stack(self, block: int) -> list[FrameRow]:
        """Where a block was asked for, innermost first."""
        number = self.stack_of[block] if block < len(self.stack_of) else 0
        return [self.frames[i] for i in self.stacks[number]]

    # -- from one trace to another ---------------------------------------------------------------------------

    def emptied(self) -> Trace:
        """The same origin, facts, marks, names and stacks; no events and no blocks."""
        return Trace(
            origin=self.origin,
            facts=dict(self.facts),
            marks=list(self.marks),
            names=list(self.names),
            _name_ids=dict(self._name_ids),
            stacks=list(self.stacks),
            frames=list(self.frames),
            _stack_ids=dict(self._stack_ids),
            _frame_ids=dict(self._frame_ids),
        )

    def take_blocks(self, source: Trace, chosen: npt.NDArray[np.int64]) -> None:
        """Blocks of a trace with the same names, all but their sizes."""
        for name in (*BLOCK_COLUMNS, STACKS):
            column = getattr(source, name)
            if name == STACKS:  # what was made last may be a library's own
                column = column + array("i", [0] * (len(source.module_of) - len(column))) if column else None
            if column is not None:
                getattr(self, name).frombytes(np.frombuffer(column, dtype=column.typecode)[chosen].tobytes())

    # -- to disk and back ------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        header = {
            "format": FORMAT, "origin": self.origin, "facts": self.facts, "names": self.names,
            "marks": [[mark.phase, mark.step] for mark in self.marks],
        }  # fmt: skip
        columns = {name: np.frombuffer(getattr(self, name), dtype=kind) for name, kind in _COLUMNS.items()}
        if self.stack_of:
            header |= {"frames": self.frames, "stacks": self.stacks}
            columns[STACKS] = np.frombuffer(self.stack_of, dtype="<i4")
        columns["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
        with written_whole(path) as beside, beside.open("wb") as out:
            np.savez_compressed(out, allow_pickle=False, **columns)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Nothing in the file can run: numbers and JSON only, and a bound on what it may inflate to."""
        try:
            with zipfile.ZipFile(path) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > MAX_INFLATED_BYTES:
                    raise InputError(f"refused to open {str(path)!r}: it would inflate to more than 2 GiB")
            with np.load(path, allow_pickle=False) as columns:
                header = json.loads(columns["header"].tobytes())
                trace = cls(origin=header["origin"], facts=header["facts"])
                for name, kind in _COLUMNS.items():
                    column = columns[name]
                    if column.dtype != np.dtype(kind) or column.ndim != 1:
                        raise ValueError(f"column {name} is {column.dtype}, not {kind}")
                    getattr(trace, name).frombytes(column.tobytes())
                if STACKS in columns:
                    trace.stack_of.frombytes(columns[STACKS].astype("<i4").tobytes())
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']!r}")
            trace.names = [str(name) for name in header["names"]]
            trace._name_ids = {name: i for i, name in enumerate(trace.names)}
            trace.marks = [Mark(str(phase), int(step)) for phase, step in header["marks"]]
            trace.frames = [(str(file), int(line), str(name)) for file, line, name in header.get("frames", [])]
            trace.stacks = [tuple(int(frame) for frame in stack) for stack in header.get("stacks", [[]])]
            trace._check()
        except InputError:
            raise
        except FileNotFoundError as error:
            raise InputError(f"no file {str(path)!r}") from error
        except Exception as error:
            raise InputError(
                f"cannot read trace {str(path)!r}: {error}", hint="memfit writes these; was it cut off?"
            ) from error
        return trace

    def _check(self) -> None:
        """Every index in range, so that no consumer has to ask."""
        blocks, ranges = len(self.requested), len(self.range_sizes)
        same = {len(getattr(self, name)) for name in BLOCK_COLUMNS}
        if same - {blocks} or {len(self.range_addresses), len(self.range_streams)} - {ranges}:
            raise ValueError("columns of unequal length")
        if len(self.actions) != len(self.subjects):
            raise ValueError("columns of unequal length")
        limits = np.array([blocks] * 4 + [1 << 62, len(self.marks)] + [ranges] * 5, dtype=np.int64)
        actions = np.frombuffer(self.actions, dtype=np.uint8)
        subjects = np.frombuffer(self.subjects, dtype=np.int64)
        if len(actions) and (actions.max() >= len(limits) or subjects.min() < 0 or (subjects >= limits[actions]).any()):
            raise ValueError("an event names something that is not there")
        for name in ("category_of", "op_of", "module_of"):
            column = np.frombuffer(getattr(self, name), dtype=np.int32)
            if len(column) and (column.min() < 0 or column.max() >= len(self.names)):
                raise ValueError("a block names something that is not there")
        stacks = np.frombuffer(self.stack_of, dtype=np.int32)
        if len(stacks) and (len(stacks) > blocks or stacks.min() < 0 or stacks.max() >= len(self.stacks)):
            raise ValueError("a block names a stack that is not there")
        if any(not 0 <= frame < len(self.frames) for stack in self.stacks for frame in stack):
            raise ValueError("a stack names a frame that is not there")
        requested = np.frombuffer(self.requested, dtype=np.int64)
        if len(requested) and (requested.min() < 0 or requested.max() >= 1 << 60):
            raise ValueError("a size out of range")


@dataclass(frozen=True, slots=True)
class Refrain:
    """Events on blocks of their own that can be written again, as those of an evaluation are a thousand times."""

    actions: array[int]
    subjects: npt.NDArray[np.int64]
    """Blocks, numbered from its first."""
    of_blocks: dict[str, array[int]]

    @classmethod
    def of(cls, trace: Trace, events: Sequence[tuple[int, int]], blocks: Sequence[tuple[Any, ...]]) -> Refrain:
        """`blocks`: of each its size, stream, category, op, module, and the number of its stack."""
        sizes, streams, categories, ops, modules, stacks = zip(*blocks, strict=True) if blocks else [()] * 6
        columns = {"requested": array("q", sizes), "streams": array("q", streams), STACKS: array("i", stacks)}
        columns["addresses"] = array("Q", [0] * len(blocks))
        for name, each in (("category_of", categories), ("op_of", ops), ("module_of", modules)):
            columns[name] = array("i", map(trace.name_id, each))
        return cls(
            array("B", [action for action, _ in events]),
            np.array([number for _, number in events], dtype=np.int64),
            columns,
        )

    def write(self, trace: Trace) -> int:
        """Returns the number of the first block."""
        first = len(trace.requested)
        trace.stack_of.extend([0] * (first - len(trace.stack_of)))
        trace.actions.extend(self.actions)
        trace.subjects.frombytes((self.subjects + first).tobytes())
        for name, column in self.of_blocks.items():
            getattr(trace, name).extend(column)
        return first


_COLUMNS = {
    "actions": "<u1", "subjects": "<i8", "requested": "<i8", "streams": "<i8", "addresses": "<u8",
    "category_of": "<i4", "op_of": "<i4", "module_of": "<i4",
    "range_addresses": "<u8", "range_sizes": "<i8", "range_streams": "<i8",
}  # fmt: skip


FREES = (Action.FREE, Action.FREE_COMPLETED)


def between(trace: Trace, start: int, end: int) -> Trace:
    """Events from `start` to `end`, as a recording that was switched on and off there would show them. What was live at
    the start has no beginning in it; what had died, and what was not yet born at the end, is not in it at all.

    >>> trace = Trace()
    >>> weights, gone = trace.alloc(100), trace.alloc(200)
    >>> trace.free(gone)
    >>> list(between(trace, 3, 3).requested)
    [100]
    """
    kept = kept_blocks(trace, start, end)
    new_number = np.full(len(trace.requested), -1, dtype=np.int64)
    new_number[kept] = np.arange(len(kept))
    actions = np.frombuffer(trace.actions, dtype=np.uint8)[start:end]
    subjects = np.frombuffer(trace.subjects, dtype=np.int64)[start:end].copy()
    of_blocks = actions <= Action.FREE_COMPLETED
    subjects[of_blocks] = new_number[subjects[of_blocks]]
    out = trace.emptied()
    out.actions.frombytes(actions.tobytes())
    out.subjects.frombytes(subjects.tobytes())
    out.requested.frombytes(np.frombuffer(trace.requested, dtype=np.int64)[kept].tobytes())
    out.take_blocks(trace, kept)
    for name in ("range_addresses", "range_sizes", "range_streams"):
        getattr(out, name).extend(getattr(trace, name))
    return out


def kept_blocks(trace: Trace, start: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Blocks that live in that stretch, in the order of their old numbers."""
    actions = np.frombuffer(trace.actions, dtype=np.uint8)
    subjects = np.frombuffer(trace.subjects, dtype=np.int64)
    kept = np.ones(len(trace.requested), dtype=bool)
    kept[subjects[:start][np.isin(actions[:start], FREES)]] = False
    kept[subjects[end:][actions[end:] == Action.ALLOC]] = False
    return np.flatnonzero(kept)


def step_begins(trace: Trace, step: int) -> int | None:
    """The event at which a step's first phase begins."""
    for event, (action, subject) in enumerate(trace.events()):
        if action == Action.MARK and trace.marks[subject].step == step:
            return event
    return None
