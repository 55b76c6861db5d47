"""`memfit fit`: the smallest set of changes with which a job fits a card.

    fitted = fit(kind="lora", model="qwen2.5-7b", rank=128, seq_len=2048, global_batch=16, gpu="24GiB")
    [change.lever.name for change in fitted.changes]

Savings are never added up: every figure here is a prediction of the job with exactly those changes. What is cheap comes
first (`fitting/levers.py`), and the global batch stays what it is. Where nothing fits, a smaller model is looked for.
The answer, as data, has the changes with their peaks, the proof of each, and the levers left out.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from memfit.analysis.verdict import card_document, limit_note
from memfit.errors import MemfitError, UsageError
from memfit.fitting.claims import WholeModel, plan_whole_model
from memfit.fitting.durations import Duration, StepTime, estimate, step_time
from memfit.fitting.forecast import (
    MOST_MICRO_STEPS,
    Forecast,
    Forecasts,
    few_micro_steps_note,
    global_batch_of,
    with_few_micro_steps,
    with_global_batch,
    within,
    without_others,
)
from memfit.fitting.levers import CACHED, Lever, apply, checked_setting, levers_for
from memfit.fitting.search import Search, Set, Solution, can_lower, dearness
from memfit.gpus import Gpu, find_gpu
from memfit.jobs.settings import as_json
from memfit.jobs.workload import Workload
from memfit.models.presets import find_preset, presets
from memfit.render.shown import Shown
from memfit.units import GiB, gib

if TYPE_CHECKING:
    from memfit.planning.predict import Plan


Why = Literal["would not help", "not needed", "unavailable"]

# -- the levers that were left out -------------------------------------------------------------------------------------

WITH_STEPS = {
    "micro-batch": "smaller micro-batch", "sequence": "shorter sequence", "rank": "lower rank", "beams": "fewer beams",
    "new tokens": "fewer new tokens", "windows": "fewer windows",
}  # fmt: skip
"""Groups of many levers, in one word."""
PHASES = {"step": "the optimizer's step", "": "the traced code"}


@dataclass(frozen=True, kw_only=True)
class UnusedLever:
    name: str
    cost: str
    why: Why
    reason: str


def list_unused(
    levers: Sequence[Lever], found: Solution, before: Forecast, refused: Mapping[str, str]
) -> tuple[UnusedLever, ...]:
    """One for each group, under its strongest lever that is to be had; a group of the answer goes without saying.
    `refused` cannot be planned even alone."""
    taken = {lever.group for lever in found.levers}
    strongest = {lever.group: lever for lever in levers if lever.missing is None}
    return tuple(
        _reason(lever, found, before, refused)
        for lever in levers
        if lever.missing is not None
        or lever.name in refused
        or (lever.group not in taken and strongest[lever.group] is lever)
    )


def _reason(lever: Lever, found: Solution, before: Forecast, refused: Mapping[str, str]) -> UnusedLever:
    after = found.forecast
    if lever.missing is not None:
        return _aside(lever, "unavailable", f"needs {lever.missing}, which is not installed")
    if lever.name in refused:
        return _aside(lever, "unavailable", refused[lever.name])
    if lever in found.refused:
        return _aside(lever, "unavailable", "it does not go together with the others")
    if not can_lower(lever, before) and not can_lower(lever, after):
        return _aside(lever, "would not help", _nothing_there(lever, before))
    if after.fits:
        return _aside(lever, "not needed", "the changes of the answer are enough")
    why = "with it the peak is no lower" if can_lower(lever, after) else _nothing_there(lever, after)
    return _aside(lever, "would not help", why)


def _aside(lever: Lever, why: Why, reason: str) -> UnusedLever:
    return UnusedLever(name=WITH_STEPS.get(lever.group, lever.name), cost=lever.cost, why=why, reason=reason)


def _nothing_there(lever: Lever, forecast: Forecast) -> str:
    where = PHASES.get(forecast.at_peak.phase, f"the {forecast.at_peak.phase} pass")
    if lever.only_in is not None and lever.only_in != forecast.at_peak.phase:
        return f"the peak is in {where}, not in {PHASES.get(lever.only_in, lever.only_in)}"
    if lever.lowers == (CACHED,):
        return f"only {gib(forecast.cached_bytes)} of what is reserved lies idle"
    *words, last = (name.replace("_", " ") for name in lever.lowers)
    named = f"{', '.join(words)} or {last}" if words else last
    return f"at the peak, in {where}, there is nothing that it lowers ({named})"


# -- the answer --------------------------------------------------------------------------------------------------------

SCHEMA = "memfit.fit/1"
Answer = Literal["fits already", "fits", "nothing fits"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A lever of the answer, on top of those before it."""

    lever: Lever
    before: Forecast
    after: Forecast
    without: Forecast | MemfitError | None
    """The answer less this change alone, or why that cannot run at all; None where nothing fits."""
    time_before: StepTime | None
    time_after: StepTime | None

    def to_json(self) -> dict[str, Any]:
        lever = self.lever
        return {
            "name": lever.name, "cost": lever.cost, "settings": as_json(lever.settings), "says": lever.says,
            "price": lever.price, "risk": lever.risk, "how": dict(lever.how),
            "before_bytes": self.before.device_bytes, "after_bytes": self.after.device_bytes,
            "saved_bytes": self.before.device_bytes - self.after.device_bytes,
            "step_before": None if self.time_before is None else self.time_before.to_json(),
            "step_after": None if self.time_after is None else self.time_after.to_json(),
            "without": None if self.without is None else _of_rest(self.without),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another set that fits, without one of the answer's changes."""

    levers: Set
    forecast: Forecast
    instead_of: str

    def to_json(self) -> dict[str, Any]:
        return {
            "instead_of": self.instead_of,
            "changes": [{"name": lever.name, "cost": lever.cost} for lever in self.levers],
            "settings": as_json(_settings(self.levers)),
            **_verdict(self.forecast),
        }


@dataclass(frozen=True, kw_only=True)
class Fitted(Shown):
    """What `memfit.fit` answers. `print` shows it; `fitted` is the job with the changes, to be planned or run."""

    answer: Answer
    workload: Workload
    """As asked, with its global batch."""
    fitted: Workload
    """With the changes; where nothing fits, the nearest."""
    gpu: Gpu
    margin: float
    keep: tuple[str, ...]
    before: Forecast
    after: Forecast
    changes: tuple[Change, ...]
    without_last: Forecast | None
    """The proof that the last change is needed."""
    one_step_back: tuple[Lever, Forecast] | None
    """And that no weaker one of its kind will do: the next weaker lever, and the job with it instead."""
    alternatives: tuple[Alternative, ...]
    set_aside: tuple[UnusedLever, ...]
    smallest_gpu_bytes: int | None
    """Where nothing fits: the least card on which the nearest set runs."""
    enough_gpu_bytes: int | None
    """And one on which it leaves the margin."""
    margin_left: float | None
    """Where it runs on this card all the same: the share that it leaves, in whole percent."""
    smaller_model: tuple[str, Forecast] | None
    whole_model: WholeModel | None
    notes: tuple[str, ...]
    predictions: int
    seconds: float
    job_file: dict[str, Any] | None = None
    """Of a job that was read from another tool's file: what became of each key (`jobfiles/file.py`)."""
    duration: Duration | None = None
    """How long it takes with the changes; None where that cannot be told, or it does not run."""

    @property
    def fits(self) -> bool:
        return self.answer != "nothing fits"

    def __repr__(self) -> str:
        changes = ", ".join(change.lever.name for change in self.changes) or "no changes"
        use = f"{gib(self.after.device_bytes)} of {gib(self.gpu.capacity_bytes)}"
        return f"<Fitted: {self.workload.kind} of {self.workload.model}: {self.answer}: {changes}; {use}>"

    def to_json(self) -> dict[str, Any]:
        smaller = self.smaller_model
        return {
            "schema": SCHEMA, "answer": self.answer, **({} if self.job_file is None else {"from": self.job_file}),
            "workload": self.workload.document(),
            "model": {
                "name": self.workload.model,
                "parameters": self.before.parameters,
                "trainable_parameters": self.before.trainable_parameters,
            },
            "gpu": card_document(self.gpu.name, self.gpu.capacity_bytes, self.after.fit), "margin": self.margin,
            "keep": list(self.keep), "global_batch": global_batch_of(self.workload), "before": self.before.to_json(),
            "changes": [change.to_json() for change in self.changes], "after": self.after.to_json(),
            "fitted_workload": self.fitted.document(),
            "without_last": None if self.without_last is None else _instead(self.changes[-1].lever, self.without_last),
            "one_step_back": None if self.one_step_back is None else _instead(*self.one_step_back),
            "alternatives": [each.to_json() for each in self.alternatives],
            "set_aside": [asdict(each) for each in self.set_aside], "smallest_gpu_bytes": self.smallest_gpu_bytes,
            "enough_gpu_bytes": self.enough_gpu_bytes, "margin_left": self.margin_left,
            "smaller_model": None if smaller is None else {"name": smaller[0], **_verdict(smaller[1])},
            "whole_model": None if self.whole_model is None else self.whole_model.to_json(),
            "duration": None if self.duration is None else self.duration.to_json(), "notes": list(self.notes),
            "predictions": self.predictions, "seconds": round(self.seconds, 3),
        }  # fmt: skip


def _verdict(forecast: Forecast) -> dict[str, Any]:
    return {"verdict": forecast.verdict, "device_bytes": forecast.device_bytes}


def _of_rest(less: Forecast | MemfitError) -> dict[str, Any]:
    if isinstance(less, MemfitError):
        return {"verdict": None, "device_bytes": None, "refused": less.message}
    return {**_verdict(less), "refused": None}


def _instead(lever: Lever, forecast: Forecast) -> dict[str, Any]:
    return {"change": lever.name, **_verdict(forecast), "workload": forecast.workload.document()}


def _settings(levers: Set) -> dict[str, object]:
    made: dict[str, object] = {}
    for lever in levers:
        for name, value in lever.settings.items():
            before = made.get(name, ())
            made[name] = (*before, *value) if isinstance(value, tuple) and isinstance(before, tuple) else value
    return made


# -- finding it --------------------------------------------------------------------------------------------------------

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def smaller_models(work: Workload, room: int) -> Iterator[str]:
    """The largest first; none whose weights alone are more than there is room for."""
    here = find_preset(work.model)
    if here is None:
        return
    whole = work.kind != "prune" and not work.is_sharded and "weights" not in work.offload
    alike = [each for each in presets() if each.model_type == here.model_type and each.parameters < here.parameters]
    for preset in sorted(alike, key=lambda each: (-each.parameters, each.name)):
        if not whole or preset.parameters * BYTES[work.weight_precision] <= room:
            yield preset.name


ALTERNATIVES = 2
ENOUGH_PREDICTIONS = 10
"""After so many a second alternative is not looked for."""
CLEAR = 0.02
"""What fails by more than this share of the card fails with every number of micro-steps."""
SMALLER_MODELS = 3


@dataclass(frozen=True, kw_only=True)
class Option:
    """A single lever, predicted on this job."""

    lever: Lever
    before: Plan
    after: Plan

    @property
    def saved_bytes(self) -> int:
        return self.before.peak.device_bytes - self.after.peak.device_bytes


def fit(
    workload: Workload | None = None,
    *,
    gpu: Gpu | str,
    global_batch: int | None = None,
    keep: Sequence[str] = (),
    margin: float = 0.1,
    try_compile: bool = False,
    steps: int | None = None,
    tokens: int | None = None,
    **settings: Any,
) -> Fitted:
    """The smallest set of changes with which the job leaves the margin, a share of the card, free.

    `keep` names settings that must stay as they are; with `try_compile` torch.compile may be one of the changes, which
    takes a compilation for each set that is looked at; `steps` of the optimizer, or `tokens`, say how much is trained,
    for the time it takes; other settings are those of `memfit.predict`."""
    started = time.perf_counter()
    card = find_gpu(gpu)
    check_margin(margin)
    work = with_global_batch(Workload.asked(workload, settings), global_batch)
    work = within(work, card, margin)
    kept = tuple(checked_setting(name) for name in keep)
    fitted = _Fitter(work, card, margin, kept, try_compile=try_compile).fitted(started)
    if fitted.after.verdict == "fails":
        return fitted
    return dataclasses.replace(fitted, duration=estimate(fitted.fitted, card, steps=steps, tokens=tokens))


def options(workload: Workload, *, gpu: Gpu | str | None, keep: Sequence[str] = ()) -> list[Option]:
    """Every single lever that can be planned, predicted on this job; the best saving first. Levers are of the job with
    all its micro-steps, predictions look at a few of them."""
    from memfit.planning.predict import predict

    before, found = predict(with_few_micro_steps(workload), gpu=gpu), []
    for lever in levers_for(workload, keep=keep):
        if lever.missing is None:
            try:
                after = predict(with_few_micro_steps(apply(workload, [lever])), gpu=gpu)
            except MemfitError:
                continue
            found.append(Option(lever=lever, before=before, after=after))
    return sorted(found, key=lambda option: -option.saved_bytes)


def check_margin(margin: float) -> None:
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin < 1:
        raise UsageError(f"--margin {margin!r} is not a share between 0 and 1", hint="0.1 leaves a tenth of the card")


class _Fitter:
    def __init__(
        self, work: Workload, card: Gpu, margin: float, keep: tuple[str, ...], *, try_compile: bool = False
    ) -> None:
        self.work, self.card, self.margin, self.keep = work, card, margin, keep
        self.levers = levers_for(work, keep=keep, try_compile=try_compile)
        self.forecasts = Forecasts(card, margin)
        self.search = Search(work, self.levers, self.forecasts)

    def fitted(self, started: float) -> Fitted:
        before = self.search.forecast(())
        found, answer = self._found(before)
        chosen, fits, fails = found.levers, answer == "fits", answer == "nothing fits"
        return Fitted(
            answer=answer,
            workload=self.work,
            fitted=found.forecast.workload,
            gpu=self.card,
            margin=self.margin,
            keep=self.keep,
            before=before,
            after=found.forecast,
            changes=tuple(self._changes(found, proven=fits)),
            without_last=self._without_last(chosen) if fits else None,
            one_step_back=self._one_step_back(chosen) if fits else None,
            alternatives=tuple(self._alternatives(chosen)) if fits else (),
            set_aside=() if answer == "fits already" else list_unused(self.levers, found, before, self.search.refused),
            smallest_gpu_bytes=self._smallest_card(found.forecast) if fails else None,
            enough_gpu_bytes=self._enough_of_a_card(found.forecast) if fails else None,
            margin_left=self._margin_left(found.forecast) if fails else None,
            smaller_model=self._smaller_model(chosen) if fails else None,
            whole_model=plan_whole_model(self.work, self.card),
            notes=self._notes(found.forecast),
            predictions=self.forecasts.made,
            seconds=time.perf_counter() - started,
        )

    def _found(self, before: Forecast) -> tuple[Solution, Answer]:
        found = Solution((), before) if before.fits else self._smallest()
        if found is None:
            return self._nearest(), "nothing fits"
        whole = self.forecasts.ask(found.forecast.workload, whole=True)
        if whole.fits:
            return Solution(found.levers, whole), "fits" if found.levers else "fits already"
        self._look_at_every_micro_step()
        found = self._smallest()
        return (found, "fits") if found is not None else (self._nearest(), "nothing fits")

    def _smallest(self) -> Solution | None:
        """Of two changes that cost time one may do, if it goes further; not where that takes longer."""
        found = self._as_if_alone() or self.search.smallest()
        fewer = self.search.fewer(found) if found is not None else None
        while found is not None and fewer is not None and not self._is_slower(fewer, found):
            found, fewer = fewer, self.search.fewer(fewer)
        return found

    def _as_if_alone(self) -> Solution | None:
        """What makes a process without others fit mostly does so for one of DDP, whose forecasts take long: it is tried
        first, and left out of it what is not needed."""
        alone = without_others(self.work)
        found = None if alone is self.work else Search(alone, self.levers, self.forecasts).smallest()
        return self.search.shrunk(found) if found is not None and self.search.fits(found.levers) else None

    def _is_slower(self, one: Solution, other: Solution) -> bool:
        """Also where it cannot be told."""
        this, that = (self._time(each.forecast.workload) for each in (one, other))
        return this is None or that is None or not this.seconds or not that.seconds or this.seconds > that.seconds

    def _time(self, work: Workload) -> StepTime | None:
        """Of one optimizer step; where nothing is trained, of all the rows that were asked for."""
        one = step_time(work, self.card)
        return one if one is None or work.trains else one.times(self.work.batch_size // work.batch_size)

    def _look_at_every_micro_step(self) -> None:
        """Fragmentation may grow with them: then the few that a search looks at do not tell all."""
        made, seconds = self.forecasts.made, self.forecasts.seconds
        self.forecasts = Forecasts(self.card, self.margin, micro_steps=MOST_MICRO_STEPS)
        self.forecasts.made, self.forecasts.seconds = made, seconds
        self.search = Search(self.work, self.levers, self.forecasts)

    def _nearest(self) -> Solution:
        """All that lowers the peak; of what runs, less what does not."""
        grown = self.search.nearest()
        kept, peak = grown.levers, grown.forecast.device_bytes
        for lever in reversed(grown.levers) if grown.forecast.runs else ():
            fewer = tuple(each for each in kept if each is not lever)
            if self._bytes(fewer, peak) <= peak:
                kept = fewer
        return Solution(kept, self.search.forecast(kept), grown.refused)

    def _bytes(self, levers: Set, most: int) -> float:
        """More than `most` is as good as any number."""
        work = apply(self.work, levers)
        try:
            return float("inf") if self.forecasts.bound(work, most) else self.forecasts.ask(work).device_bytes
        except MemfitError:
            return float("inf")

    def _changes(self, found: Solution, *, proven: bool) -> Iterator[Change]:
        """`proven`: each is needed. What does not run has no time."""
        chosen, timed = found.levers, found.forecast.runs
        before, time_before = self.search.forecast(()), self._time(self.work) if chosen and timed else None
        for number, lever in enumerate(chosen):
            last = number == len(chosen) - 1
            after = found.forecast if last else self.search.forecast(chosen[: number + 1])
            costs_time = lever.cost != "free" and timed
            time_after = self._time(after.workload) if costs_time else time_before
            yield Change(
                lever=lever,
                before=before,
                after=after,
                without=self._without(chosen, lever) if proven else None,
                time_before=time_before if costs_time else None,
                time_after=time_after if costs_time else None,
            )
            before, time_before = after, time_after

    def _without(self, chosen: Set, left_out: Lever) -> Forecast | MemfitError:
        try:
            return self.search.forecast(lever for lever in chosen if lever is not left_out)
        except MemfitError as refusal:  # another change does not go without it
            return refusal

    def _without_last(self, chosen: Set) -> Forecast | None:
        few = self._without(chosen, chosen[-1])
        if isinstance(few, MemfitError):
            return None
        clear = few.device_bytes > (1 + CLEAR) * few.capacity_bytes
        return few if clear else self.forecasts.ask(few.workload, whole=True)

    def _one_step_back(self, chosen: Set) -> tuple[Lever, Forecast] | None:
        found = self.search.one_step_back(chosen)
        try:
            return None if found is None else (found[0], self.search.forecast(found[1]))
        except MemfitError:
            return None

    def _alternatives(self, chosen: Set) -> Iterator[Alternative]:
        """The answer without its dearest change, and without the one before that; another experiment is no alternative
        to the one that was asked for."""
        dearer = set() if chosen[-1].cost == "experiment" else {"experiment"}
        unwanted = [each.group for each in self.levers if each.cost in dearer or each.name in self.search.raising]
        found: list[Alternative] = []
        for lever in reversed(chosen):
            if len(found) == ALTERNATIVES or (found and self.forecasts.made > ENOUGH_PREDICTIONS):
                break
            others = tuple(each for each in chosen if each is not lever)
            if isinstance(self._without(chosen, lever), MemfitError):
                continue
            other = self.search.smallest(start=others, without=[lever.group, *unwanted])
            if other is not None and all(other.levers != each.levers for each in found):
                found.append(Alternative(levers=other.levers, forecast=other.forecast, instead_of=lever.name))
        yield from sorted(found, key=lambda each: dearness(each.levers))

    def _smallest_card(self, nearest: Forecast) -> int:
        """On which it runs at all."""
        return nearest.wanted_bytes or self.forecasts.smallest_card(nearest.workload)

    def _enough_of_a_card(self, nearest: Forecast) -> int:
        """That leaves the margin, rounded up as it is shown."""
        enough = max(nearest.device_bytes / (1 - self.margin), nearest.wanted_bytes)
        return math.ceil(enough / GiB * 100) * GiB // 100

    def _margin_left(self, nearest: Forecast) -> float | None:
        used = nearest.use_bytes
        return None if used is None else math.floor(100 * (1 - used / nearest.capacity_bytes)) / 100

    def _smaller_model(self, chosen: Set) -> tuple[str, Forecast] | None:
        """The largest of the same kind that fits with the changes that leave the experiment alone."""
        mild = apply(self.work, [lever for lever in chosen if lever.cost != "experiment"])
        room = int((1 - self.margin) * self.search.forecast(()).capacity_bytes)
        for name in () if "model" in self.keep else islice(smaller_models(mild, room), SMALLER_MODELS):
            try:
                forecast = self.forecasts.glance(dataclasses.replace(mild, model=name, target_modules=None))
            except MemfitError:
                continue
            if forecast.fits:
                return name, forecast
        return None

    def _notes(self, after: Forecast) -> tuple[str, ...]:
        notes = ["predicted, not measured; every set by itself, for savings do not add up", *self.card.notes]
        if after.capacity_bytes < self.card.capacity_bytes:
            notes.append(limit_note(after.capacity_bytes))
        fitted = after.workload
        if few := few_micro_steps_note(fitted, self.forecasts.micro_steps):
            last = f"; the answer with {min(fitted.grad_accum, MOST_MICRO_STEPS)}" if after.fits else ""
            notes.append(f"{few}{last}")
        if after.asks_for_bytes is not None:
            room = "pruning begins only with room for a block and a window as estimated from above"
            notes.append(f"{room}, {gib(after.wanted_bytes)} with CUDA's own; then it takes less")
        return tuple(notes)
