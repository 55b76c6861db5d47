"""A run as a snapshot that torch's own viewer reads.

A recording is written anew from what was read of it: plain types, shared stacks, nothing that it may have held besides.
A prediction is placed by the model of the allocator first. Rules of the viewer: docs of `snapshot_write`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from memfit.core.events import Action, Trace
from memfit.core.placed_snapshot import placed_snapshot
from memfit.core.run import Run
from memfit.core.snapshot import Segment, Snapshot
from memfit.core.snapshot_write import as_json

_DRIVER = {
    Action.SEGMENT_ALLOC: "segment_alloc", Action.SEGMENT_FREE: "segment_free", Action.SEGMENT_MAP: "segment_map",
    Action.SEGMENT_UNMAP: "segment_unmap",
}  # fmt: skip


def viewer_pickle(run: Run) -> bytes:
    return pickle.dumps(viewer_snapshot(run), protocol=4)  # the newest that every version of the viewer reads


def viewer_json(run: Run) -> bytes:
    return as_json(viewer_snapshot(run))


def viewer_snapshot(run: Run) -> dict[str, Any]:
    if run.snapshot is None:
        return placed_snapshot(run.trace, run.config, alloc_conf=run.config.to_text())
    return _rewritten(run.snapshot)


def _rewritten(snapshot: Snapshot) -> dict[str, Any]:
    writer = _Writer(snapshot)
    traces = [list(writer.events(device)) for device in range(len(snapshot.traces))]
    return {
        "segments": [writer.segment(segment) for segment in snapshot.segments],
        "device_traces": traces,
        "allocator_settings": snapshot.settings,
        "external_annotations": [
            {"name": each.name, "stage": each.stage, "device": each.device, "time_us": each.time_us}
            for each in snapshot.annotations
        ],
    }


class _Writer:
    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        frames = [{"filename": f.filename, "line": f.line, "name": f.name} for f in snapshot.frame_table]
        self.stacks = [[frames[i] for i in stack] for stack in snapshot.stacks]
        self.at_end = [self._living(device) for device in range(len(snapshot.traces))]

    def _living(self, device: int) -> dict[int, int]:
        """At the end, which block lies at an address: the last one that was put there."""
        return {address: block for block, address in enumerate(self.snapshot.traces[device].addresses)}

    def events(self, device: int) -> Iterator[dict[str, Any]]:
        trace, times = self.snapshot.traces[device], self.snapshot.times[device]
        labelled = any(trace.category_of)
        for (action, subject), time in zip(trace.events(), times, strict=True):
            if action <= Action.FREE_COMPLETED:
                yield from self._block_events(trace, device, action, subject, time, labelled)
            elif action in _DRIVER or action == Action.OOM:
                yield self._driver_event(trace, device, action, subject, time)
        if labelled:  # the viewer fails on categories unless one of them is this
            yield {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": 0, "category": "unknown"}

    def _block_events(
        self, trace: Trace, device: int, action: int, block: int, time: int, labelled: bool
    ) -> Iterator[dict[str, Any]]:
        event = {
            "addr": trace.addresses[block], "size": trace.requested[block], "stream": trace.streams[block],
            "time_us": time, "frames": self.stacks[self.snapshot.stack_of[device][block]],
        }  # fmt: skip
        if action == Action.ALLOC:
            category = {"category": trace.category(block) or "unknown"} if labelled else {}
            yield {"action": "alloc", **event, **category}
        if action in (Action.FREE, Action.FREE_REQUESTED):
            yield {"action": "free_requested", **event}
        if action in (Action.FREE, Action.FREE_COMPLETED):
            yield {"action": "free_completed", **event}

    def _driver_event(self, trace: Trace, device: int, action: int, number: int, time: int) -> dict[str, Any]:
        address, size, stream = (c[number] for c in (trace.range_addresses, trace.range_sizes, trace.range_streams))
        stack = self.stacks[self.snapshot.range_stack_of[device][number]]
        place = {"device_free": address} if action == Action.OOM else {"addr": address}
        name = "oom" if action == Action.OOM else _DRIVER[Action(action)]
        return {"action": name, **place, "size": size, "stream": stream, "time_us": time, "frames": stack}

    def segment(self, segment: Segment) -> dict[str, Any]:
        blocks = []
        for block in segment.blocks:
            number = self.at_end[segment.device].get(block.address) if block.state != "inactive" else None
            stack = 0 if number is None else self.snapshot.stack_of[segment.device][number]
            blocks.append(
                {
                    "address": block.address, "size": block.size, "requested_size": block.requested_size,
                    "state": block.state, "frames": self.stacks[stack],
                }
            )  # fmt: skip
        used = [block for block in segment.blocks if block.state != "inactive"]
        return {
            "device": segment.device, "address": segment.address, "total_size": segment.total_size,
            "allocated_size": sum(block.size for block in used if block.state == "active_allocated"),
            "active_size": sum(block.size for block in used),
            "requested_size": sum(block.requested_size for block in used), "stream": segment.stream,
            "segment_type": segment.segment_type, "segment_pool_id": segment.pool_id,
            "is_expandable": segment.is_expandable, "frames": [], "blocks": blocks,
        }  # fmt: skip
