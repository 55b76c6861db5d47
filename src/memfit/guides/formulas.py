"""The arithmetic of the two documents on pruning, as it stands there, and where it is off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from memfit.guides.documents import DEBUGGING, REQUIREMENTS
from memfit.units import GiB

BYTES = 2
"""They know fp16 only."""


class RuleOfThumb(TypedDict):
    """What `estimate_memory` of the requirements guide returns, in GB of 10^9 bytes."""

    model: float
    activations: float
    overhead: float
    total: float
    recommended_gpu: float


def rule_of_thumb(model_params_billions: float, seqlen: int = 2048) -> RuleOfThumb:
    model = model_params_billions * 2
    activations = model_params_billions * 2 * (seqlen / 2048)
    total = model + activations + 1.0
    return RuleOfThumb(model=model, activations=activations, overhead=1.0, total=total, recommended_gpu=total * 1.5)


def pruning_formulas(workload: Mapping[str, Any], parameters: int, hidden: int) -> list[dict[str, Any]]:
    """Both give the whole model to the GPU, as the public code does."""
    windows, length = int(workload["nsamples"]), int(workload["seq_len"])
    buffer = windows * length * hidden * BYTES / GiB
    return [
        {
            "guide": DEBUGGING.name,
            "formula": "params * 2 / 2^30 + nsamples * seqlen * hidden * 2 / 2^30 + 1",
            "gib": round(parameters * BYTES / GiB + buffer + 1, 3),
            "off": (
                "the public code it is about keeps two such buffers, and its sort takes 49 bytes for each weight of "
                "the largest matrix; memfit keeps one buffer, one block in use and one on its way, and sorts nothing"
            ),
        },
        {
            "guide": REQUIREMENTS.name,
            "formula": "2 * billions + 2 * billions * seqlen / 2048 + 1",
            "gib": round(rule_of_thumb(parameters / 1e9, length)["total"] * 1e9 / GiB, 3),
            "off": (
                "activations do not grow with the parameters: one block's, of a few windows, are there at a time, "
                "whatever the depth; and the hidden states go by nsamples, which it leaves out"
            ),
        },
    ]
