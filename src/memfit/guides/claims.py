"""The five documents that memfit answers, and what they say of memory: tables, examples, savings, formulas, a ladder.

Those on pruning are about the public Wanda code, which has the whole model on the GPU. GB is 10^9 bytes in the
requirements guide (2 x 6.74 billion is its 14 GB for a 7B) and 2^30 in the debugging guide, whose formula divides by
1024**3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from memfit.units import GiB

# -- the five documents, by their titles -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    title: str
    name: str
    """What memfit's own texts call it."""
    about: str


DEBUGGING = Document(
    "Memory Debugging Guide",
    "memory debugging guide",
    "An out-of-memory error of the public Wanda code on Llama-3.2-1B, 64 GiB at once, and a memory log.",
)
REQUIREMENTS = Document(
    "Memory Requirements Estimation for Wanda Pruning",
    "requirements guide",
    "What Wanda takes for Llamas of 1B to 70B, and which card is needed: tables, a formula, worked examples.",
)
PROFILING = Document(
    "Memory Profiling Module",
    "profiling guide",
    "Snapshots of a forward pass and a training step of the CS336 models, and the questions (a) to (e) on them.",
)
LORA_7B = Document(
    "Memory Optimization Guide - Baseline 7B Training",
    "7B guide",
    "A LoRA run of Qwen2.5-7B, rank 128, that runs out of 24 GB, and six changes that are to make it fit.",
)
GSA_512M = Document(
    "Memory Optimization Guide",
    "GSA guide",
    "Pre-training GSA-512M on four cards of 44 GB with 256 rows a step, and a ladder of larger micro-batches.",
)
DOCUMENTS = (DEBUGGING, REQUIREMENTS, PROFILING, LORA_7B, GSA_512M)

# -- what the documents on pruning say ---------------------------------------------------------------------------------


GB = 10**9
Range = tuple[float, float]


@dataclass(frozen=True)
class QuickReference:
    """A row of the quick-reference table; sizes in GB, from and to."""

    model: str
    said: str
    weights: float
    activations: Range
    total: Range
    smallest: str
    recommended: str

    @property
    def total_bytes(self) -> tuple[int, int]:
        return in_bytes(self.total, GB)

    @property
    def activations_bytes(self) -> tuple[int, int]:
        return in_bytes(self.activations, GB)


def in_bytes(said: Range, gb: int) -> tuple[int, int]:
    return round(said[0] * gb), round(said[1] * gb)


