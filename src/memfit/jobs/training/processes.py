"""The processes that torchrun has started: how many, and whether this is the one that writes and speaks."""

from __future__ import annotations

import os

from memfit.errors import UsageError


def processes() -> int:
    """As torchrun says in WORLD_SIZE; one without it."""
    said = os.environ.get("WORLD_SIZE", "1")
    if not said.isdigit() or int(said) < 1:
        raise UsageError(f"WORLD_SIZE is {said!r}, which is no number of processes")
    return int(said)


def launched() -> bool:
    """By torchrun, or by whatever else says how many there are."""
    return "WORLD_SIZE" in os.environ


def is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"
