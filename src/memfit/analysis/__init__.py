"""What a recording says: what was alive at the peak, where and why it was made, what grows, what differs."""

from __future__ import annotations

DOOR = {
    "diff": "diff_files",
    "export": "find_format write_export",
    "files": "Reported files_read looks_like_a_log report_file",
    "labels": "code_line short_path",
    "page": "page_data",
    "plan_report": "Report live_blocks make_report",
    "run": "open_run",
}
"""What other rooms may use, by file."""
