"""Whether attention keeps its scores whole: by the kernel that the plan of this very job found for this card.

torch chooses among its kernels by type, head size, mask, grouped heads and card. The plain one, which takes anything,
makes a tensor of every pair of tokens for each head.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from memfit.advice.preflight.finding import Finding, Line
from memfit.advice.preflight.gpu_software import BF16_SINCE, FLASH_SINCE
from memfit.advice.preflight.situation import Situation
from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.planning.predict import Plan

ATTENTION = Line("config", "attention")
FLASH = "flash_attention_2"
PLAIN_SOFTMAX = "aten._safe_softmax.default"
"""Only the plain kernel of torch's attention calls it."""
MUCH = 0.1
"""Of the peak, from which on whole scores are worth a warning."""


def attention(situation: Situation) -> Iterator[Finding]:
    config, workload = situation.asked.config, situation.asked.workload
    said = config.model.attention if config else workload.attention if workload else "sdpa"
    if said == "eager":
        yield ATTENTION.warning(
            "eager: the scores of every pair of tokens are whole tensors, for each head and layer", "attention: sdpa"
        )
    elif said == FLASH:
        yield _of_flash(situation)
    else:
        yield _of_sdpa(situation)


def _of_flash(situation: Situation) -> Finding:
    if find_spec("flash_attn") is None:
        return ATTENTION.failed(f"{FLASH} needs the package flash-attn", "attention: sdpa has flash kernels of its own")
    card = situation.card
    if card.arch < FLASH_SINCE:
        older = f"the {card.name} (compute capability {card.arch[0]}.{card.arch[1]}) is older than Ampere"
        return ATTENTION.failed(f"{FLASH}: {older}, and it stops there", "attention: sdpa")
    return ATTENTION.ok(f"{FLASH} on the {card.name}")


def _of_sdpa(situation: Situation) -> Finding:
    card, first = situation.card, situation.plans.needed()[0]
    largest, at_peak = scores_bytes(first.plan)
    details: dict[str, Any] = {"scores_bytes": largest, "at_peak_bytes": at_peak}
    if not largest:
        return ATTENTION.ok(f"sdpa, by a fused kernel on the {card.name}: scores are never whole", **details)
    found = f"sdpa, by its plain kernel on the {card.name}: scores are whole, {format_bytes(largest)} a layer"
    if at_peak is None or at_peak < MUCH * first.plan.peak.allocated_bytes:
        return ATTENTION.ok(found, **details)
    found += f", {format_bytes(at_peak)} at the peak"
    precision = first.workload.precision
    advice = "a smaller micro-batch, or shorter rows"
    if "bf16" in precision and card.arch < BF16_SINCE:
        advice = "precision amp-fp16: before Ampere no fused kernel takes bf16"
    elif precision == "fp32" and card.arch >= FLASH_SINCE:
        advice = "precision bf16 or amp-bf16: no fused kernel takes grouped heads in fp32"
    return ATTENTION.warning(found, advice, **details)


def scores_bytes(plan: Plan) -> tuple[int, int | None]:
    """Of the largest layer, 0 where a fused kernel runs; and of all layers at the peak, None where they are not among
    what is largest there."""
    trace = plan.trace
    if PLAIN_SOFTMAX not in trace.names:
        return 0, None
    wanted = trace.names.index(PLAIN_SOFTMAX)
    largest = max(size for size, op in zip(trace.requested, trace.op_of, strict=True) if op == wanted)
    at_peak = sum(each.allocated_bytes for each in plan.report.largest if each.op == PLAIN_SOFTMAX)
    return largest, at_peak or None
