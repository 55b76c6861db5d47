"""What is alive at the peak as a flame graph for speedscope.app: stacks weighed by their bytes.

The format: https://github.com/jlfwong/speedscope/wiki/Importing-from-custom-sources
"""

from __future__ import annotations

from typing import Any

from memfit.core.flame import paths
from memfit.core.run import Run


def speedscope_profile(run: Run) -> dict[str, Any]:
    numbers: dict[str, int] = {}
    samples, weights = [], []
    for path, nbytes, _ in paths(run, run.course.lives.alive_at(run.course.peak_event)):
        samples.append([numbers.setdefault(name, len(numbers)) for name in path])
        weights.append(nbytes)
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "exporter": "memfit",
        "name": f"alive at the peak, GPU {run.device} ({run.origin})",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": name} for name in numbers]},
        "profiles": [
            {
                "type": "sampled", "name": "alive at the peak", "unit": "bytes", "startValue": 0,
                "endValue": sum(weights), "samples": samples, "weights": weights,
            }
        ],
    }  # fmt: skip
