"""Out of memory: which tensor, why, and what to change."""

from __future__ import annotations

DOOR = {
    "explain": "Explanation explain",
}
"""What other rooms may use, by file."""
