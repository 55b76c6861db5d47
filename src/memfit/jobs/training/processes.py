"""How many processes train together."""

from __future__ import annotations

import os

from memfit.errors import UsageError


def processes() -> int:
    """As torchrun says in WORLD_SIZE; one without it."""
    said = os.environ.get("WORLD_SIZE", "1")
    if not said.isdigit() or int(said) < 1:
        raise UsageError(f"WORLD_SIZE is {said!r}, which is no number of processes")
    return int(said)
