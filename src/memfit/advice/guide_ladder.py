"""The ladder of the guide on GSA pre-training, beside memfit's: what it claims, and what it comes to.

It is predicted as its authors ran it: their own attention, checkpointing, bf16 autocast over fp32 weights.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from memfit.advice.forecast import Forecast, Forecasts
from memfit.advice.global_batch import global_batch_of
from memfit.errors import MemfitError
from memfit.jobs.workload import Workload
from memfit.models.gsa_names import GATHER, is_gsa

RUNGS = (
    ("Safe", 2, 32, 1024, "60-70 % of the GPU"),
    ("Medium", 3, 21, 1024, "70-80 %, '252 (close to 256)'"),
    ("Aggressive", 4, 16, 1024, "80-90 %, risky"),
    ("Maximum", 2, 32, 1536, "very risky, may run out"),
)
"""Name, micro-batch, accumulation, length, what it says; for four GPUs of 44 GB and a global batch of 256."""


@dataclass(frozen=True, kw_only=True)
class GuideRung:
    name: str
    claims: str
    forecast: Forecast
    wrong: tuple[str, ...]
    """Why not to do it."""

    def to_json(self) -> dict[str, Any]:
        work = self.forecast.workload
        return {
            "name": self.name, "claims": self.claims, "micro_batch": work.batch_size, "grad_accum": work.grad_accum,
            "seq_len": work.seq_len, "global_batch": global_batch_of(work), "verdict": self.forecast.verdict,
            "device_bytes": self.forecast.device_bytes, "wrong": list(self.wrong),
        }  # fmt: skip


def guide_ladder(asked: Workload, forecasts: Forecasts) -> tuple[GuideRung, ...]:
    """Only for the model that the guide is about, and the job that it has: 256 rows on four GPUs."""
    if not is_gsa(asked.model) or asked.world_size != 4 or global_batch_of(asked) != 256:
        return ()
    rungs = []
    for name, rows, steps, length, claims in RUNGS:
        work = dataclasses.replace(_as_published(asked), batch_size=rows, grad_accum=steps, seq_len=length)
        try:
            forecast = forecasts.of(work)
        except MemfitError:
            return ()
        rungs.append(GuideRung(name=name, claims=claims, forecast=forecast, wrong=_wrong(asked, work)))
    return tuple(rungs)


def _as_published(asked: Workload) -> Workload:
    return dataclasses.replace(
        asked, model=asked.model.removesuffix(GATHER) + GATHER, precision="amp-bf16", grad_checkpointing=True,
        selective_checkpointing=False, loss="full", offload=(), optimizer="adamw", alloc_conf="",
    )  # fmt: skip


def _wrong(asked: Workload, work: Workload) -> tuple[str, ...]:
    said = []
    if global_batch_of(work) != global_batch_of(asked):
        said.append(f"{global_batch_of(work)} rows a step are not {global_batch_of(asked)}")
    if work.seq_len != asked.seq_len:
        said.append(f"{work.seq_len} tokens are another experiment than {asked.seq_len}")
    return tuple(said)
