"""What the documents on pruning say of memory, and the ladder of the GSA guide: tables, examples, savings.

Those on pruning are about the public Wanda code, which has the whole model on the GPU. GB is 10^9 bytes in the
requirements guide (2 x 6.74 billion is its 14 GB for a 7B) and 2^30 in the debugging guide, whose formula divides by
1024**3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memfit.guides.documents import DEBUGGING, REQUIREMENTS
from memfit.units import GiB

GB = 10**9
Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
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
    QuickReference(
        model="1b", said="LLaMA 1B", weights=2.5, activations=(2, 3), total=(5, 6), smallest="8 GB",
        recommended="12-16 GB",
    ),
    QuickReference(
        model="3b", said="LLaMA 3B", weights=6.5, activations=(4, 5), total=(11, 12), smallest="16 GB",
        recommended="24 GB",
    ),
    QuickReference(
        model="7b", said="LLaMA 7B", weights=14, activations=(6, 8), total=(20, 22), smallest="24 GB",
        recommended="40 GB",
    ),
    QuickReference(
        model="13b", said="LLaMA 13B", weights=26, activations=(8, 10), total=(34, 36), smallest="40 GB",
        recommended="48 GB",
    ),
    QuickReference(
        model="30b", said="LLaMA 30B", weights=60, activations=(12, 15), total=(72, 75), smallest="80 GB",
        recommended="Multi-GPU",
    ),
    QuickReference(
        model="70b", said="LLaMA 70B", weights=140, activations=(20, 25), total=(160, 165), smallest="2x80GB",
        recommended="Multi-GPU",
    ),
)  # fmt: skip


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
        said="80 GB GPU: LLaMA 30B with optimization", model="30b", gpu="80GB", seq_len=1024,
        nsamples=64, note="read as in its 7B example: --seqlen 1024 --nsamples 64",
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
    Claim(
        said="LLaMA 7B on 24 GB: ~22.2 GB, tight", model="7b", gpu="24GB", total=(22.2, 22.2),
        verdict="tight",
    ),
    Claim(
        said="LLaMA 7B on 24 GB with --nsamples 64 --seqlen 1024: ~18.5 GB, safe", model="7b",
        gpu="24GB", seq_len=1024, nsamples=64, total=(18.5, 18.5),
    ),
    Claim(said="LLaMA 13B on 16 GB: fails", model="13b", gpu="16GB", verdict="fails"),
    Claim(
        said="RTX 3060 is the minimum for LLaMA 1B-3B", model="3b", gpu="RTX 3060", smaller="8GB",
    ),
    Claim(
        said="RTX A6000 is the minimum for LLaMA 7B-13B", model="13b", gpu="RTX A6000",
        smaller="40GB",
    ),
    Claim(
        said="LLaMA 30B-70B require several A100 80GB", model="30b", gpu="A100 80GB",
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
