"""What two guides on training advise, each piece predicted on the guide's own job: a part of docs/levers.md.

Their GB are taken as GiB: both compare them with what `nvidia-smi` shows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.fitting.forecast import Forecast, Forecasts
from memfit.gpus import find_gpu
from memfit.jobs.workload import Workload
from memfit.planning.predict import predict
from memfit.units import GiB

MEASURED = Path(__file__).parent / "measured" / "allocator.jsonl"
SETTINGS = {each.name for each in dataclasses.fields(Workload)}


@dataclass(frozen=True)
class Advice:
    """A change of settings, and the saving that the guide gives for it, in words."""

    said: str
    saves: str
    changes: Mapping[str, Any]
    on: Mapping[str, Any] = field(default_factory=dict)
    """What is changed before it."""


@dataclass(frozen=True)
class Total:
    """A job of the guide, and what the guide says that it takes."""

    said: str
    takes: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Guide:
    title: str
    gpu: str
    workload: Workload
    totals: tuple[Total, ...]
    advice: tuple[Advice, ...]
    no_prediction: tuple[str, ...]
    """Advice that touches nothing on the GPU."""


AFTER = {"batch_size": 1, "grad_accum": 16, "seq_len": 1536}
BOTH = "max_split_size_mb:128,expandable_segments:True"

LORA = Guide(
    "The guide on a 7B LoRA run in 24 GB",
    "RTX 4090",
    Workload(
        kind="lora", model="qwen2.5-7b", precision="fp16", rank=128, seq_len=2048, batch_size=2, grad_accum=8,
        grad_checkpointing=True,
    ),
    (Total("before: 2 x 2048", "25.0", {}), Total("after: 1 x 1536", "20.0", {**AFTER, "alloc_conf": BOTH})),
    (
        Advice("sequence 2048 to 1536", "1.5-2", {"seq_len": 1536}),
        Advice("batch 2 x 8 to 1 x 16", "2-3", {"batch_size": 1, "grad_accum": 16}),
        Advice(f"`{BOTH}`", "0.5-1", {"alloc_conf": BOTH}),
        Advice("gradient checkpointing", "1-2", {"grad_checkpointing": True}, on={"grad_checkpointing": False}),
        Advice("sequence 1536 to 1024", "1-2", {"seq_len": 1024}, on=AFTER),
        Advice("rank 128 to 64", "no figure", {"rank": 64}, on=AFTER),
    ),
    (
        "`TOKENIZERS_PARALLELISM=false` and `OMP_NUM_THREADS=4` (0.2-0.5 GB): threads of the host, nothing on the GPU",
        "`empty_cache()` in a process of its own before the run: it empties that process's cache, not the run's",
    ),
)  # fmt: skip
GSA = Guide(
    "The guide on pre-training GSA on four cards of 44 GB",
    "44GB",
    Workload(
        kind="train", model="gsa-512m-gather", precision="amp-bf16", seq_len=1024, batch_size=2, grad_accum=32,
        grad_checkpointing=True, world_size=4,
    ),
    (
        Total("old: 1 x 1024", "~35", {"batch_size": 1, "grad_accum": 64}),
        Total("current: 2 x 1024", "38-40", {}),
        Total("too aggressive: 8 x 2048", "51+", {"batch_size": 8, "grad_accum": 8, "seq_len": 2048}),
    ),
    (
        Advice("micro-batch 2 to 1", "no figure", {"batch_size": 1, "grad_accum": 64}),
        Advice("fp16 instead of bf16", "slightly", {"precision": "amp-fp16"}),
        Advice("expandable segments", "no figure", {"alloc_conf": "expandable_segments:True"}),
        Advice("gradient checkpointing", "no figure", {"grad_checkpointing": True}, on={"grad_checkpointing": False}),
    ),
    ("weights 7-8 GB and AdamW 14-16 GB for 512M parameters: the model has 184 million, 0.68 and 1.37 GiB in fp32",),
)  # fmt: skip
GUIDES = (LORA, GSA)


def lines() -> Iterator[str]:
    yield "## What two guides advise, checked"
    yield ""
    yield "Each piece of advice on the guide's own job, with checkpointing as there; GiB of what `nvidia-smi` shows."
    yield ""
    for guide in GUIDES:
        yield from _of(guide)
    yield from _measured()


def _of(guide: Guide) -> Iterator[str]:
    card = find_gpu(guide.gpu)
    forecasts = Forecasts(card, margin=0.1)
    yield f"**{guide.title}** ({_gib(card.capacity_bytes)} GiB)"
    yield ""
    yield "| job | the guide says | predicted | |"
    yield "| --- | ---: | ---: | --- |"
    for total in guide.totals:
        found = predicted(guide, forecasts, total.settings)
        yield f"| {total.said} | {total.takes} GB | {_gib(found.device_bytes)} | {found.verdict} |"
    yield ""
    yield "| advice | the guide says it saves | predicted: before | after | saves |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    yield from (row(guide, forecasts, each) for each in guide.advice)
    yield ""
    for why in guide.no_prediction:
        yield f"- {why}"
    yield ""


def row(guide: Guide, forecasts: Forecasts, advice: Advice) -> str:
    before = predicted(guide, forecasts, advice.on).device_bytes
    after = predicted(guide, forecasts, {**advice.on, **advice.changes}).device_bytes
    return f"| {advice.said} | {_said(advice.saves)} | {_gib(before)} | {_gib(after)} | {_gib(before - after)} |"


def predicted(guide: Guide, forecasts: Forecasts, settings: Mapping[str, Any]) -> Forecast:
    return forecasts.of(dataclasses.replace(guide.workload, **settings))


def _measured() -> Iterator[str]:
    yield "**Both allocator settings together, measured on an H200.** A free range of an expandable segment that is"
    yield "larger than the limit is not used for what is smaller than it, so ever more is reserved. GiB at the peak:"
    yield ""
    yield "| job | settings | allocated: predicted, measured | reserved: predicted, measured |"
    yield "| --- | --- | ---: | ---: |"
    for line in MEASURED.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        work = Workload.from_mapping({name: run[name] for name in run if name in SETTINGS})
        peak = predict(work).peak
        yield (
            f"| {work.kind} of {work.model}, {work.batch_size} x {work.seq_len} | {work.alloc_conf or 'none'} "
            f"| {_gib(peak.allocated_bytes)}, {_gib(run['peak_allocated'])} "
            f"| {_gib(peak.reserved_bytes)}, {_gib(run['peak_reserved'])} |"
        )
    yield ""


def _said(saves: str) -> str:
    return f"{saves} GB" if saves[0].isdigit() else saves


def _gib(size: int) -> str:
    return f"{size / GiB:.2f}"
