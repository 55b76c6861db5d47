"""`memfit.estimate_memory`: what pruning a Llama of so many billion parameters takes, predicted.

Parameters alone do not tell a shape: a shipped Llama where there is one of about that size, or else a shape between two
of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

from memfit.analysis.verdict import judge
from memfit.errors import UsageError
from memfit.gpus import find_gpu, list_labels
from memfit.guides.claims import RuleOfThumb, rule_of_thumb
from memfit.jobs.workload import Workload
from memfit.models.presets import Preset, presets

GB = 1e9


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

    with llama_of_size(billions * 1e9) as (model, shape):
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


ABOUT = 0.1
"""People call a model of 6.7 billion parameters a 7B, and one of 32.5 a 30B."""
WIDTH, INNER = 128, 256
"""Widths of blocks and of their inner layers are multiples of these in every Llama of 1B and more."""


@contextmanager
def llama_of_size(parameters: float) -> Iterator[tuple[str, str]]:
    """What to give as a model's name, for as long as this is open, and how it was chosen, in words."""
    known = _known()
    nearest = min(known, key=lambda preset: abs(math.log(preset.parameters / parameters)))
    if abs(nearest.parameters - parameters) <= ABOUT * parameters:
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
