"""torch.compile in a trace: torch's own compiler plans, and the code that it writes runs on the traced device."""

from __future__ import annotations

DOOR = {"hooks": "PADS compiling products_padded"}
"""What other rooms may use, by file."""
