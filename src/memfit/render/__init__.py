"""Documents as people read them: in a terminal, as Markdown, as a page."""

from __future__ import annotations

DOOR = {
    "pieces": "count time_words",
    "plan": "as_text say_verdict say_why",
    "recorded": "Difference FileReport diff export report",
    "shown": "NOT_MODELLED NO_BF16 Renderer Shown renderer_of stands_in_front",
    "small": "show_watch watch_view",
    "table": "as_csv as_markdown",
}
"""What other rooms may use, by file."""
