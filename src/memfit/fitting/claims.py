"""The two ways to prune, streamed and with the whole model on the card, planned; and what people say of the latter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.errors import MemfitError
from memfit.gpus import Gpu, find_gpu
from memfit.guides.claims import Claim, Saving, pruning_formulas
from memfit.jobs.workload import Workload
from memfit.models.registry import load_config, resolve

if TYPE_CHECKING:
    from memfit.planning.predict import Plan


STREAMED, WHOLE = "streamed", "whole"
Plans = Callable[[Workload, "str | None", "Gpu | None"], "Plan"]
"""`plan_way`, by which each plan is made once."""


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    plan: Plan
    formulas: tuple[dict[str, Any], ...]
    """What people's rules of thumb say of it."""

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.plan.verdict,
            "device_bytes": self.plan.peak.device_bytes,
            "smallest_gpu_bytes": self.plan.smallest_gpu_bytes,
            "guides": list(self.formulas),
        }


def plan_whole_model(work: Workload, gpu: Gpu) -> WholeModel | None:
    """None for other jobs and for other methods than Wanda, whose public code is the one that is planned."""
    if work.kind != "prune" or work.method != "wanda":
        return None
    try:
        plan = plan_way(work, WHOLE, gpu)
    except MemfitError:
        return None
    hidden = getattr(load_config(resolve(work.model)), "hidden_size", 0)
    return WholeModel(plan=plan, formulas=tuple(pruning_formulas(work.settings(), plan.parameters, hidden)))


def plan_way(work: Workload, way: str | None, card: Gpu | None) -> Plan:
    """Jobs other than pruning have one way, None."""
    if way == WHOLE:
        from memfit.planning.pruning import predict_whole_model_pruning

        return predict_whole_model_pruning(work, card)
    from memfit.planning.predict import predict

    return predict(work, gpu=card)


ABOUT = 0.05
"""A guide that writes `~5.9 GB` is right within so much."""
SMALL = "8GB"
"""`memfit prune` is shown on the smallest card that the guides speak of: what is safe there is safe on all of them."""


@dataclass(frozen=True, kw_only=True)
class CheckedClaim:
    """With the public code's way planned on the card that the guide names, and memfit's own."""

    claim: Claim
    card: Gpu
    whole: Plan
    whole_by_default: Plan
    """With the default length and number of windows, where the guide says that less is needed."""
    streamed: Plan
    """With the defaults, on the smallest card, or on the same one where that is too small."""
    streamed_gpu: str
    on_smaller: Plan | None
    """Its way on a smaller card than the one that it calls the least."""

    @property
    def answer(self) -> str:
        """Whether the guide is right, in words."""
        said, found = self.claim.verdict, self.whole.verdict
        if (said == "fails") != (found == "fails"):
            return "wrong: it fails" if found == "fails" else f"wrong: it {_fits(found)}"
        if found == "fails":
            return "right"
        if self.whole is not self.whole_by_default and self.whole_by_default.verdict != "fails":
            return f"not needed: it {_fits(self.whole_by_default.verdict)} as it is"
        if self.on_smaller is not None and self.on_smaller.verdict != "fails":
            return f"too careful: {self.claim.smaller} is enough"
        if said == "tight" and found == "safe":
            return "too careful: it is safe"
        return f"right{self._figure()}{', but it is tight' if said == 'fits' and found == 'tight' else ''}"

    def _figure(self) -> str:
        off = difference(self.whole.peak.device_bytes, self.claim.total_bytes) or 0
        if abs(off) <= ABOUT * self.whole.peak.device_bytes:
            return ""
        return f" that it fits, its figure is too {'low' if off > 0 else 'high'}"

    def to_json(self) -> dict[str, Any]:
        claim = self.claim
        device = self.whole.peak.device_bytes
        said = claim.total_bytes
        return {
            "guide": claim.guide, "said": claim.said, "note": claim.note or None, "model": self.whole.model,
            "gpu": claim.gpu, "capacity_bytes": self.card.capacity_bytes,
            "seq_len": claim.seq_len, "nsamples": claim.nsamples,
            "guide_verdict": claim.verdict, "guide_bytes": None if said is None else list(said),
            "whole_bytes": device, "whole_verdict": self.whole.verdict,
            "whole_by_default_bytes": self.whole_by_default.peak.device_bytes,
            "whole_by_default_verdict": self.whole_by_default.verdict,
            "difference_bytes": difference(device, said), "answer": self.answer,
            "streamed_gpu": self.streamed_gpu, "streamed_bytes": self.streamed.peak.device_bytes,
            "streamed_verdict": self.streamed.verdict,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CheckedSaving:
    """What a flag takes off the activations, by the guide and by two predictions."""

    saving: Saving
    before: Plan
    after: Plan

    def to_json(self) -> dict[str, Any]:
        before, after = beside_weights(self.before), beside_weights(self.after)
        return {
            "guide": self.saving.guide, "said": self.saving.said, "model": self.before.model,
            "seq_len": self.saving.seq_len, "nsamples": self.saving.nsamples, "guide_share": self.saving.share,
            "activations_before_bytes": before, "activations_after_bytes": after, "share": round(1 - after / before, 4),
        }  # fmt: skip


def check_claim(claim: Claim, plans: Plans) -> CheckedClaim:
    card = find_gpu(claim.gpu)
    default = Workload(kind="prune", model=claim.model)
    asked = dataclasses.replace(default, seq_len=claim.seq_len, nsamples=claim.nsamples)
    small = plans(default, STREAMED, find_gpu(SMALL))
    enough = small.verdict == "safe"
    return CheckedClaim(
        claim=claim,
        card=card,
        whole=plans(asked, WHOLE, card),
        whole_by_default=plans(default, WHOLE, card),
        streamed=small if enough else plans(default, STREAMED, card),
        streamed_gpu=SMALL if enough else claim.gpu,
        on_smaller=plans(asked, WHOLE, find_gpu(claim.smaller)) if claim.smaller else None,
    )


def check_saving(saving: Saving, plans: Plans) -> CheckedSaving:
    default = Workload(kind="prune", model=saving.model)
    asked = dataclasses.replace(default, seq_len=saving.seq_len, nsamples=saving.nsamples)
    return CheckedSaving(saving=saving, before=plans(default, WHOLE, None), after=plans(asked, WHOLE, None))


def beside_weights(plan: Plan) -> int:
    """What a guide calls activations: all that is alive at the peak and is no weight."""
    return plan.peak.allocated_bytes - plan.report.breakdown["weights"]


def difference(predicted: int, said: tuple[int, int] | None) -> int | None:
    """How much the prediction lies above the guide's range, or below it; 0 inside."""
    if said is None:
        return None
    least, most = said
    return predicted - most if predicted > most else predicted - least if predicted < least else 0


def _fits(verdict: str | None) -> str:
    return "fits" if verdict == "safe" else "fits tightly"
