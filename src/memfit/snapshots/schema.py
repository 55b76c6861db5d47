"""The checks behind `snapshot`: one field, one stack and one device's history at a time.

Everything is visited at a depth known beforehand and never twice where it is shared: a stack of frames is checked
once and remembered by its identity, which is also what makes a million events load in seconds.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from operator import contains, itemgetter
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from memfit.events import Action, Trace

MAX_DEVICES = 256
MAX_EVENTS = 20_000_000
MAX_FRAMES = 4096  # in one stack
MAX_VISITED = 100_000_000  # frames, over all stacks that are not the same object
MAX_TEXT = 500


class Malformed(ValueError):
    """What is wrong, without the file's name."""


@dataclass(frozen=True, slots=True)
class Frame:
    filename: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}:{self.name}"


# -- one value -------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Text from a stranger: control characters, lone surrogates, direction marks and line separators become U+FFFD."""
    text = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def show(value: Any) -> str:
    """A value in an error message: scalars as they are, of containers only the kind."""
    if type(value) is str:
        return repr(clean(value)[:40])
    return repr(value)[:40] if type(value) in (int, float, bool, type(None)) else f"a {type(value).__name__}"


def record(raw: Any, where: str, limit: int = 1 << 20) -> dict[Any, Any]:
    if type(raw) is not dict:
        raise Malformed(f"{where} is {show(raw)}, not a dict")
    if len(raw) > limit:
        raise Malformed(f"{where} has {len(raw):,} keys")
    return raw


def records(raw: Any, where: str, limit: int, kind: type = dict) -> list[Any]:
    """A list of dicts (or of lists), not longer than any honest one."""
    if type(raw) is not list:
        raise Malformed(f"{where} is {show(raw)}, not a list")
    if len(raw) > limit:
        raise Malformed(f"{where} has {len(raw):,} entries; the limit is {limit:,}")
    if set(map(type, raw)) - {kind}:
        i = next(i for i, entry in enumerate(raw) if type(entry) is not kind)
        raise Malformed(f"{where}[{i}] is {show(raw[i])}, not a {kind.__name__}")
    return raw


def integer(entry: dict[Any, Any], key: str, where: str, low: int, high: int, default: int | None = None) -> int:
    value = entry.get(key, default)
    if value is None and key not in entry:
        raise Malformed(f"{where} has no {key!r}")
    if type(value) is not int or not low <= value <= high:
        raise Malformed(f"{where} has {key!r} = {show(value)}, not a whole number in range")
    return value


def boolean(entry: dict[Any, Any], key: str, where: str) -> bool:
    value = entry.get(key, False)
    if type(value) is not bool:
        raise Malformed(f"{where} has {key!r} = {show(value)}, not true or false")
    return value


def choice(entry: dict[Any, Any], key: str, where: str, known: Mapping[str, str], default: str | None = None) -> str:
    value = entry.get(key, default)
    if type(value) is not str or value not in known:
        raise Malformed(f"{where} has {key!r} = {show(value)}, not one of {', '.join(known)}")
    return known[value]


def scalar(value: Any, where: str) -> str | int | float | bool | None:
    if type(value) is str:
        return clean(value)
    if value is None or type(value) is bool or (type(value) is int and abs(value) < 1 << 64):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    raise Malformed(f"{where} is {show(value)}, not a plain value")


# -- stacks ----------------------------------------------------------------------------------------------------


