"""The commands. Each file parses, calls one function of the library, renders."""

from __future__ import annotations

DOOR = {
    "main": "run",
}
"""What other rooms may use, by file."""
