"""Real torch memory snapshots, read safely into traces.

    snapshot = read_snapshot("snapshot.pickle")
    snapshot.warnings                  # said before any number: they change what the numbers mean
    trace = snapshot.traces[0]         # the history of GPU 0, as any other Trace
    snapshot.frames(0, block=17)       # the Python stack that asked for that block, innermost first

What a snapshot is: `segments`, the allocator's blocks at the moment of the dump, always complete; and
`device_traces`, the last `max_entries` events of each device, if recording was on. A block that is in the first
but was born before the second is a row of the trace without an ALLOC event: it is there from the start. Such rows
come first, so that the order of rows is the order of birth; `trace.facts["live_before"]` is their number.

The file is another's: see snapshots/file.py for how it is opened. Here, what came out is checked field by field, at a
fixed depth, by exact types (True is no number) and ranges; fields that are not known are left alone, for each torch
release adds some. Text is kept as text, less what a terminal would obey; whoever writes HTML escapes it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.events import Trace
from memfit.files import no_collector
from memfit.snapshots.file import MAX_BYTES, cannot_read, load_plain
from memfit.snapshots.schema import (
    MAX_DEVICES,
    Frame,
    History,
    Malformed,
    Stacks,
    boolean,
    choice,
    clean,
    integer,
    record,
    records,
    scalar,
)

FORMAT = "memfit.snapshot/1"  # the mark in files that memfit itself wrote
MAX_SIZE = (1 << 60) - 1

_STATES = {
    "active_allocated": "active_allocated",
    "active_pending_free": "active_pending_free",
    "active_awaiting_free": "active_pending_free",  # as torch's docstring has it
    "inactive": "inactive",
}


@dataclass(frozen=True, slots=True)
class SnapshotBlock:
    address: int
    size: int
    requested_size: int  # 0 where the block is free: torch leaves a stale figure there
    state: str  # active_allocated, active_pending_free or inactive


@dataclass(frozen=True, slots=True)
class SnapshotSegment:
    """A range the driver handed out (if expandable: one contiguous mapped part of it), tiled by its blocks."""

    device: int
    address: int
    total_size: int
    stream: int
    segment_type: str  # small or large
    is_expandable: bool
    blocks: tuple[SnapshotBlock, ...] = ()
    pool_id: tuple[int, int] = (0, 0)  # other than (0, 0): a private pool, such as that of a CUDA graph


class Remark(str):
    """A sentence to be said before the numbers, and which kind of trouble it tells of."""

    kind: str

    def __new__(cls, kind: str, text: str) -> Remark:
        made = super().__new__(cls, text)
        made.kind = kind
        return made


@dataclass(frozen=True, slots=True)
class Annotation:
    """Where a `record_function` scope begins or ends: before event `event` of its device's trace."""

    name: str
    stage: str  # START or END
    device: int
    time_us: int
    event: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    segments: tuple[SnapshotSegment, ...]
    traces: tuple[Trace, ...] = field(repr=False)  # one a device, by its index
    settings: dict[str, Any]
    annotations: tuple[Annotation, ...]
    warnings: tuple[Remark, ...]
    times: tuple[array[int], ...] = field(repr=False)  # of each event of each trace, in microseconds; 0 = unknown
    stack_of: tuple[array[int], ...] = field(repr=False)  # of each block of each trace, an index into stacks
    stacks: tuple[tuple[int, ...], ...] = field(repr=False)  # each a tuple of indices into frame_table
    frame_table: tuple[Frame, ...] = field(repr=False)
    range_stack_of: tuple[array[int], ...] = field(repr=False, default=())  # of each driver range of each trace

    def frames(self, device: int, block: int) -> tuple[Frame, ...]:
        """Where the block was asked for, innermost first; empty if no stack was recorded."""
        return tuple(self.frame_table[i] for i in self.stacks[self.stack_of[device][block]])


def read_snapshot(path: str | Path, *, max_bytes: int = MAX_BYTES) -> Snapshot:
    """Read a snapshot that torch wrote: pickle or JSON, gzipped or not, a dict or the older list of segments.

    Raises `InputError` for anything else, quickly and without running any of it.
    """
    raw = load_plain(path, max_bytes=max_bytes)
    try:
        return snapshot_of(raw)
    except Malformed as error:
        hint = "is it a memory snapshot? torch.cuda.memory._dump_snapshot writes them"
        raise cannot_read(path, str(error), hint) from None
    except MemoryError:
        raise cannot_read(path, "it needs more memory than there is") from None


def snapshot_of(raw: Any) -> Snapshot:
    """The same from what `torch.cuda.memory._snapshot()` returns. Raises `Malformed`, a `ValueError`."""
    with no_collector():
        return _snapshot(raw)


