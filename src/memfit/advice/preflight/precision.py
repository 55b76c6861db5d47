"""Types of numbers and kinds of attention against the card and the packages that are here."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from memfit.advice.preflight.finding import Finding, Line
from memfit.advice.preflight.gpu_software import BF16_SINCE, FLASH_SINCE
from memfit.advice.preflight.situation import Situation

PRECISION, ATTENTION = Line("config", "precision"), Line("config", "attention")
FLASH = "flash_attention_2"


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


def attention(situation: Situation) -> Iterator[Finding]:
    config, workload = situation.asked.config, situation.asked.workload
    said = config.model.attention if config else workload.attention if workload else "sdpa"
    if said == "eager":
        yield ATTENTION.warning(
            "eager: the scores of every pair of tokens are whole tensors, for each head and layer", "attention: sdpa"
        )
        return
    if said == FLASH and find_spec("flash_attn") is None:
        yield ATTENTION.failed(f"{FLASH} needs the package flash-attn", "attention: sdpa has flash kernels of its own")
        return
    card = situation.card
    if card.arch < FLASH_SINCE:
        older = f"the {card.name} (compute capability {card.arch[0]}.{card.arch[1]}) is older than Ampere"
        if said == FLASH:
            yield ATTENTION.failed(f"{FLASH}: {older}, and it stops there", "attention: sdpa")
        else:
            yield ATTENTION.ok(f"sdpa; {older}: its memory-efficient kernel runs, not flash")
        return
    if _precision(situation) == "fp32":
        yield ATTENTION.ok(f"{said}; in fp32 its memory-efficient kernel runs, for flash takes 16 bit only")
        return
    yield ATTENTION.ok(f"{said}, with flash kernels on the {card.name}")


def _precision(situation: Situation) -> str:
    config, workload = situation.asked.config, situation.asked.workload
    return config.precision if config else workload.precision if workload else "fp32"
