"""A trace as a snapshot in torch's own format: a predicted job looks like a recorded one to every reader.

    snapshot = placed_snapshot(trace, config, begin=step_begins(trace, 6))
    save_snapshot(snapshot, "predicted.pickle")

A trace says what was asked for and when, a replay where it was put. PyTorch's viewer (pytorch.org/memory_viz) shows the
past by undoing the events one by one from the final state, so that state is worked out here from the trace: what is
live at its end lies in the segments, and all between is free.
"""

from __future__ import annotations

import json
import pickle
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from memfit.errors import InputError, UsageError
from memfit.events import Action, Trace, between, kept_blocks
from memfit.files import written_whole
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.driver import DriverCall
from memfit.replay.replay import DEFAULTS, replay
from memfit.snapshots.read import FORMAT, SnapshotSegment
from memfit.units import format_bytes

MAX_JSON_BYTES = 1 << 30  # the viewer gives up well before
FRAME_BYTES = 90  # of one frame in JSON, about; it is written anew for each event

SEGMENT_ACTIONS = {
    Action.SEGMENT_ALLOC: "segment_alloc", Action.SEGMENT_FREE: "segment_free",
    Action.SEGMENT_MAP: "segment_map", Action.SEGMENT_UNMAP: "segment_unmap",
}  # fmt: skip


