"""`memfit table`: models against workloads against cards, every figure a prediction.

A row is what `memfit plan` says of that job, a cell what it says of that card. For pruning there are two rows: memfit's
own way, which streams the model, and the public code's, which has all of it on the card; beside them stands what people
say of the same jobs (`memfit/guides/`).

Not every cell needs a plan of its own. Far below what a job needs a card fails; far above, and above a card on which
the job is safe, it is safe; what lies between is planned on that very card, with its own kernels.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

from memfit.analysis.verdict import judge
from memfit.errors import MemfitError, UnknownName, UsageError
from memfit.fitting.claims import (
    STREAMED,
    WHOLE,
    CheckedClaim,
    CheckedSaving,
    Plans,
    beside_weights,
    check_claim,
    check_saving,
    difference,
    plan_way,
)
from memfit.gpus import Gpu, find_gpu
from memfit.guides.claims import DECISIONS, EXAMPLES, GB, QUICK_REFERENCE, SAVINGS, QuickReference
from memfit.jobs.settings import QLORA
from memfit.jobs.workload import Workload
from memfit.models.registry import resolve
from memfit.render.shown import NOT_MODELLED, Shown

if TYPE_CHECKING:
    from memfit.analysis.verdict import Verdict
    from memfit.planning.predict import Plan

SCHEMA = "memfit.table/1"
MODELS = tuple(row.model for row in QUICK_REFERENCE)
WORKLOADS = ("prune", "lora", "train", "forward", "generate")
GPUS = ("8GB", "12GB", "16GB", "24GB", "40GB", "48GB", "80GB", "141GB")
MOST_ROWS = 1000
SETTINGS: dict[str, dict[str, Any]] = {
    "prune": {},
    "lora": {"rank": 16, "grad_checkpointing": True},
    QLORA: {"rank": 16},
    "train": {"optimizer": "adamw-fused", "grad_checkpointing": True},
    "forward": {},
    "generate": {"new_tokens": 128},
}
"""What each workload is planned with, beside one sequence of --seq-len tokens in bf16; a generation ends there."""
USUAL_NSAMPLES = 128
FAR = 1.25
"""Cards choose among kernels whose needs differ by less than this."""
FLASH = (8, 0)
"""From here on every card has fused attention; an older one may need more than a smaller newer one."""

OnStep = Callable[[str, int, int], None]
"""What is planned next, and how many of how many steps are done."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A job on a card. `device_bytes` is None where the verdict follows from another card's."""

    verdict: Verdict
    device_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class TableRow:
    workload: Workload
    way: str | None
    plan: Plan
    """Without a card: kernels and context as on the reference card."""
    cells: Mapping[str, Cell]
    guide: QuickReference | None = None

    @property
    def shortened(self) -> bool:
        """A window is never longer than what the model can take."""
        return bool(self.plan.workload["seq_len"] != self.workload.seq_len)

    @property
    def not_modelled(self) -> list[str]:
        return [note for note in self.plan.notes if note.startswith(NOT_MODELLED)]

    @property
    def smallest(self) -> str | None:
        return next((name for name, cell in self.cells.items() if cell.verdict != "fails"), None)

    @property
    def recommended(self) -> str | None:
        return next((name for name, cell in self.cells.items() if cell.verdict == "safe"), None)

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "model": plan.model, "parameters": plan.parameters, "workload": kind_of(self.workload), "way": self.way,
            "settings": {name: value for name, value in plan.workload.items() if name != "gpu"},
            "weights_bytes": plan.report.breakdown["weights"], "activations_bytes": beside_weights(plan),
            "total_bytes": plan.peak.device_bytes, "smallest_bytes": plan.smallest_gpu_bytes,
            "breakdown": plan.report.breakdown, "not_modelled": self.not_modelled,
            "cells": {name: dataclasses.asdict(cell) for name, cell in self.cells.items()},
            "smallest_gpu": self.smallest, "recommended_gpu": self.recommended,
            "guide": None if self.guide is None else _beside(self.guide, plan),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Table(Shown):
    """What `memfit.table` answers: jobs against cards, and the guides' claims beside them. `print` shows it."""

    seq_len: int
    nsamples: int
    cards: Mapping[str, Gpu]
    rows: tuple[TableRow, ...]
    decisions: tuple[CheckedClaim, ...]
    examples: tuple[CheckedClaim, ...]
    savings: tuple[CheckedSaving, ...]
    left_out: tuple[str, ...]
    """Jobs that cannot be planned, and why."""
    seconds: float

    def __repr__(self) -> str:
        return f"<Table: {len(self.rows)} jobs on {', '.join(self.cards)}>"

    def to_markdown(self) -> str:
        from memfit.render.table import as_markdown

        return as_markdown(self.to_json())

    def to_csv(self) -> str:
        """The rows alone, sizes in bytes."""
        from memfit.render.table import as_csv

        return as_csv(self.to_json())

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
            "guide_savings": [each.to_json() for each in self.savings],
            "notes": list(self.notes()), "seconds": round(self.seconds, 3),
        }  # fmt: skip

    def notes(self) -> Iterator[str]:
        yield "predicted, not measured; total is what nvidia-smi shows at the peak, kernels and context as on the H200"
        yield "activations are all that is alive at the peak beside weights"
        yield "smallest: the first of these cards on which the job fits; recommended: the first with a tenth to spare"
        if any(row.way == STREAMED for row in self.rows):
            yield "pruning: streamed as `memfit prune` does it; whole as the public code does, all weights on the card"
            yield "streamed pruning goes by what is free: on a small card it takes less than its total"
        for model, length in {
            row.plan.model: row.plan.workload["seq_len"] for row in self.rows if row.shortened
        }.items():
            yield f"{model} is pruned with windows of {length} tokens: it has no more positions"
        if any(row.guide for row in self.rows):
            yield "the guide's table is about the whole model on the card; its GB are 10^9 bytes"
        for row in self.rows:
            yield from (f"* {kind_of(row.workload)} of {row.plan.model}: {note}" for note in row.not_modelled)
        yield from (f"left out: {why}" for why in self.left_out)

    def _decision(self, label: str) -> dict[str, Any]:
        """The largest model that is safe on a card, for each workload and way."""
        largest: dict[str, Plan | None] = {}
        for row in self.rows:
            kind = kind_of(row.workload)
            name = kind if row.way in (None, STREAMED) else f"{kind} ({row.way})"
            best = largest.setdefault(name, None)
            if row.cells[label].verdict == "safe" and (best is None or best.parameters < row.plan.parameters):
                largest[name] = row.plan
        return {"gpu": label, "largest": {name: best and best.model for name, best in largest.items()}}


