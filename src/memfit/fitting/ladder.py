"""`memfit fit --ladder`: how far the micro-batch can go on a card, each rung at exactly the same global batch.

    Safe        the largest micro-batch that leaves 30 % of the card
    Medium      ... 20 %
    Aggressive  ... 10 %
    Maximum     the largest that runs at all

A rung is a divisor of a process's share of the global batch, so 252 instead of 256 cannot come up. Where the job does
not fit even one row at a time, `fit` makes it fit first, and the ladder is that of the fitted job. For GSA on four GPUs
the published ladder stands beside it, as its authors ran it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from memfit.analysis.verdict import judge
from memfit.errors import MemfitError, UsageError
from memfit.fitting.durations import step_time
from memfit.fitting.fit import check_margin, fit
from memfit.fitting.forecast import Forecast, Forecasts, global_batch_of, with_global_batch
from memfit.fitting.levers import Lever, batch_sizes
from memfit.gpus import Gpu, find_gpu
from memfit.guides.claims import RUNGS
from memfit.jobs.workload import Workload
from memfit.models.presets import GATHER, is_gsa
from memfit.render.shown import Shown
from memfit.units import gib


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
        work = replace(_as_published(asked), batch_size=rows, grad_accum=steps, seq_len=length)
        try:
            forecast = forecasts.ask(work)
        except MemfitError:
            return ()
        rungs.append(GuideRung(name=name, claims=claims, forecast=forecast, wrong=_wrong(asked, work)))
    return tuple(rungs)


def _as_published(asked: Workload) -> Workload:
    model = asked.model.removesuffix(GATHER) + GATHER
    alone = replace(asked, model=model, precision="amp-bf16", optimizer="adamw", loss="full", offload=(), alloc_conf="")
    return replace(alone, grad_checkpointing=True, selective_checkpointing=False)


def _wrong(asked: Workload, work: Workload) -> tuple[str, ...]:
    said = []
    if global_batch_of(work) != global_batch_of(asked):
        said.append(f"{global_batch_of(work)} rows a step are not {global_batch_of(asked)}")
    if work.seq_len != asked.seq_len:
        said.append(f"{work.seq_len} tokens are another experiment than {asked.seq_len}")
    return tuple(said)


SCHEMA = "memfit.ladder/1"
LEAVES = {"Safe": 0.3, "Medium": 0.2, "Aggressive": 0.1, "Maximum": 0.0}
"""What each rung leaves of the card, at least."""
LONGER = (1.05, 1.1, 1.25, 1.5, 2.0)
"""How much longer a batch may be: asked of each rung."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    names: tuple[str, ...]
    """Of the four, those that end here: there may be no micro-batch between two of them."""
    forecast: Forecast
    seconds: float | None
    """Of one optimizer step, at the least."""
    longest: int | None
    """The longest rows that were found to run at this rung; None where the next longer ones cannot be planned."""

    @property
    def workload(self) -> Workload:
        return self.forecast.workload

    def risks(self) -> tuple[str, ...]:
        spare = self.forecast.capacity_bytes - self.forecast.device_bytes
        length = self.workload.seq_len
        ends = self.longest is not None and self.longest < LONGER[-1] * length
        longer = [f"rows longer than {self.longest} tokens"] if ends else []
        idle = f"fragmentation: {gib(self.forecast.cached_bytes)} of what is reserved already lies idle"
        return (*longer, f"another program that takes {gib(max(spare, 0))} of the card", idle)


@dataclass(frozen=True, kw_only=True)
class Ladder(Shown):
    """What `memfit.ladder` answers: rungs of growing micro-batch at the same global batch. `print` shows it."""

    workload: Workload
    """What the rungs have in common."""
    gpu: Gpu
    changes: tuple[Lever, ...]
    """What `fit` had to change before a single row fitted."""
    rungs: tuple[Rung, ...]
    above: Forecast | None
    """The next rung, which does not run."""
    guide: tuple[GuideRung, ...]
    predictions: int
    seconds: float

    def __repr__(self) -> str:
        rows = ", ".join(str(rung.workload.batch_size) for rung in self.rungs)
        return f"<Ladder: {self.workload.kind} of {self.workload.model} on {self.gpu.name}: micro-batch {rows}>"

    def to_json(self) -> dict[str, Any]:
        first = self.rungs[0].seconds if self.rungs else None
        return {
            "schema": SCHEMA, "workload": self.workload.document(),
            "gpu": {"name": self.gpu.name, "capacity_bytes": self.gpu.capacity_bytes},
            "global_batch": global_batch_of(self.workload),
            "changes": [{"name": lever.name, "cost": lever.cost, "says": lever.says} for lever in self.changes],
            "rungs": [self._rung(rung, first) for rung in self.rungs],
            "above": None if self.above is None else _row(self.above, self.gpu),
            "guide": [each.to_json() for each in self.guide], "notes": ["predicted, not measured", *self.gpu.notes],
            "predictions": self.predictions, "seconds": round(self.seconds, 3),
        }  # fmt: skip

    def _rung(self, rung: Rung, first: float | None) -> dict[str, Any]:
        relative = round(rung.seconds / first, 3) if rung.seconds and first else None
        return {
            "names": list(rung.names), **_row(rung.forecast, self.gpu), "step_seconds": rung.seconds,
            "relative_step_time": relative, "longest_seq_len": rung.longest, "risks": list(rung.risks()),
        }  # fmt: skip


