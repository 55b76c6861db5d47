"""What surrounds a pruning run: options that leave the weights alone, and who is told what meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memfit.errors import UsageError
from memfit.jobs.pruning.result import Prediction
from memfit.jobs.pruning.settings import PruneSettings


@dataclass(frozen=True, kw_only=True)
class Planned:
    """All that a plan of this very run needs to know."""

    settings: PruneSettings
    seqlen: int
    folder: Path
    dtype: str
    budget: int | None
    gpu: str


Predict = Callable[[Planned], Prediction | None]
"""What a plan says of a run. A job does not know how to plan: whoever starts it does."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What surrounds the pruning itself and leaves the weights alone."""

    must_evaluate: bool = False
    """It is an error if there is no text to evaluate on; else there is just no perplexity."""
    eval_dataset: str | None = None
    """By default WikiText-2, or the part of the built-in text that is not calibrated on."""
    eval_windows: int | None = None
    eval_seqlen: int | None = None
    """By default as long as the windows for calibration."""
    eval_dense: bool = True
    """Perplexity before pruning too."""
    zero_shot: bool = False
    cache_dir: str | None = None
    force: bool = False
    results_also_in: str | None = None
    """A second folder for the results without the model."""

    def __post_init__(self) -> None:
        for flag, value, least in (("windows", self.eval_windows, 1), ("seqlen", self.eval_seqlen, 2)):
            if value is not None and value < least:
                raise UsageError(f"--eval-{flag} {value} is not {least} or more")


@dataclass(frozen=True, kw_only=True)
class Progress:
    what: str
    done: int
    total: int
    gpu_peak_bytes: int | None
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Who is told: `say` the lines that scripts look for and the memory log, `remark` what only a person reads."""

    say: Callable[[str], None] = lambda _: None
    remark: Callable[[str], None] = lambda _: None
    progress: Callable[[Progress], None] = lambda _: None
