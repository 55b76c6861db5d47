"""An out-of-memory error as a snapshot has it, and what a memory log knows of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.advice.explaining.cause import Cause
from memfit.advice.explaining.fragmented import Recorded
from memfit.advice.oom_message import SIZES, Oom, Size
from memfit.units import format_bytes, gib

HOLDERS = 6


def oom_of_record(event: Mapping[str, Any]) -> Oom:
    """In the form of a message, each number to the byte."""
    known = {
        "requested": event["requested_bytes"], "free": event["device_free_bytes"],
        "allocated": event["allocated_bytes"], "reserved": event["reserved_bytes"],
        "unallocated": event["cached_bytes"],
    }  # fmt: skip
    sizes: dict[str, Any] = {name: None if value is None else _exact(value) for name, value in known.items()}
    unknown = {name: "a snapshot does not record it" for name in SIZES if sizes.get(name) is None}
    said = f"a request of {format_bytes(event['requested_bytes'])} failed"
    return Oom(form="snapshot", requests_exactly=True, message=said, unknown=unknown, **sizes)


def _exact(nbytes: int) -> Size:
    return Size(format_bytes(nbytes), nbytes, nbytes)


def record_of(event: Mapping[str, Any], settings: Mapping[str, Any]) -> Recorded:
    return Recorded(
        requested_bytes=event["requested_bytes"], cached_bytes=event["cached_bytes"],
        largest_hole_bytes=event["largest_hole_bytes"], expandable=bool(settings.get("expandable_segments")),
    )  # fmt: skip


def holders_of(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Who held memory at that moment, by line of code."""
    return [
        {name: share[name] for name in ("name", "category", "count", "allocated_bytes")}
        for share in event["by_code_line"][:HOLDERS]
    ]


# -- a memory log --------------------------------------------------------------------------------------------------


def cause_of_log(log: Mapping[str, Any]) -> Cause:
    """A log has no message: that the run broke it knows, and how high memory stood."""
    failed = next((point for point in log["checkpoints"] if point["failed"]), None)
    peak = log["peak_bytes"]
    stood = (
        "no GPU figures are in it" if peak is None else f"the peak until then was {gib(peak)}, {log['peak_between']}"
    )
    if failed is None:
        said = f"No out-of-memory error is in this log: no checkpoint failed; {stood.replace(' until then', '')}."
        return Cause(kind="none", sentence=said)
    return Cause(
        kind="no-numbers", certainty="possible",
        sentence=f"The run broke before it reached {failed['name']}; the log does not say why, and {stood}.",
    )  # fmt: skip


def growth_of_log(checkpoints: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Over the rows in their order; None where there is nothing to judge."""
    from memfit.recording.growth import FEWEST, WARM_UP, StepMemory, growth_of

    if len(checkpoints) < FEWEST + WARM_UP:
        return None
    samples = [
        StepMemory(
            step=number, host_bytes=point["cpu_used_bytes"] or 0, allocated_bytes=point["allocated_bytes"],
            reserved_bytes=point["reserved_bytes"], peak_bytes=point["peak_bytes"],
        )
        for number, point in enumerate(checkpoints)
    ]  # fmt: skip
    found = growth_of(samples, capacity_bytes=None, host_bytes=0).to_json()
    return {**found, "runs_out_at_step": None}
