"""What a recording says: what was alive at the peak, where and why it was made, what grows, what differs."""

from __future__ import annotations

DOOR = {
    "advice": "Advice WORTH advise gradients_zeroed zeroed_in_place",
    "diff": "diff_files",
    "export": "find_format write_export",
    "page": "RunView draw_plan page_data",
    "report": "ENDINGS Report files_read may_be_recording report_file",
    "run": "open_run",
    "run_folder": "RUN_FILES looks_like_a_log read_result read_run",
    "stacks": "BACKWARD_OF code_line is_own lines_alive short_path",
    "summary": "Moment Summary summarise_plan",
    "verdict": "RANGE Fit Verdict capacity_for card_document fit_card judge limit_note needed_with_room smallest_card",
}
"""What other rooms may use, by file."""
