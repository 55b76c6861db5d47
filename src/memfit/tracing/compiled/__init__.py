"""torch.compile in a trace: torch's own compiler plans the memory, and the code it writes runs on the traced device."""

from __future__ import annotations

DOOR = {"hooks": "PADS compiling products_padded"}
"""What other rooms may use, by file."""
