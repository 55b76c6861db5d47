"""What people's guides would have said of a pruning job's memory, and where they are off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.units import GiB

BYTES = 2
"""The guides know fp16 only."""


def pruning_guides(workload: Mapping[str, Any], parameters: int, hidden: int) -> list[dict[str, Any]]:
    """Both give the whole model to the GPU, as the public code does."""
    windows, length = int(workload["nsamples"]), int(workload["seq_len"])
    billions = parameters / 1e9
    buffer = windows * length * hidden * BYTES / GiB
    return [
        {
            "guide": "memory debugging guide",
            "formula": "params * 2 / 2^30 + nsamples * seqlen * hidden * 2 / 2^30 + 1",
            "gib": round(parameters * BYTES / GiB + buffer + 1, 3),
            "off": (
                "the public code it is about keeps two such buffers, and its sort takes 49 bytes for each weight of "
                "the largest matrix; memfit keeps one buffer, one block in use and one on its way, and sorts nothing"
            ),
        },
        {
            "guide": "requirements guide",
            "formula": "2 * billions + 2 * billions * seqlen / 2048 + 1",
            "gib": round((billions * 2 + billions * 2 * length / 2048 + 1) * 1e9 / GiB, 3),
            "off": (
                "activations do not grow with the parameters: one block's, of a few windows, are there at a time, "
                "whatever the depth; and the hidden states go by nsamples, which it leaves out"
            ),
        },
    ]