def make_table(
    models: Sequence[str] | str = MODELS,
    workloads: Sequence[str] | str = WORKLOADS,
    gpus: Sequence[str] | str = GPUS,
    *,
    seq_len: int = 2048,
    nsamples: int | None = None,
    guides: bool = True,
    on_step: OnStep = lambda what, done, total: None,
) -> Table:
    """Plan every model for every workload, and say which of the cards it fits on; `print` shows it.

    Names are those of `memfit plan`: models, kinds of jobs, cards or sizes; one of them, several with commas, or a
    list. `guides` adds what people's guides say of the same jobs. A wrong name is an error before anything is planned;
    a job that cannot be planned is left out, with the reason among the notes.
    """
    started = time.perf_counter()
    cards, kinds = _cards(_listed(gpus, "card")), _listed(workloads, "workload")
    if nsamples is not None and "prune" not in kinds:
        raise UsageError(f"--nsamples {nsamples} has no effect: nothing is pruned", hint="--workloads names no prune")
    nsamples = USUAL_NSAMPLES if nsamples is None else nsamples
    jobs = jobs_of(_listed(models, "model"), kinds, seq_len=seq_len, nsamples=nsamples)
    pruned = {resolve(work.model).name for work, _ in jobs if work.kind == "prune"} if guides else set()
    claims = [claim for claim in (*DECISIONS, *EXAMPLES) if resolve(claim.model).name in pruned]
    savings = [saving for saving in SAVINGS if resolve(saving.model).name in pruned]
    total, done = len(jobs) + len(claims) + len(savings), count()

    def told(what: str) -> str:
        on_step(what, next(done), total)
        return what

    plans: Plans = cache(plan_way)
    rows: list[TableRow] = []
    refused: list[tuple[str, MemfitError]] = []
    for work, way in jobs:
        name = told(f"{kind_of(work)} of {work.model}")
        try:
            rows.append(_row(work, way, cards, plans))
        except MemfitError as error:
            refused.append((name, error))
    if refused and not rows:
        raise refused[0][1]
    checked = {claim: check_claim(claim, plans) for claim in claims if told(claim.said)}
    return Table(
        seq_len=seq_len,
        nsamples=nsamples,
        cards=cards,
        rows=tuple(rows),
        decisions=tuple(checked[claim] for claim in DECISIONS if claim in checked),
        examples=tuple(checked[claim] for claim in EXAMPLES if claim in checked),
        savings=tuple(check_saving(saving, plans) for saving in savings if told(saving.said)),
        left_out=tuple(dict.fromkeys(f"{name}: {error.message}" for name, error in refused)),
        seconds=time.perf_counter() - started,
    )