def ladder(
    workload: Workload | None = None,
    *,
    gpu: Gpu | str,
    global_batch: int | None = None,
    keep: Sequence[str] = (),
    margin: float = 0.1,
    **settings: Any,
) -> Ladder:
    """Safe, Medium, Aggressive and Maximum of a training job on a card."""
    started = time.perf_counter()
    card = find_gpu(gpu)
    check_margin(margin)
    asked = with_global_batch(Workload.asked(workload, settings), global_batch)
    if not asked.trains:
        raise UsageError("a ladder is for training", hint=f"memfit fit {asked.kind} shows what fits")
    forecasts = Forecasts(card, margin=0.0)
    work, changes, more = _one_row_that_fits(asked, card, forecasts, keep, margin)
    climb = _Climb(work, card, forecasts)
    rungs, above = climb.rungs()
    return Ladder(
        workload=work,
        gpu=card,
        changes=changes,
        rungs=rungs,
        above=above,
        guide=guide_ladder(asked, forecasts),
        predictions=forecasts.made + more,
        seconds=time.perf_counter() - started,
    )


def _one_row_that_fits(
    asked: Workload, card: Gpu, forecasts: Forecasts, keep: Sequence[str], margin: float
) -> tuple[Workload, tuple[Lever, ...], int]:
    """The job one row at a time; changed by `fit` where that does not run."""
    single = _with_micro_batch(asked, 1)
    if forecasts.ask(single).runs:
        return single, (), 0
    fitted = fit(single, gpu=card, keep=keep, margin=margin)
    return fitted.fitted, tuple(change.lever for change in fitted.changes), fitted.predictions


def _with_micro_batch(work: Workload, rows: int) -> Workload:
    sizes = batch_sizes(work).with_micro_batch(rows)
    return replace(work, batch_size=rows, grad_accum=sizes.gradient_accumulation_steps)


class _Climb:
    def __init__(self, work: Workload, card: Gpu, forecasts: Forecasts) -> None:
        self.work, self.card, self.forecasts = work, card, forecasts
        self.sizes = batch_sizes(work).rungs

    def rungs(self) -> tuple[tuple[Rung, ...], Forecast | None]:
        """More rows never take less."""
        ends = {name: self._last(self.sizes, partial(self._leaves, share)) for name, share in LEAVES.items()}
        found: list[Rung] = []
        different = sorted({rows for rows in ends.values() if rows is not None})
        for rows in reversed(different):  # what the next higher rung takes, a lower one takes too
            names = tuple(name for name, end in ends.items() if end == rows)
            found.insert(0, self._rung(rows, names, found[0].longest if found else None))
        top = ends["Maximum"]
        higher = [rows for rows in self.sizes if top is None or rows > top]
        return tuple(found), self._ask(higher[0]) if higher else None

    def _last(self, numbers: Sequence[int], holds: Callable[[int], bool]) -> int | None:
        """It holds up to some number, and not beyond."""
        count = bisect_left(numbers, True, key=lambda number: not holds(number))
        return numbers[count - 1] if count else None

    def _ask(self, rows: int) -> Forecast:
        return self.forecasts.ask(_with_micro_batch(self.work, rows))

    def _leaves(self, share: float, rows: int) -> bool:
        forecast = self._ask(rows)
        leaves = judge(forecast.device_bytes, forecast.capacity_bytes, share) == "safe"
        return forecast.runs and (share == 0 or leaves)

    def _rung(self, rows: int, names: tuple[str, ...], runs: int | None) -> Rung:
        """Rows that are `runs` tokens long are known to run."""
        forecast = self._ask(rows)
        time_of = step_time(forecast.workload, self.card)
        return Rung(
            names=names,
            forecast=forecast,
            seconds=None if time_of is None else time_of.seconds,
            longest=self._longest(forecast.workload, runs or forecast.workload.seq_len),
        )

    def _longest(self, work: Workload, runs: int) -> int | None:
        """Of the lengths in LONGER, the last that runs."""
        longer = [length for length in (int(work.seq_len * factor) for factor in LONGER) if length > runs]
        try:
            return self._last(longer, lambda length: self.forecasts.ask(replace(work, seq_len=length)).runs) or runs
        except MemfitError:  # more than the model has positions
            return None


def _row(forecast: Forecast, gpu: Gpu) -> dict[str, Any]:
    work = forecast.workload
    return {
        "micro_batch": work.batch_size, "grad_accum": work.grad_accum, "global_batch": global_batch_of(work),
        "seq_len": work.seq_len, "verdict": forecast.verdict, "device_bytes": forecast.device_bytes,
        "use": round(forecast.device_bytes / gpu.capacity_bytes, 4),
    }  # fmt: skip
