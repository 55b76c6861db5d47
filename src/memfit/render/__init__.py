"""Documents as people read them: in a terminal, as Markdown, as a page."""

from __future__ import annotations

DOOR = {
    "pieces": "count time_words",
    "plan": "as_text say_verdict say_why",
    "shown": "Difference FileReport NOT_MODELLED NO_BF16 Renderer Shown diff export renderer_of report stands_in_front",
    "small": "show_watch watch_view",
    "table": "as_csv as_markdown",
}
"""What other rooms may use, by file."""
