"""What `memfit fit` answers, as data: the changes with their peaks, the proof of each, and the levers left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from memfit.analysis.verdict import card_document
from memfit.errors import MemfitError
from memfit.fitting.claims import WholeModel
from memfit.fitting.durations import Duration
from memfit.fitting.forecast import Forecast, global_batch_of
from memfit.fitting.levers import CACHED, Lever
from memfit.fitting.search import Set, Solution, can_lower
from memfit.fitting.step_cost import StepTime
from memfit.gpus import Gpu
from memfit.jobs.settings import as_json
from memfit.jobs.workload import Workload
from memfit.render.shown import Shown
from memfit.units import gib

Why = Literal["would not help", "not needed", "unavailable"]
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
