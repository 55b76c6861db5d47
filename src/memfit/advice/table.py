"""`memfit table`: models against workloads against cards, every figure a prediction.

Two guides end in such a table, and in a matrix of what to run on which card. Theirs were estimated; here each row is
what `memfit plan` says of that job, and each cell what it says of that card. For pruning there are two rows: memfit's
own way, which streams the model, and the public code's, which has all of it on the card.

Not every cell needs a plan of its own. A card that is far smaller than what a job needs fails, and one that is larger
than a card on which it is safe is safe; what lies between is planned on that very card, with its own kernels.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from memfit.advice.guide_claims import DECISIONS, EXAMPLES, QUICK_REFERENCE, Claim, QuickReference
from memfit.errors import MemfitError, UnknownName, UsageError
from memfit.gpus import Gpu, find_gpu
from memfit.jobs.workload import KINDS, Workload
from memfit.models.registry import resolve

if TYPE_CHECKING:
    from memfit.planning.predict import Plan, Verdict

SCHEMA = "memfit.table/1"
MODELS = tuple(row.model for row in QUICK_REFERENCE)
WORKLOADS = ("prune", "lora", "train", "forward", "generate")
GPUS = ("8GB", "12GB", "16GB", "24GB", "40GB", "80GB")
MOST_ROWS = 1000
SETTINGS: dict[str, dict[str, Any]] = {
    "prune": {},
    "lora": {"rank": 16, "grad_checkpointing": True},
    "train": {"optimizer": "adamw-fused", "grad_checkpointing": True},
    "forward": {},
    "generate": {"new_tokens": 128},
}
"""What each workload is planned with, beside one sequence of --seq-len tokens in bf16; a generation ends there."""
STREAMED, WHOLE = "streamed", "whole"
FAR = 1.25
"""Cards choose among kernels whose needs differ by less than this."""
FLASH = (8, 0)
"""From here on every card has fused attention; an older one may need more than a smaller newer one."""
GB = 10**9

OnStep = Callable[[str, int, int], None]
"""What is planned next, and how many of how many steps are done."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A job on a card. `device_bytes` is None where the verdict follows from another card's."""

    verdict: Verdict
    device_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Row:
    workload: Workload
    way: str | None
    plan: Plan
    """Without a card: kernels and context as on the reference card."""
    cells: Mapping[str, Cell]
    guide: QuickReference | None = None

    @property
    def smallest(self) -> str | None:
        return next((name for name, cell in self.cells.items() if cell.verdict != "fails"), None)

    @property
    def recommended(self) -> str | None:
        return next((name for name, cell in self.cells.items() if cell.verdict == "safe"), None)

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        weights = plan.report.breakdown["weights"]
        return {
            "model": plan.model, "parameters": plan.parameters, "workload": self.workload.kind, "way": self.way,
            "settings": self.workload.settings(),
            "weights_bytes": weights, "activations_bytes": plan.peak.allocated_bytes - weights,
            "total_bytes": plan.peak.device_bytes, "smallest_bytes": plan.smallest_gpu_bytes,
            "breakdown": plan.report.breakdown,
            "cells": {name: dataclasses.asdict(cell) for name, cell in self.cells.items()},
            "smallest_gpu": self.smallest, "recommended_gpu": self.recommended,
            "guide": None if self.guide is None else _beside(self.guide, plan),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A claim of a guide with both ways planned on the card that it names."""

    claim: Claim
    card: Gpu
    whole: Plan
    whole_by_default: Plan
    """With the default length and number of windows, where the guide says that less is needed."""
    streamed: Plan
    """With the defaults."""

    def to_json(self) -> dict[str, Any]:
        claim = self.claim
        device = self.whole.peak.device_bytes
        return {
            "guide": claim.guide, "said": claim.said, "note": claim.settings or None, "model": self.whole.model,
            "gpu": claim.gpu, "capacity_bytes": self.card.capacity_bytes,
            "seq_len": claim.seq_len, "nsamples": claim.nsamples,
            "guide_verdict": claim.verdict, "guide_bytes": _bytes(claim.total),
            "whole_bytes": device, "whole_verdict": self.whole.verdict,
            "whole_by_default_bytes": self.whole_by_default.peak.device_bytes,
            "whole_by_default_verdict": self.whole_by_default.verdict,
            "difference_bytes": _difference(device, claim.total),
            "streamed_bytes": self.streamed.peak.device_bytes, "streamed_verdict": self.streamed.verdict,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Table:
    seq_len: int
    nsamples: int
    cards: Mapping[str, Gpu]
    rows: tuple[Row, ...]
    decisions: tuple[Checked, ...]
    examples: tuple[Checked, ...]
    left_out: tuple[str, ...]
    """Jobs that cannot be planned, and why."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """memfit.table/1"""
        return {
            "schema": SCHEMA, "seq_len": self.seq_len, "nsamples": self.nsamples,
            "gpus": [
                {"label": label, "name": card.name, "capacity_bytes": card.capacity_bytes}
                for label, card in self.cards.items()
            ],
            "rows": [row.to_json() for row in self.rows],
            "matrix": [self._decision(label) for label in self.cards],
            "guide_matrix": [each.to_json() for each in self.decisions],
            "guide_examples": [each.to_json() for each in self.examples],
            "notes": list(self.notes()), "seconds": round(self.seconds, 3),
        }  # fmt: skip

    def notes(self) -> Iterator[str]:
        yield "predicted, not measured; total is what nvidia-smi shows at the peak, kernels and context as on the H200"
        yield "activations are all that is alive at the peak beside weights"
        yield "smallest: the first card on which the job fits; recommended: the first with a tenth to spare"
        if any(row.guide for row in self.rows):
            yield "the guide's GB are 10^9 bytes, and are about the whole model on the card"
        yield from (f"left out: {why}" for why in self.left_out)

    def _decision(self, label: str) -> dict[str, Any]:
        """The largest model that is safe on a card, for each workload and way."""
        largest: dict[str, str | None] = {}
        for row in self.rows:
            name = row.workload.kind if row.way in (None, STREAMED) else f"{row.workload.kind} ({row.way})"
            largest.setdefault(name, None)
            if row.cells[label].verdict == "safe":
                best = largest[name]
                if best is None or self._parameters(best) < row.plan.parameters:
                    largest[name] = row.plan.model
        return {"gpu": label, "largest": largest}

    def _parameters(self, model: str) -> int:
        return next(row.plan.parameters for row in self.rows if row.plan.model == model)


def make_table(
    models: Sequence[str] = MODELS, workloads: Sequence[str] = WORKLOADS, gpus: Sequence[str] = GPUS, *,
    seq_len: int = 2048, nsamples: int = 128, guides: bool = True, on_step: OnStep = lambda what, done, total: None,
) -> Table:  # fmt: skip
    """Raises UsageError for what is wrong with a name before anything is planned."""
    started = time.perf_counter()
    cards = _cards(gpus)
    jobs = jobs_of(models, workloads, seq_len=seq_len, nsamples=nsamples)
    pruned = {resolve(work.model).name for work, _ in jobs if work.kind == "prune"}
    claims = [claim for claim in (*DECISIONS, *EXAMPLES) if guides and resolve(claim.model).name in pruned]
    steps = len(jobs) + len(claims)
    rows: list[Row] = []
    refused: list[tuple[str, MemfitError]] = []
    for work, way in jobs:
        name = f"{work.kind} of {work.model}"
        on_step(name, len(rows) + len(refused), steps)
        try:
            rows.append(_row(work, way, cards))
        except MemfitError as error:
            refused.append((name, error))
    if refused and not rows:
        raise refused[0][1]
    checked: dict[Claim, Checked] = {}
    for claim in claims:
        on_step(claim.said, len(jobs) + len(checked), steps)
        checked[claim] = _checked(claim)
    return Table(
        seq_len=seq_len, nsamples=nsamples, cards=cards, rows=tuple(rows),
        decisions=tuple(checked[claim] for claim in DECISIONS if claim in checked),
        examples=tuple(checked[claim] for claim in EXAMPLES if claim in checked),
        left_out=tuple(dict.fromkeys(f"{name}: {error.message}" for name, error in refused)),
        seconds=time.perf_counter() - started,
    )  # fmt: skip


def jobs_of(
    models: Sequence[str], workloads: Sequence[str], *, seq_len: int, nsamples: int
) -> list[tuple[Workload, str | None]]:
    """Each with its way of doing it, where there are two."""
    for name in workloads:
        if name not in KINDS:
            raise UnknownName("workload", name, list(KINDS))
    if len(models) * len(workloads) > MOST_ROWS:
        raise UsageError(f"{len(models)} models and {len(workloads)} workloads are more than {MOST_ROWS} rows")
    for model in models:
        resolve(model)
    jobs: list[tuple[Workload, str | None]] = []
    for kind in workloads:
        for model in models:
            settings = {**SETTINGS[kind], "kind": kind, "model": model, "seq_len": seq_len}
            if kind == "prune":
                settings["nsamples"] = nsamples
            elif kind == "generate":
                settings["seq_len"] = max(seq_len - settings["new_tokens"], 1)
            work = Workload.from_mapping(settings)
            jobs += [(work, STREAMED), (work, WHOLE)] if kind == "prune" else [(work, None)]
    return jobs


def _cards(gpus: Sequence[str]) -> dict[str, Gpu]:
    """From small to large."""
    cards = {label: find_gpu(label, flag="--gpus") for label in gpus}
    return dict(sorted(cards.items(), key=lambda item: item[1].capacity_bytes))


def _row(work: Workload, way: str | None, cards: Mapping[str, Gpu]) -> Row:
    planned = _planner(work, way)
    plan = planned(None)
    guide = None
    if way == WHOLE and (work.seq_len, work.nsamples) == (2048, 128):
        guide = next((row for row in QUICK_REFERENCE if resolve(row.model).name == plan.model), None)
    return Row(workload=work, way=way, plan=plan, guide=guide, cells=_cells(planned, plan, cards, way == STREAMED))


def _planner(work: Workload, way: str | None) -> Callable[[Gpu | None], Plan]:
    return lambda card: _planned(work, way, card)


@lru_cache(maxsize=8)
def _planned(work: Workload, way: str | None, card: Gpu | None) -> Plan:
    """A guide's claims are about few jobs, one after the other."""
    if way == WHOLE:
        from memfit.planning.whole_model_pruning import predict_whole_model_pruning

        return predict_whole_model_pruning(work, card)
    from memfit.planning.predict import predict

    return predict(work, gpu=card)


def _cells(
    planned: Callable[[Gpu | None], Plan], plan: Plan, cards: Mapping[str, Gpu], adapts: bool
) -> dict[str, Cell]:
    """A job that `adapts` to its card may need less on a small one."""
    cells: dict[str, Cell] = {}
    safe = False
    for label, card in cards.items():
        if safe and card.arch >= FLASH:
            cells[label] = Cell(verdict="safe", device_bytes=None)
        elif not adapts and plan.smallest_gpu_bytes > FAR * card.capacity_bytes:
            cells[label] = Cell(verdict="fails", device_bytes=None)
        else:
            here = planned(card)
            assert here.verdict is not None and here.fit is not None
            cells[label] = Cell(verdict=here.verdict, device_bytes=here.fit.device_bytes)
            safe = safe or here.verdict == "safe"
    return cells


def _checked(claim: Claim) -> Checked:
    card = find_gpu(claim.gpu)
    default = Workload(kind="prune", model=claim.model)
    asked = dataclasses.replace(default, seq_len=claim.seq_len, nsamples=claim.nsamples)
    whole, streamed = _planner(asked, WHOLE)(card), _planner(default, STREAMED)(card)
    by_default = whole if asked == default else _planner(default, WHOLE)(card)
    return Checked(claim=claim, card=card, whole=whole, whole_by_default=by_default, streamed=streamed)


def _beside(guide: QuickReference, plan: Plan) -> dict[str, Any]:
    return {
        "said": guide.said, "weights_bytes": int(guide.weights * GB), "activations_bytes": _bytes(guide.activations),
        "total_bytes": _bytes(guide.total), "smallest_gpu": guide.smallest, "recommended_gpu": guide.recommended,
        "difference_bytes": _difference(plan.peak.device_bytes, guide.total),
    }  # fmt: skip


def _bytes(said: tuple[float, float] | None) -> list[int] | None:
    return None if said is None else [int(end * GB) for end in said]


def _difference(predicted: int, said: tuple[float, float] | None) -> int | None:
    """How much the prediction lies above the guide's range, or below it; 0 inside."""
    if said is None:
        return None
    least, most = (int(end * GB) for end in said)
    return predicted - most if predicted > most else predicted - least if predicted < least else 0
