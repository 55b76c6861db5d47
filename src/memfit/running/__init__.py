"""Jobs that really run: planned before, told while they run, measured, explained where they break."""

from __future__ import annotations

DOOR = {"profile": "Profile prepare_suite profile", "prune": "prune", "train": "Trained TrainingRanOut train"}
"""What other rooms may use, by file."""
