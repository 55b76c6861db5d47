"""A longer trace told from shorter ones: more blocks, more steps, more tokens, other shapes. Each is proved."""

from __future__ import annotations

DOOR = {
    "blocks": "AFTER BEFORE Extension Ints LAST NotRepeating UNITS extend extension with_sizes",
    "reused": "COMPILED COPIES FLUSH REUSED SAID WORKSPACE_BY_RULE joined let_the_last_go_first say sort_frees",
    "shapes": "NotProven Piece Point TooFewPoints filling",
    "steps": "GenerationExtension PAIR last_step traced_tokens with_steps",
    "streams": (
        "Ask CALLER FilledStream NotSeparable Outline RuleAnswer RuleCall SizedStream TracedStream answered filled "
        "stream_of"
    ),
}
"""What other rooms may use, by file."""
