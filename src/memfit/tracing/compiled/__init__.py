"""torch.compile in a trace: torch's own compiler plans, and the code that it writes runs on the traced device."""

from __future__ import annotations

DOOR = {
    "hooks": "compiling",
    "padding": "OPERAND PADS products_padded",
    "settings": "compiler_is_set_otherwise graphs_told variables_read",
}
"""What other rooms may use, by file."""
