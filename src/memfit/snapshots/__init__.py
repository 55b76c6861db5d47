"""The files in which torch tells its memory: read without running what they hold, checked, and written."""

from __future__ import annotations

DOOR = {
    "read": "Annotation FORMAT Remark SnapshotSegment Snapshot read_snapshot snapshot_of",
    "schema": "Frame Malformed clean scalar",
    "write": "SEGMENT_ACTIONS as_json block_events driver_event placed_snapshot save_snapshot segment_entry",
}
"""What other rooms may use, by file."""
