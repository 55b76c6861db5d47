"""memfit for others to ask: a page (`memfit serve`), and tools for coding agents (`memfit mcp`)."""

from __future__ import annotations

DOOR = {
    "agents": "is_answering make_server",
    "app": "ServeSettings forwarding serve",
}
"""What other rooms may use, by file."""