def _snapshot(raw: Any) -> Snapshot:
    if type(raw) is list:
        raw = {"segments": raw}
    top = record(raw, "the file")
    if "segments" not in top:
        raise Malformed("it holds no 'segments'")
    stacks = Stacks(ours=_made_by_memfit(top))
    found = list(_segments(top["segments"], stacks))
    traces = records(top.get("device_traces", []), "device_traces", MAX_DEVICES, kind=list)
    devices = max([len(traces), *(segment.device + 1 for segment, _ in found)])
    origin, between = _memfit_part(top, devices)
    histories = [History(stacks, device, between.get(device, ())) for device in range(devices)]
    for device in between:
        histories[device].known_before = _known_before(top["memfit"])
    for device, events in enumerate(traces):
        histories[device].read(events)
    for segment, active in found:
        histories[segment.device].final_state(segment.stream, active)
    settings = _settings(top.get("allocator_settings"))
    for history in histories:
        history.finish(origin, settings)
    times = tuple(history.times for history in histories)
    return Snapshot(
        segments=tuple(segment for segment, _ in found),
        traces=tuple(history.trace for history in histories),
        settings=settings,
        annotations=tuple(_annotations(top.get("external_annotations", []), times)),
        warnings=tuple(_warnings(histories, settings, "allocator_settings" in top)),
        times=times,
        stack_of=tuple(history.stack_of for history in histories),
        stacks=tuple(stacks.stacks),
        frame_table=tuple(stacks.frames),
        range_stack_of=tuple(history.range_stack_of for history in histories),
    )


# -- what lay in memory at the end -----------------------------------------------------------------------------


Active = list[tuple[int, int, bool, int]]
"""Blocks in use: address, requested bytes, whether it awaits its free, stack."""


def _segments(raw: Any, stacks: Stacks) -> Iterator[tuple[SnapshotSegment, Active]]:
    for i, entry in enumerate(records(raw, "segments", 1 << 22)):
        where = f"segments[{i}]"
        address = integer(entry, "address", where, 0, (1 << 64) - 1)
        total = integer(entry, "total_size", where, 0, MAX_SIZE)
        blocks, active = _blocks(entry.get("blocks", []), where, address, stacks)
        if sum(block.size for block in blocks) != total:
            raise Malformed(f"the blocks of {where} do not add up to its 'total_size' {total}")
        segment = SnapshotSegment(
            device=integer(entry, "device", where, 0, MAX_DEVICES - 1, default=0),
            address=address,
            total_size=total,
            stream=integer(entry, "stream", where, -(1 << 63), (1 << 63) - 1, default=0),
            segment_type=choice(entry, "segment_type", where, {"small": "small", "large": "large"}, default="large"),
            is_expandable=boolean(entry, "is_expandable", where),
            blocks=tuple(blocks),
            pool_id=_pool(entry.get("segment_pool_id", (0, 0)), where),
        )
        yield segment, active


def _blocks(raw: Any, where: str, start: int, stacks: Stacks) -> tuple[list[SnapshotBlock], Active]:
    blocks, active, address = [], [], start
    for i, entry in enumerate(records(raw, f"{where}.blocks", 1 << 24)):
        at = f"{where}.blocks[{i}]"
        size = integer(entry, "size", at, 0, MAX_SIZE)
        if integer(entry, "address", at, 0, (1 << 64) - 1, default=address) != address:
            raise Malformed(f"{at} does not begin where the block before it ends")
        state = choice(entry, "state", at, _STATES)
        requested, frames = _asked_for(entry, at, size)
        if state == "inactive":
            requested = 0
        else:
            active.append((address, requested, state == "active_pending_free", stacks.stack(frames, at)))
        blocks.append(SnapshotBlock(address, size, requested, state))
        address += size
    return blocks, active


def _asked_for(entry: dict[str, Any], at: str, size: int) -> tuple[int, Any]:
    """Requested bytes and stack; before torch 2.1 these lay in a `history`."""
    if "history" in entry and "frames" not in entry:
        history = records(entry["history"], f"{at}.history", 1 << 16)
        if history:
            entry = {"requested_size": history[0].get("real_size", size), "frames": history[0].get("frames")}
    return integer(entry, "requested_size", at, 0, MAX_SIZE, default=size), entry.get("frames")


def _pool(raw: Any, where: str) -> tuple[int, int]:
    if type(raw) not in (tuple, list) or len(raw) != 2 or {type(part) for part in raw} != {int}:
        raise Malformed(f"{where} has a 'segment_pool_id' that is not a pair of numbers")
    return raw[0], raw[1]


# -- beside it -------------------------------------------------------------------------------------------------


def _settings(raw: Any) -> dict[str, Any]:
    """One level of plain values, and one dict of them (`roundup_power2_divisions`)."""
    settings: dict[str, Any] = {}
    for key, value in record({} if raw is None else raw, "allocator_settings", 1000).items():
        if type(key) is not str:
            continue
        where = f"allocator_settings[{clean(key)!r}]"
        if type(value) is dict:
            inner = record(value, where, 1000)
            settings[clean(key)] = {clean(k): scalar(v, where) for k, v in inner.items() if type(k) is str}
        elif type(value) not in (list, tuple):
            settings[clean(key)] = scalar(value, where)
    return settings