def snapshot_dict(
    trace: Trace,
    segments: Iterable[SnapshotSegment],
    placements: Mapping[int, tuple[int, int]],
    *,
    driver: Iterable[DriverCall] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The trace in torch's snapshot format.

    segments     what is reserved at the end; their blocks are worked out from the trace, not read
    placements   block -> (address, block size); a block that has none was never placed and is left out
    driver       what a replay had the driver do; without it, what the trace itself recorded
    """
    writer = _SnapshotWriter(trace, placements)
    writer.events_of(sorted(driver, key=lambda event: event[0]) if driver is not None else None)
    final = [writer.segment(segment) for segment in sorted(segments, key=attrgetter("address"))]
    writer.check_all_placed()
    return {
        "segments": final,
        "device_traces": [writer.events],
        "allocator_settings": dict(settings or {}),
        "external_annotations": writer.annotations,
        "memfit": {
            "format": FORMAT,
            "origin": trace.origin,
            "device": 0,
            "marks": writer.marks,
            "before": writer.before,
        },
    }


def save_snapshot(snapshot: dict[str, Any], path: str | Path) -> None:
    """As JSON or as pickle, by the name's ending."""
    path = Path(path)
    if path.suffix == ".json":
        data = as_json(snapshot)
    elif path.suffix in (".pickle", ".pkl"):
        data = pickle.dumps(snapshot, protocol=4)  # the newest that every version of the viewer reads
    else:
        raise UsageError(f"cannot tell the format of {str(path)!r}", hint="end its name in .json or .pickle")
    with written_whole(path) as beside:
        beside.write_bytes(data)


def as_json(snapshot: dict[str, Any]) -> bytes:
    frames = sum(len(event.get("frames", ())) for events in snapshot.get("device_traces", ()) for event in events)
    if frames * FRAME_BYTES > MAX_JSON_BYTES:
        raise InputError(
            f"as JSON it would be more than {format_bytes(MAX_JSON_BYTES)}: every event repeats its stack",
            hint="a pickle shares stacks and is small: --to memory-viz, or a name that ends in .pickle",
        )
    return json.dumps(snapshot, separators=(",", ":"), allow_nan=False).encode()


def block_events(action: int, event: dict[str, Any], **of_alloc: Any) -> Iterator[dict[str, Any]]:
    """What torch would record of an event on a block; what only an allocation has comes last."""
    if action == Action.ALLOC:
        yield {"action": "alloc", **event, **of_alloc}
    if action in (Action.FREE, Action.FREE_REQUESTED):
        yield {"action": "free_requested", **event}
    if action in (Action.FREE, Action.FREE_COMPLETED):
        yield {"action": "free_completed", **event}


def driver_event(action: int, address: int, size: int, stream: int, **more: Any) -> dict[str, Any]:
    """`address`: of a failed request, the bytes that were free."""
    name, place = ("oom", "device_free") if action == Action.OOM else (SEGMENT_ACTIONS[Action(action)], "addr")
    return {"action": name, place: address, "size": size, "stream": stream, **more}


def segment_entry(segment: SnapshotSegment, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    used = [block for block in blocks if block["state"] != "inactive"]
    return {
        "device": segment.device, "address": segment.address, "total_size": segment.total_size,
        "allocated_size": sum(block["size"] for block in used if block["state"] == "active_allocated"),
        "active_size": sum(block["size"] for block in used),
        "requested_size": sum(block["requested_size"] for block in used),
        "stream": segment.stream, "segment_type": segment.segment_type, "segment_pool_id": segment.pool_id,
        "is_expandable": segment.is_expandable, "frames": [], "blocks": blocks,
    }  # fmt: skip


class _SnapshotWriter:
    def __init__(self, trace: Trace, placements: Mapping[int, tuple[int, int]]) -> None:
        self.trace, self.placements = trace, placements
        self.events: list[dict[str, Any]] = []
        self.marks: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self._stacks: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
        self._frame = [{"filename": file, "line": line, "name": name} for file, line, name in trace.frames]
        born = {block for action, block in trace.events() if action == Action.ALLOC}
        self._live = {block: "active_allocated" for block in placements if block not in born}
        self.before = [self._what(block) for block in self._live]
        self._layout: list[tuple[int, int, int]] = []  # what is live at the end: address, size, block
        self._written: set[int] = set()

    def events_of(self, driver: list[DriverCall] | None) -> None:
        queue = list(reversed(driver or []))
        for i, (action, subject) in enumerate(self.trace.events()):
            while queue and queue[-1][0] <= i:
                self._driver(i, *queue.pop()[1:])
            if action <= Action.FREE_COMPLETED:
                if subject in self.placements:
                    self._block(i, action, subject)
            elif action == Action.MARK:
                self._mark(i, subject)
            elif action == Action.EMPTY_CACHE:
                self.marks.append({"before": len(self.events)})
            elif driver is None or action == Action.OOM:
                ranges = self.trace.range_addresses, self.trace.range_sizes, self.trace.range_streams
                self._driver(i, Action(action), *(column[subject] for column in ranges))
        for event in reversed(queue):
            self._driver(len(self.trace), *event[1:])
        if self.annotations:
            self.annotations.append({**self.annotations[-1], "stage": "END", "time_us": len(self.trace)})
        self._layout = sorted((*self.placements[block], block) for block in self._live)
        self._one_unknown()

    def _one_unknown(self) -> None:
        """The viewer fails on categories unless one of them is 'unknown'."""
        categories = {event.get("category") for event in self.events} - {None}
        if categories and "unknown" not in categories:
            event = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": len(self.trace)}
            self.events.append({**event, "category": "unknown"})

    def _block(self, i: int, action: int, block: int) -> None:
        trace = self.trace
        if action in (Action.FREE, Action.FREE_COMPLETED):
            self._live.pop(block, None)
        else:
            self._live[block] = "active_allocated" if action == Action.ALLOC else "active_pending_free"
        event = {
            "addr": self.placements[block][0], "size": trace.requested[block], "stream": trace.streams[block],
            "time_us": i, "frames": self._frames(block, None if action == Action.ALLOC else 0),
        }  # fmt: skip
        self.events += block_events(action, event, category=trace.category(block) or "unknown")

    def _driver(self, i: int, action: Action, address: int, size: int, stream: int) -> None:
        self.events.append(driver_event(action, address, size, stream, time_us=i, frames=[]))

    def _mark(self, i: int, number: int) -> None:
        mark = self.trace.marks[number]
        self.marks.append({"before": len(self.events), "phase": mark.phase, "step": mark.step})
        if self.annotations:
            self.annotations.append({**self.annotations[-1], "stage": "END", "time_us": i})
        name = f"{mark.phase} {mark.step}" if mark.step else mark.phase
        self.annotations.append({"name": name, "stage": "START", "device": 0, "time_us": i})

    def _what(self, block: int) -> dict[str, Any]:
        """What no event of the file says of a block that was there before the first one."""
        names = {"category": self.trace.category(block), "op": self.trace.op(block), "module": self.trace.module(block)}
        return {"address": self.placements[block][0], **names}

    def _frames(self, block: int, stack: int | None = None) -> list[dict[str, Any]]:
        """A made-up frame, the module as the file and the op as the function, and below it the lines of code, where
        they were kept. (Of a free nobody knows the line.)"""
        trace = self.trace
        if stack is None:
            stack = trace.stack_of[block] if block < len(trace.stack_of) else 0
        key = trace.module_of[block], trace.op_of[block], stack
        if key not in self._stacks:
            module, op = trace.module(block), trace.op(block)
            lines = [self._frame[i] for i in trace.stacks[stack]]
            made_up = [{"filename": module, "line": 0, "name": op}] if module or op or lines else []
            self._stacks[key] = made_up + lines
        return self._stacks[key]

    # -- the final state -----------------------------------------------------------------------------------------

    def segment(self, segment: SnapshotSegment) -> dict[str, Any]:
        end = segment.address + segment.total_size
        first, last = (bisect_left(self._layout, (edge, 0, 0)) for edge in (segment.address, end))
        blocks: list[dict[str, Any]] = []
        at = segment.address
        for address, size, block in self._layout[first:last]:
            if address < at or address + size > end:
                raise ValueError(f"block {block} overlaps its neighbour or leaves its segment")
            blocks += self._gap(at, address)
            blocks.append(self._used(address, size, block))
            self._written.add(block)
            at = address + size
        blocks += self._gap(at, end)
        return segment_entry(segment, blocks)

    def _used(self, address: int, size: int, block: int) -> dict[str, Any]:
        return {
            "address": address, "size": size, "requested_size": self.trace.requested[block],
            "state": self._live[block], "frames": self._frames(block),
        }  # fmt: skip

    def _gap(self, start: int, end: int) -> list[dict[str, Any]]:
        if start == end:
            return []
        return [{"address": start, "size": end - start, "requested_size": 0, "state": "inactive", "frames": []}]

    def check_all_placed(self) -> None:
        lost = sorted(set(self._live) - self._written)
        if lost:
            raise ValueError(f"block {lost[0]} is live at the end but lies in no segment")


def placed_snapshot(
    trace: Trace, config: AllocatorConfig = DEFAULTS, *, begin: int = 0, alloc_conf: str = ""
) -> dict[str, Any]:
    """The job from event `begin` on, as if the recording had been switched on there."""
    placed = replay(trace, config, places=True)
    assert placed.address is not None
    places = list(zip(placed.address.tolist(), placed.size.tolist(), strict=True))
    kept = kept_blocks(trace, begin, len(trace)).tolist()
    segments = [
        SnapshotSegment(
            0, record.address, record.size, record.stream, "small" if record.small else "large", record.expandable
        )
        for record in placed.segments
    ]
    return snapshot_dict(
        between(trace, begin, len(trace)),
        segments,
        {number: places[block] for number, block in enumerate(kept) if placed.size[block]},
        driver=[(event - begin, *rest) for event, *rest in placed.driver if event >= begin],  # type: ignore[misc]
        settings={
            "PYTORCH_CUDA_ALLOC_CONF": alloc_conf,
            "expandable_segments": config.expandable_segments,
            "max_split_size": config.max_split_size or -1,
            "garbage_collection_threshold": config.garbage_collection_threshold,
        },
    )
