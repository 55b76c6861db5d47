"""The end of a training run that does not fit, however small its micro-batch."""

from __future__ import annotations

from memfit.errors import MemfitError


class RanOut(MemfitError):
    """A single row at a time is too much. Checkpoints are as they were."""
