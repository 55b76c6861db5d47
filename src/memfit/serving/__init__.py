"""`memfit serve`: the page, and what it asks of memfit over a local connection."""

from __future__ import annotations

DOOR = {
    "server": "forwarding serve",
    "settings": "ServeSettings",
}
"""What other rooms may use, by file."""