def _listed(names: Sequence[str] | str, what: str) -> Sequence[str]:
    """`"7b,13b"` is what it is on the command line; it is no list of letters."""
    listed = [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else names
    if not listed:
        raise UsageError(f"no {what} is named", hint=f"a table needs at least one {what}")
    return listed


def jobs_of(
    models: Sequence[str], workloads: Sequence[str], *, seq_len: int, nsamples: int
) -> list[tuple[Workload, str | None]]:
    """Each with its way of doing it, where there are two."""
    for name in workloads:
        if name not in SETTINGS:
            raise UnknownName("workload", name, list(SETTINGS), more=f"workloads: {', '.join(SETTINGS)}")
    if len(models) * len(workloads) > MOST_ROWS:
        raise UsageError(f"{len(models)} models and {len(workloads)} workloads are more than {MOST_ROWS} rows")
    for model in models:
        resolve(model)
    jobs: list[tuple[Workload, str | None]] = []
    for kind in workloads:
        works = [_workload(kind, model, seq_len, nsamples) for model in models]
        jobs += [(work, way) for way in ((STREAMED, WHOLE) if kind == "prune" else (None,)) for work in works]
    return jobs


def kind_of(work: Workload) -> str:
    """By the name under which it was asked for."""
    return QLORA if work.kind == "lora" and work.quant != "none" else work.kind


def _workload(kind: str, model: str, seq_len: int, nsamples: int) -> Workload:
    settings = {**SETTINGS[kind], "kind": kind, "model": model, "seq_len": seq_len}
    if kind == "prune":
        settings["nsamples"] = nsamples
    elif kind == "generate":
        settings["seq_len"] = max(seq_len - settings["new_tokens"], 1)
    return Workload.from_mapping(settings)


def _cards(gpus: Sequence[str]) -> dict[str, Gpu]:
    """From small to large."""
    cards = {label: find_gpu(label, flag="--gpus") for label in gpus}
    return dict(sorted(cards.items(), key=lambda item: item[1].capacity_bytes))


def _row(work: Workload, way: str | None, cards: Mapping[str, Gpu], plans: Plans) -> TableRow:
    plan = plans(work, way, None)
    guide = None
    if way == WHOLE and (work.seq_len, work.nsamples) == (2048, 128):
        guide = next((row for row in QUICK_REFERENCE if resolve(row.model).name == plan.model), None)
    cells = _cells(lambda card: plans(work, way, card), plan, cards, way == STREAMED)
    return TableRow(workload=work, way=way, plan=plan, guide=guide, cells=cells)


def _cells(planned: Callable[[Gpu], Plan], plan: Plan, cards: Mapping[str, Gpu], adapts: bool) -> dict[str, Cell]:
    """A job that `adapts` to its card may need less on a small one."""
    cells: dict[str, Cell] = {}
    safe = False
    for label, card in cards.items():
        much_room = judge(FAR * plan.peak.device_bytes, card.capacity_bytes) == "safe"
        if (safe or much_room) and card.arch >= FLASH:
            cells[label] = Cell(verdict="safe", device_bytes=None)
        elif not adapts and plan.smallest_gpu_bytes > FAR * card.capacity_bytes:
            cells[label] = Cell(verdict="fails", device_bytes=None)
        else:
            here = planned(card)
            assert here.verdict is not None and here.fit is not None
            cells[label] = Cell(verdict=here.verdict, device_bytes=here.fit.device_bytes)
            safe = safe or here.verdict == "safe"
    return cells


def _beside(guide: QuickReference, plan: Plan) -> dict[str, Any]:
    return {
        "said": guide.said, "weights_bytes": int(guide.weights * GB),
        "activations_bytes": list(guide.activations_bytes), "total_bytes": list(guide.total_bytes),
        "smallest_gpu": guide.smallest, "recommended_gpu": guide.recommended,
        "difference_bytes": difference(plan.peak.device_bytes, guide.total_bytes),
    }  # fmt: skip