class Stacks:
    """Every stack and every frame once, whether the file shared them or not."""

    def __init__(self, *, ours: bool) -> None:
        self.ours = ours  # in memfit's own files the first frame of a stack is made up: the module and the op
        self.frames: list[Frame] = []
        self.stacks: list[tuple[int, ...]] = [()]
        self.labels: list[tuple[str, str]] = [("", "")]  # of each stack: op and module
        self._ids: dict[tuple[int, ...], int] = {(): 0}
        self._of_list: dict[int, int] = {id(None): 0}
        self._of_dict: dict[int, int] = {}
        self._of_value: dict[tuple[str, int, str], int] = {}
        self._visited = 0

    def stack(self, raw: Any, where: str) -> int:
        if raw == [] and type(raw) is list:
            return 0
        found = self._of_list.get(id(raw))  # alive as long as the file's content is, so an id is an identity
        return self._new_stack(raw, where) if found is None else found

    def _new_stack(self, raw: Any, where: str) -> int:
        entries = records(raw, f"the frames of {where}", MAX_FRAMES)
        self._visited += len(entries)
        if self._visited > MAX_VISITED:
            raise Malformed(f"it holds more than {MAX_VISITED:,} stack frames")
        known = self._of_dict
        frames = tuple([known[id(e)] if id(e) in known else self._frame(e, where) for e in entries])
        found = self._ids.get(frames)
        if found is None:
            found = self._ids[frames] = len(self.stacks)
            self.stacks.append(frames)
            self.labels.append(self._label(frames))
        self._of_list[id(raw)] = found
        return found

    def _frame(self, raw: dict[Any, Any], where: str) -> int:
        filename, line, name = raw.get("filename", ""), raw.get("line", 0), raw.get("name", "")
        if type(filename) is not str or type(name) is not str:
            raise Malformed(f"a frame of {where} has a 'filename' or 'name' that is not text")
        if type(line) is not int or not -(1 << 31) <= line < 1 << 31:
            raise Malformed(f"a frame of {where} has 'line' = {show(line)}, not a line number")
        found = self._of_value.get((filename, line, name))
        if found is None:
            found = self._of_value[filename, line, name] = len(self.frames)
            self.frames.append(Frame(clean(filename), line, clean(name)))
        self._of_dict[id(raw)] = found
        return found

    def _label(self, stack: tuple[int, ...]) -> tuple[str, str]:
        frames = [self.frames[i] for i in stack]
        if self.ours and (not frames or frames[0].line == 0):
            return (frames[0].name, frames[0].filename) if frames else ("", "")
        for frame in frames:
            if frame.filename.endswith((".py", ".pyx")) or frame.filename.startswith("<"):  # not C++ or "??"
                return f"{frame.filename.replace(chr(92), '/').rpartition('/')[2]}:{frame.line}:{frame.name}", ""
        return "", ""


# -- one device's history --------------------------------------------------------------------------------------

ALLOC, REQUESTED, COMPLETED, _SKIP, _UNKNOWN = range(100, 105)
"""Beside the numbers of `Action`, for what has none of its own."""
_CODES: dict[str, int] = {
    "alloc": ALLOC, "free_requested": REQUESTED, "free_completed": COMPLETED,
    "segment_alloc": Action.SEGMENT_ALLOC, "segment_free": Action.SEGMENT_FREE,
    "segment_map": Action.SEGMENT_MAP, "segment_unmap": Action.SEGMENT_UNMAP, "oom": Action.OOM,
    "snapshot": _SKIP, "annotate": _SKIP,
}  # fmt: skip


