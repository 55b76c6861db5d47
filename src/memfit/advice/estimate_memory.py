"""The function of the guide on pruning requirements, under its own name and with its own keys, predicted."""

from __future__ import annotations

import math
from typing import TypedDict

from memfit.errors import UsageError
from memfit.gpus import find_gpu, list_labels
from memfit.jobs.workload import Workload
from memfit.planning.predict import SAFE_SHARE

GB = 1e9


class GuideEstimate(TypedDict):
    """What the guide's function returns."""

    model: float
    activations: float
    overhead: float
    total: float
    recommended_gpu: float


class Estimate(TypedDict):
    """Its keys and three more."""

    model: float
    activations: float
    overhead: float
    total: float
    recommended_gpu: float | None
    streamed: float
    shape: str
    guide: GuideEstimate


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
    from memfit.advice.llama_shapes import llama_of_size
    from memfit.planning.predict import predict
    from memfit.planning.whole_model_pruning import predict_whole_model_pruning

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
        "guide": guide_estimate(billions, seqlen),
    }


def guide_estimate(model_params_billions: float, seqlen: int = 2048) -> GuideEstimate:
    """The guide's arithmetic, as it stands there."""
    model = model_params_billions * 2
    activations = model_params_billions * 2 * (seqlen / 2048)
    total = model + activations + 1.0
    return {
        "model": model, "activations": activations, "overhead": 1.0, "total": total, "recommended_gpu": total * 1.5,
    }  # fmt: skip


def _checked(billions: object) -> float:
    if isinstance(billions, bool) or not isinstance(billions, (int, float)) or not math.isfinite(billions):
        raise UsageError(f"model_params_billions is a number, not {billions!r}")
    if billions <= 0:
        raise UsageError(f"model_params_billions is {billions:g}: a model has parameters", hint="1.2 is a Llama 1B")
    return float(billions)


def _recommended(needed: int) -> float | None:
    return next((size for size in list_labels() if needed <= SAFE_SHARE * find_gpu(f"{size:g}GB").capacity_bytes), None)
