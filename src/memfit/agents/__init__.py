"""memfit as tools for coding agents, over the Model Context Protocol."""

from __future__ import annotations

DOOR = {
    "server": "is_answering make_server",
}
"""What other rooms may use, by file."""
