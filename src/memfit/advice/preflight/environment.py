"""Variables that guides set to save GPU memory and that do not."""

from __future__ import annotations

import os
from collections.abc import Iterator

from memfit.advice.preflight.finding import Finding, Line
from memfit.advice.preflight.situation import Situation

VARIABLES = Line("settings", "environment")
WITHOUT_EFFECT = ("TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS")


def variables(situation: Situation) -> Iterator[Finding]:
    found = [f"{name}={os.environ[name]}" for name in WITHOUT_EFFECT if os.environ.get(name)]
    if found:
        yield VARIABLES.ok(f"{', '.join(found)}: threads of the host; no effect on GPU memory")
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield VARIABLES.warning(
            "CUDA_LAUNCH_BLOCKING is set: every kernel waits for the one before", "unset CUDA_LAUNCH_BLOCKING"
        )
