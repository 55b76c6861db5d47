"""A machine and a job looked over before the job starts."""

from __future__ import annotations

DOOR = {
    "check": "Checked check",
    "gate": "GateResult gate",
}
"""What other rooms may use, by file."""
