"""Pruning with the whole model on the card: what guides say of it, held against its plan and against memfit's own way.

`memfit.estimate_memory` is the function of one of these guides, with predicted figures: what pruning a Llama of so many
billion parameters takes. Parameters alone do not tell a shape: a shipped Llama where there is one of about that size,
or else a shape between two of them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypedDict

from memfit.analysis.verdict import judge
from memfit.errors import MemfitError, UsageError
from memfit.gpus import Gpu, find_gpu, list_labels
from memfit.guides.claims import GB, Claim, RuleOfThumb, Saving, pruning_formulas, rule_of_thumb
from memfit.jobs.workload import Workload
from memfit.models.presets import Preset, presets
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


# -- memfit.estimate_memory --------------------------------------------------------------------------------------------


class Estimate(TypedDict):
    """Keys of the guide's function, plus streamed, shape, guide."""

    model: float
    activations: float
    overhead: float
    total: float
    recommended_gpu: float | None
    streamed: float
    shape: str
    guide: RuleOfThumb


def estimate_memory(model_params_billions: float, seqlen: int = 2048, nsamples: int = 128) -> Estimate:
    """GPU memory for pruning a Llama of so many billion parameters with Wanda, the whole model on the GPU, in GB of
    10^9 bytes, as the guide counts.

    `model` are the weights, `activations` all other tensors at the peak, `overhead` what torch's allocator and CUDA
    itself hold beyond tensors, `total` what nvidia-smi shows, `recommended_gpu` the label of the smallest card of which
    that is at most nine tenths (None where no single card is large enough).

    Further keys: `streamed` is what `memfit prune` takes in all for the same job, `shape` the model that was taken
    (parameters alone do not tell a shape: a shipped Llama within a tenth of that size, or one between two of them),
    `guide` what the guide's own function returns.

    Where the guide is wrong: its activations are two bytes for each parameter, and so grow with depth, of which they do
    not know; they fall with seqlen to nothing, though sorting the scores of the largest matrix takes 49 bytes for each
    of its weights at any length; nsamples is not used at all, though two buffers of nsamples x seqlen hidden states are
    the most of it; and half as much again for a card is a guess, where a tenth to spare is enough for a prediction.
    """
    billions = _checked(model_params_billions)
    from memfit.planning.predict import predict
    from memfit.planning.pruning import predict_whole_model_pruning

    with llama_of_size(billions * GB) as (model, shape):
        work = Workload(kind="prune", model=model, precision="fp16", seq_len=seqlen, nsamples=nsamples)
        whole, streamed = predict_whole_model_pruning(work, None), predict(work)
    weights, peak = whole.report.breakdown["weights"], whole.peak
    return {
        "model": weights / GB,
        "activations": (peak.allocated_bytes - weights) / GB,
        "overhead": (peak.device_bytes - peak.allocated_bytes) / GB,
        "total": peak.device_bytes / GB,
        "recommended_gpu": _recommended(peak.device_bytes),
        "streamed": streamed.peak.device_bytes / GB,
        "shape": shape,
        "guide": rule_of_thumb(billions, seqlen),
    }


def _checked(billions: object) -> float:
    if isinstance(billions, bool) or not isinstance(billions, (int, float)) or not math.isfinite(billions):
        raise UsageError(f"model_params_billions is a number, not {billions!r}")
    if billions <= 0:
        raise UsageError(f"model_params_billions is {billions:g}: a model has parameters", hint="1.2 is a Llama 1B")
    return float(billions)


def _recommended(needed: int) -> float | None:
    cards = ((size, find_gpu(f"{size:g}GB")) for size in list_labels())
    return next((size for size, card in cards if judge(needed, card.capacity_bytes) == "safe"), None)


ABOUT_A_SIZE = 0.1
"""People call a model of 6.7 billion parameters a 7B, and one of 32.5 a 30B."""
WIDTH, INNER = 128, 256
"""Widths of blocks and of their inner layers are multiples of these in every Llama of 1B and more."""


@contextmanager
def llama_of_size(parameters: float) -> Iterator[tuple[str, str]]:
    """What to give as a model's name, for as long as this is open, and how it was chosen, in words."""
    known = _known()
    nearest = min(known, key=lambda preset: abs(math.log(preset.parameters / parameters)))
    if abs(nearest.parameters - parameters) <= ABOUT_A_SIZE * parameters:
        yield nearest.name, f"{nearest.name}, which has {nearest.parameters / 1e9:.2f} billion parameters"
        return
    smaller = [preset for preset in known if preset.parameters < parameters]
    larger = [preset for preset in known if preset.parameters > parameters]
    if not smaller or not larger:
        ends = f"{known[0].parameters / 1e9:.2g} and {known[-1].parameters / 1e9:.0f}"
        raise UsageError(
            f"there is no Llama of {parameters / 1e9:g} billion parameters",
            hint=f"sizes between {ends} billion are known; `memfit plan prune --model FOLDER` takes any config.json",
        )
    with TemporaryDirectory(prefix="memfit-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(between(smaller[-1], larger[0], parameters)), encoding="utf-8")
        yield str(path), f"a shape between {smaller[-1].name} and {larger[0].name}, in width and depth"


def _known() -> list[Preset]:
    """One of each size: the first of several."""
    found: dict[int, Preset] = {}
    for preset in presets():
        if preset.model_type == "llama":
            found.setdefault(preset.parameters, preset)
    return [found[size] for size in sorted(found)]


def between(smaller: Preset, larger: Preset, parameters: float) -> dict[str, Any]:
    """Widths by their geometric mean, as far along as the size is; so many blocks that the size comes out."""
    share = math.log(parameters / smaller.parameters) / math.log(larger.parameters / smaller.parameters)
    nearer = (smaller if share < 0.5 else larger).config

    def mean(name: str, step: int) -> int:
        width: float = smaller.config[name] ** (1 - share) * larger.config[name] ** share
        return max(1, round(width / step)) * step

    head = nearer["hidden_size"] // nearer["num_attention_heads"]
    hidden, inner = mean("hidden_size", WIDTH), mean("intermediate_size", INNER)
    heads = hidden // head
    shares = nearer["num_key_value_heads"] < nearer["num_attention_heads"]
    keys = math.gcd(heads, nearer["num_key_value_heads"]) if shares else heads
    block = 2 * hidden * hidden + 2 * hidden * keys * head + 3 * hidden * inner
    tables = nearer["vocab_size"] * hidden * (1 if nearer["tie_word_embeddings"] else 2)
    layers = max(1, round((parameters - tables) / block))
    return {
        **nearer, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": keys, "head_dim": head, "num_hidden_layers": layers,
    }  # fmt: skip
