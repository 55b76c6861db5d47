"""`memfit serve`: the page, and what it asks of memfit over a local connection."""

from __future__ import annotations

DOOR = {
    "app": "ServeSettings forwarding serve",
}
"""What other rooms may use, by file."""