class History:
    """Builds one device's `Trace`. Blocks born before the history get negative numbers until `finish`."""

    def __init__(self, stacks: Stacks, device: int, marks: Sequence[tuple[int, str | None, int]] = ()) -> None:
        self.device = device
        self.trace = Trace()
        self.times: array[int] = array("q")
        self.stack_of: array[int] = array("i")
        self.range_stack_of: array[int] = array("i")  # of what the driver did, and of errors
        self.recorded = 0  # entries of the ring buffer, of whatever kind
        self.orphans = 0  # blocks freed in the history but not allocated in it
        self.live_before = 0  # those, and what was live all through
        self.lost_frees = 0
        self.vanished = 0
        self.unknown: set[str] = set()
        self.unknown_count = 0
        self._stacks = stacks
        self._marks = marks
        self._live: dict[int, int] = {}  # address -> block
        self._leaving: dict[int, int] = {}  # the same, between the two halves of a free
        self._before: list[tuple[int, int, int, int]] = []  # requested, stream, address, stack
        self.known_before: dict[int, tuple[str, str, str]] = {}  # address -> category, op, module: memfit's own files

    def read(self, events: list[Any]) -> None:
        where = f"device_traces[{self.device}]"
        records(events, where, MAX_EVENTS)
        self.recorded = len(events)
        columns = _Columns(events, where)
        self.unknown = {clean(name)[:40] for name in islice(columns.unknown, 5)}
        self.unknown_count = columns.unknown_count
        rows = columns.rows()
        at = 0
        for before, phase, step in self._marks:
            self._play(islice(rows, max(before - at, 0)), where)
            at = max(at, before)
            if phase is None:
                self.trace.empty_cache()
            else:
                self.trace.mark(phase, step)
            self.times.append(self.times[-1] if self.times else 0)
        self._play(rows, where)

    def _play(self, rows: Iterable[tuple[int, int, int, int, int, Any, str, str]], where: str) -> None:
        requested = -1  # the address whose free_requested was the last event
        stack, times, actions = self._stacks.stack, self.times, self.trace.actions
        for code, address, size, stream, time, frames, category, label in rows:
            if code == ALLOC:
                self._alloc(address, size, stream, stack(frames, where), category, label)
                requested = -1
            elif code == REQUESTED:
                requested = address if self._request(address, size, stream) else -1
            elif code == COMPLETED:
                if address == requested:
                    del self._leaving[address]
                    actions[-1] = Action.FREE
                else:
                    self._complete(address, size, stream)
                requested = -1
            elif code < ALLOC:
                self.trace.driver(Action(code), address=address, size=size, stream=stream)
                self.range_stack_of.append(stack(frames, where))
                requested = -1
            while len(times) < len(actions):
                times.append(time)

    def _alloc(self, address: int, size: int, stream: int, stack: int, category: str, label: str) -> None:
        """A label of the program's own stands where a module would."""
        trace = self.trace
        if address in self._leaving:
            trace.free_completed(self._leaving.pop(address))
        elif address in self._live:  # its free was not recorded
            self.lost_frees += 1
            trace.free(self._live[address])
        op, module = self._stacks.labels[stack]
        self._live[address] = trace.alloc(
            size, stream=stream, category=category, op=op, module=module or label, address=address
        )
        self.stack_of.append(stack)

    def _request(self, address: int, size: int, stream: int) -> bool:
        if address in self._leaving:  # asked for twice: no allocator does that
            return False
        block = self._live.pop(address, None)
        if block is None:
            block = self._orphan(address, size, stream)
        self._leaving[address] = block
        self.trace.free_requested(block)
        return True

    def _complete(self, address: int, size: int, stream: int) -> None:
        block = self._leaving.pop(address, None)
        if block is not None:
            self.trace.free_completed(block)
            return
        block = self._live.pop(address, None)
        self.trace.free(self._orphan(address, size, stream) if block is None else block)

    def _orphan(self, address: int, size: int, stream: int) -> int:
        """A block of which the history shows only the end. (The stack of a free is not where it was asked for.)"""
        self.orphans += 1
        return self._born_before(address, size, stream, 0)

    def _born_before(self, address: int, size: int, stream: int, stack: int) -> int:
        self._before.append((size, stream, address, stack))
        return -len(self._before)

    def final_state(self, stream: int, active: Iterable[tuple[int, int, bool, int]]) -> None:
        """The blocks of one segment that are in use at the end; those never seen were there from the start."""
        for address, requested, leaving, stack in active:
            seen = self._leaving if leaving else self._live
            if seen.pop(address, None) is None:
                self._born_before(address, requested, stream, stack)

    def finish(self, origin: str, settings: dict[str, Any]) -> None:
        """Put the blocks that were there before first, and number all blocks anew."""
        trace, before = self.trace, self._before
        self.vanished = len(self._live) if len(trace) else 0
        self.live_before = len(before)
        labels = [self.known_before.get(row[2]) or ("", *self._stacks.labels[row[3]]) for row in before]
        trace.requested = array("q", [row[0] for row in before]) + trace.requested
        trace.streams = array("q", [row[1] for row in before]) + trace.streams
        trace.addresses = array("Q", [row[2] for row in before]) + trace.addresses
        for which, column in enumerate(("category_of", "op_of", "module_of")):
            names = array("i", [trace.name_id(label[which]) for label in labels])
            setattr(trace, column, names + getattr(trace, column))
        self.stack_of = array("i", [row[3] for row in before]) + self.stack_of
        if len(trace):
            subjects = np.frombuffer(trace.subjects, dtype=np.int64).copy()
            of_block = np.frombuffer(trace.actions, dtype=np.uint8) <= Action.FREE_COMPLETED
            renumbered = np.where(subjects < 0, -1 - subjects, subjects + len(before))
            trace.subjects = array("q", np.where(of_block, renumbered, subjects).tobytes())
        trace.origin = origin
        trace.facts = {
            "source": "snapshot", "device": self.device, "live_before": len(before), "settings": settings
        }  # fmt: skip


