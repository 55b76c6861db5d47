"""Types of numbers against the card."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.advice.preflight.finding import Finding, Line
from memfit.advice.preflight.gpu_software import BF16_SINCE
from memfit.advice.preflight.situation import Situation

PRECISION = Line("config", "precision")


def precision(situation: Situation) -> Iterator[Finding]:
    said = _precision(situation)
    if said == "fp16" and situation.asked.trains:
        yield PRECISION.warning(
            "fp16 weights without a gradient scaler: numbers above 65,504 become inf, and the loss NaN",
            "precision: bf16; or amp-fp16, which keeps fp32 weights and scales the gradients",
        )
        return
    card = situation.card
    major, minor = card.arch
    if "bf16" in said and card.arch < BF16_SINCE:
        yield PRECISION.warning(
            f"{said} on the {card.name} (compute capability {major}.{minor}): only by emulation, many times slower",
            "precision: amp-fp16, which this card computes itself and which scales the gradients",
        )
        return
    yield PRECISION.ok(f"{said}, which the {card.name} computes itself")


def _precision(situation: Situation) -> str:
    config, workload = situation.asked.config, situation.asked.workload
    return config.precision if config else workload.precision if workload else "fp32"
