"""Job files of other tools: read as those tools would, planned, and written back with only what must change."""

from __future__ import annotations

DOOR = {"file": "JobFile is_job_file read_job"}
"""What other rooms may use, by file."""