class _Columns:
    """The known fields of all events, each checked as a whole column: set, min and max run at C speed."""

    def __init__(self, events: list[dict[Any, Any]], where: str) -> None:
        self._events, self._where = events, where
        actions = self._column("action")
        if set(map(type, actions)) - {str}:
            self._blame("action", actions, lambda value: type(value) is str, "text")
        known = _CODES
        self.codes = list(map(known.get, actions, repeat(_UNKNOWN)))
        self.unknown = {action for action in set(actions) if action not in known}
        self.unknown_count = self.codes.count(_UNKNOWN) if self.unknown else 0
        self.sizes = self._ints("size", self._column("size"), 0, (1 << 60) - 1)
        self.streams = self._ints("stream", self._column("stream", 0), -(1 << 63), (1 << 63) - 1)
        self.times = self._ints("time_us", self._column("time_us", 0), 0, (1 << 63) - 1)
        self.addresses = self._ints("addr", self._addresses(), 0, (1 << 64) - 1, np.uint64)
        self.frames = self._column("frames", None)
        self.categories = self._texts("category", {"unknown": ""})
        self.labels = self._texts("user_metadata", {})

    def rows(self) -> Any:
        words = (column or [""] * len(self.codes) for column in (self.categories, self.labels))
        return zip(self.codes, self.addresses, self.sizes, self.streams, self.times, self.frames, *words, strict=True)

    def _column(self, key: str, *default: Any) -> list[Any]:
        """Where no default is given, every event must have it."""
        try:
            return list(map(itemgetter(key), self._events))
        except KeyError:
            if default:
                return [e.get(key, *default) for e in self._events]
            i = next(i for i, e in enumerate(self._events) if key not in e)
            raise Malformed(f"{self._where}[{i}] has no {key!r}") from None

    def _addresses(self) -> list[Any]:
        values = self._column("addr", None)
        for i in [i for i, value in enumerate(values) if value is None] if None in values else ():
            if self.codes[i] in (ALLOC, REQUESTED, COMPLETED):
                raise Malformed(f"{self._where}[{i}] has no 'addr'")
            values[i] = self._events[i].get("device_free", 0)  # an oom; others need none
        return values

    def _texts(self, key: str, known: dict[str, str]) -> list[str] | None:
        """Words that some events have: a category that a recorder noted, or what the program said of itself."""
        if not any(map(contains, self._events, repeat(key))):
            return None
        values = self._column(key, "")
        if set(map(type, values)) - {str}:
            values = [value if type(value) is str else "" for value in values]
        cleaned = {value: clean(value) for value in set(values)} | known
        return [cleaned[value] for value in values] if set(cleaned) - {"", *known} else None

    def _ints(self, key: str, values: list[Any], low: int, high: int, kind: type = np.int64) -> list[int]:
        def fine(value: Any) -> bool:
            return type(value) is int and low <= value <= high

        if set(map(type, values)) - {int}:
            self._blame(key, values, fine, "a number in range")
        try:
            column: npt.NDArray[Any] = np.array(values, dtype=kind)
        except OverflowError:
            self._blame(key, values, fine, "a number in range")
        if len(column) and (column.min() < low or column.max() > high):
            self._blame(key, values, fine, "a number in range")
        return values

    def _blame(self, key: str, values: list[Any], fine: Callable[[Any], bool], what: str) -> NoReturn:
        i = next(i for i, value in enumerate(values) if not fine(value))
        raise Malformed(f"{self._where}[{i}] has {key!r} = {show(values[i])}, not {what}")