QUICK_REFERENCE = (
    QuickReference("1b", "LLaMA 1B", 2.5, (2, 3), (5, 6), "8 GB", "12-16 GB"),
    QuickReference("3b", "LLaMA 3B", 6.5, (4, 5), (11, 12), "16 GB", "24 GB"),
    QuickReference("7b", "LLaMA 7B", 14, (6, 8), (20, 22), "24 GB", "40 GB"),
    QuickReference("13b", "LLaMA 13B", 26, (8, 10), (34, 36), "40 GB", "48 GB"),
    QuickReference("30b", "LLaMA 30B", 60, (12, 15), (72, 75), "80 GB", "Multi-GPU"),
    QuickReference("70b", "LLaMA 70B", 140, (20, 25), (160, 165), "2x80GB", "Multi-GPU"),
)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A job that a guide names, with what it says of it. `total` in its GB, from and to; None where it gives none."""

    said: str
    model: str
    guide: str = REQUIREMENTS.name
    gpu: str
    seq_len: int = 2048
    nsamples: int = 128
    total: Range | None = None
    verdict: Literal["fits", "tight", "fails"] = "fits"
    note: str = ""
    smaller: str | None = None
    """Where it calls the card the least that will do: the next smaller one."""

    @property
    def total_bytes(self) -> tuple[int, int] | None:
        return None if self.total is None else in_bytes(self.total, GiB if self.guide == DEBUGGING.name else GB)


DECISIONS = (
    Claim(said="8-12 GB GPU: LLaMA 1B with --seqlen 1024", model="1b", gpu="8GB", seq_len=1024),
    Claim(said="16 GB GPU: LLaMA 1B-3B with default settings", model="3b", gpu="16GB"),
    Claim(said="24 GB GPU: LLaMA 7B with --seqlen 1024", model="7b", gpu="24GB", seq_len=1024),
    Claim(said="40-48 GB GPU: LLaMA 13B with default settings", model="13b", gpu="40GB"),
    Claim(
        said="80 GB GPU: LLaMA 30B with optimization", model="30b", gpu="80GB", seq_len=1024, nsamples=64,
        note="read as in its 7B example: --seqlen 1024 --nsamples 64",
    ),
    Claim(said="Multi-GPU: LLaMA 70B", model="70b", gpu="80GB", verdict="fails"),
)  # fmt: skip
"""Its decision matrix: what to run on which card."""

EXAMPLES = (
    Claim(
        guide=DEBUGGING.name, said="LLaMA 1B by its formula: 4.31 GB", model="1b", gpu="16GB", total=(4.31, 4.31),
        note="the formula itself gives 4.24",
    ),
    Claim(guide=DEBUGGING.name, said="LLaMA 1B on 16 GB: ~5-6 GB, safe", model="1b", gpu="16GB", total=(5, 6)),
    Claim(
        guide=DEBUGGING.name, said="LLaMA 1B-3B on 16 GB: ~5-6 GB, safe", model="3b", gpu="16GB", total=(5, 6),
        note="taken for the 3B",
    ),
    Claim(said="LLaMA 1B on 16 GB: ~5.9 GB, safe", model="1b", gpu="16GB", total=(5.9, 5.9)),
    Claim(said="LLaMA 7B on 24 GB: ~22.2 GB, tight", model="7b", gpu="24GB", total=(22.2, 22.2), verdict="tight"),
    Claim(
        said="LLaMA 7B on 24 GB with --nsamples 64 --seqlen 1024: ~18.5 GB, safe", model="7b",
        gpu="24GB", seq_len=1024, nsamples=64, total=(18.5, 18.5),
    ),
    Claim(said="LLaMA 13B on 16 GB: fails", model="13b", gpu="16GB", verdict="fails"),
    Claim(said="RTX 3060 is the minimum for LLaMA 1B-3B", model="3b", gpu="RTX 3060", smaller="8GB"),
    Claim(said="RTX A6000 is the minimum for LLaMA 7B-13B", model="13b", gpu="RTX A6000", smaller="40GB"),
    Claim(
        said="LLaMA 30B-70B require several A100 80GB", note="taken for the 30B", model="30b", gpu="A100 80GB",
        verdict="fails",
    ),
)  # fmt: skip
"""Its worked examples and hardware recommendations."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What a guide says that a flag takes off the activations; None where it gives no share."""

    said: str
    share: float | None
    seq_len: int = 2048
    nsamples: int = 128
    guide: str = REQUIREMENTS.name
    model: str = "7b"
    """Of its worked example."""


SAVINGS = (
    Saving(said="--seqlen 1024 cuts activation memory by ~50%", share=0.5, seq_len=1024),
    Saving(said="--seqlen 512 cuts activation memory by ~75%", share=0.75, seq_len=512),
    Saving(said="--nsamples 64 reduces calibration memory", share=None, nsamples=64),
    Saving(said="--nsamples 32: further reduction", share=None, nsamples=32),
    Saving(said="--nsamples 64 --seqlen 1024: 7 GB become 3.5 GB", share=0.5, seq_len=1024, nsamples=64),
)


RUNGS = (
    ("Safe", 2, 32, 1024, "60-70 % of the GPU"),
    ("Medium", 3, 21, 1024, "70-80 %, '252 (close to 256)'"),
    ("Aggressive", 4, 16, 1024, "80-90 %, risky"),
    ("Maximum", 2, 32, 1536, "very risky, may run out"),
)
"""The ladder of the GSA guide: name, micro-batch, accumulation, length, what it says; for four GPUs of 44 GB and a
global batch of 256."""


# -- the arithmetic of the two documents on pruning, as it stands there, and where it is off ---------------------------


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