def _annotations(raw: Any, times: Sequence[array[int]]) -> Iterator[Annotation]:
    for i, entry in enumerate(records(raw, "external_annotations", 1 << 22)):
        where = f"external_annotations[{i}]"
        device = integer(entry, "device", where, 0, MAX_DEVICES - 1, default=0)
        time_us = integer(entry, "time_us", where, 0, (1 << 63) - 1, default=0)
        stage = choice(entry, "stage", where, {"START": "START", "END": "END"})
        name = entry.get("name", "")
        if type(name) is not str:
            raise Malformed(f"{where} has a 'name' that is not text")
        event = bisect_left(times[device], time_us) if device < len(times) else 0
        yield Annotation(clean(name), stage, device, time_us, event)


def _made_by_memfit(top: dict[str, Any]) -> bool:
    part = top.get("memfit")
    return type(part) is dict and type(part.get("format")) is str and part["format"] == FORMAT


def _memfit_part(top: dict[str, Any], devices: int) -> tuple[str, dict[int, Sequence[tuple[int, str | None, int]]]]:
    """What torch's format has no place for: the origin, and the marks (one without a phase: the cache was emptied)."""
    if not _made_by_memfit(top):
        return "measured", {}
    part = top["memfit"]
    origin = choice(part, "origin", "memfit", {"predicted": "predicted", "measured": "measured"})
    device = integer(part, "device", "memfit", 0, max(devices - 1, 0))
    marks = []
    for i, mark in enumerate(records(part.get("marks", []), "memfit.marks", 1 << 22)):
        where = f"memfit.marks[{i}]"
        phase = mark.get("phase")
        if phase is not None and type(phase) is not str:
            raise Malformed(f"{where} has a 'phase' that is not text")
        at = integer(mark, "before", where, 0, MAX_SIZE)
        marks.append((at, phase and clean(phase), integer(mark, "step", where, 0, MAX_SIZE, default=0)))
    return origin, {device: sorted(marks, key=lambda mark: mark[0])} if devices else {}


def _known_before(part: dict[str, Any]) -> dict[int, tuple[str, str, str]]:
    """What a block is that has no beginning in the history; by address, for at its start an address holds one block."""
    known: dict[int, tuple[str, str, str]] = {}
    for i, entry in enumerate(records(part.get("before", []), "memfit.before", 1 << 24)):
        words = [entry.get(key, "") for key in ("category", "op", "module")]
        if {type(word) for word in words} != {str}:
            raise Malformed(f"memfit.before[{i}] has a name that is not text")
        category, op, module = map(clean, words)
        known[integer(entry, "address", f"memfit.before[{i}]", 0, (1 << 64) - 1)] = category, op, module
    return known


# -- what changes the meaning of the numbers -------------------------------------------------------------------


def _warnings(histories: Sequence[History], settings: dict[str, Any], has_settings: bool) -> Iterator[Remark]:
    if not any(len(history.trace) for history in histories):
        how = "record with torch.cuda.memory._record_memory_history(max_entries=100000)"
        yield Remark("empty", f"no history in it: only what was live at the end is known; {how}")
    for history in histories:
        if len(history.trace):
            yield from _history_warnings(history, settings)
    if not has_settings:
        yield Remark("settings", "no allocator settings in it: PyTorch's defaults are assumed")


def _history_warnings(history: History, settings: dict[str, Any]) -> Iterator[Remark]:
    gpu, before = f"GPU {history.device}", history.live_before
    if _overflowed(history, settings):
        full = f"{gpu}: the history is full at {history.recorded:,} events, so older ones were dropped"
        less = f"{before:,} blocks have no beginning in it (record with a larger max_entries)"
        yield Remark("overflowed", f"{full}; {less}")
    elif before:
        live = f"{before:,} blocks have no beginning in the history and count as live from its start"
        yield Remark("late", f"{gpu}: recording began after memory was in use: {live}")
    if history.unknown:
        names = ", ".join(sorted(history.unknown))
        counted = f"{history.unknown_count:,} events"
        yield Remark("unknown", f"{gpu}: {counted} of a kind that memfit does not know were left out: {names}")
    if history.lost_frees:
        lost = f"{history.lost_frees:,} frees"
        yield Remark("gaps", f"{gpu}: {lost} are missing from the history (their memory was handed out again)")
    if history.vanished:
        gone = f"{history.vanished:,} blocks are live in the history but free in the final state"
        yield Remark("truncated", f"{gpu}: the history ends before the snapshot was taken: {gone}")


def _overflowed(history: History, settings: dict[str, Any]) -> bool:
    """New torch says so; older ones keep exactly `max_entries` events, and that is a round number."""
    said = settings.get("trace_alloc_overflowed")
    if type(said) is bool:
        return said
    limit = settings.get("trace_alloc_max_entries")
    if type(limit) is int:
        return history.recorded >= limit
    return history.orphans > 0 and history.recorded >= 1000 and history.recorded % 1000 == 0
