"""A memory log as a document (memfit.report/1, its `log`): checkpoints, the peak, and between which two it came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from memfit.core.memory_log_file import PRECISION_BYTES, Checkpoint, MemoryLogFile
from memfit.core.run_report import SCHEMA
from memfit.units import format_bytes

MAX_PARTS = 5000


def report_log(log: MemoryLogFile, parts: MemoryLogFile | None = None) -> dict[str, Any]:
    """The log alone, as a report of its own."""
    found = log_part(log, parts)
    peak = log.peak
    reserved = [point.reserved_bytes for point in log.checkpoints if point.reserved_bytes is not None]
    document = {
        "schema": SCHEMA, "origin": "measured", "messages": list(_messages(log, parts)), "device": None,
        "peak": {
            "allocated_bytes": found["peak_bytes"], "reserved_bytes": max(reserved, default=None),
            "requested_bytes": None,
        },
        "at_peak": None if peak is None else {"phase": found["peak_between"], "checkpoint": peak.name},
        "log": found,
        "notes": [
            "measured at checkpoints: what is alive, and where it was made, is not in a memory log",
            f"its figures have three decimals of GiB, so each may be {format_bytes(PRECISION_BYTES)} off",
        ],
    }  # fmt: skip
    document["next"] = list(_next(found))
    return document


def log_part(log: MemoryLogFile, parts: MemoryLogFile | None = None) -> dict[str, Any]:
    points = log.checkpoints
    peak = log.peak
    times = [point.at for point in points if point.at is not None]
    first = min(times, default=None)
    used = [point.cpu_used_bytes for point in points if point.cpu_used_bytes is not None]
    return {
        "checkpoints": [_row(point, first) for point in points],
        "parts": [_row(point, first) for point in (parts.checkpoints if parts else ())[:MAX_PARTS]],
        "peak_bytes": None if peak is None else _most(peak),
        "peak_between": "" if peak is None else _between(points, peak),
        "cpu_peak_bytes": max(used, default=None),
        "seconds": (max(times) - min(times)).total_seconds() if times else None,
    }


def _most(point: Checkpoint) -> int | None:
    return point.allocated_bytes if point.peak_bytes is None else point.peak_bytes


def _between(points: Sequence[Checkpoint], peak: Checkpoint) -> str:
    """A peak at a checkpoint was reached on the way to it."""
    at = points.index(peak)
    if _most(peak) == peak.allocated_bytes:
        return f"at {peak.name}"
    return f"between {points[at - 1].name} and {peak.name}" if at else f"before {peak.name}"


def _row(point: Checkpoint, first: Any) -> dict[str, Any]:
    return {
        "name": point.name, "stage": point.stage, "failed": point.failed,
        "seconds": None if point.at is None else (point.at - first).total_seconds(),
        "allocated_bytes": point.allocated_bytes, "reserved_bytes": point.reserved_bytes,
        "peak_bytes": point.peak_bytes, "cpu_used_bytes": point.cpu_used_bytes,
    }  # fmt: skip


def _messages(log: MemoryLogFile, parts: MemoryLogFile | None) -> Iterator[dict[str, str]]:
    for warning in (*log.warnings, *(parts.warnings if parts else ())):
        yield {"kind": warning.kind, "text": str(warning)}


def _next(found: dict[str, Any]) -> Iterator[str]:
    if found["peak_between"].startswith("between"):
        yield (
            f"record that stretch to see what is alive {found['peak_between']}: "
            "torch.cuda.memory._record_memory_history, then memfit report on the snapshot"
        )
