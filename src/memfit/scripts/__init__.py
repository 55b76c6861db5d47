"""A person's own program, as it is: run on the pretended GPU, stopped after a few steps, and planned."""

from __future__ import annotations

DOOR = {
    "command": "read_command",
    "plan": "trace_script",
    "trials": "Trials try_script",
    "watched": "watch",
}
"""What other rooms may use, by file."""
