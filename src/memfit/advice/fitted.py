"""What `memfit fit` answers, as data: the changes, each with its peak before and after, and the proof that none is too
many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from memfit.advice.durations import Duration
from memfit.advice.forecast import Forecast
from memfit.advice.global_batch import global_batch_of
from memfit.advice.lever import Lever
from memfit.advice.search import Set
from memfit.advice.set_aside import SetAside
from memfit.advice.step_times import StepTime
from memfit.advice.whole_model import WholeModel
from memfit.errors import MemfitError
from memfit.gpus import Gpu
from memfit.jobs.workload import Workload
from memfit.units import gib

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
            "name": lever.name, "cost": lever.cost, "settings": _plain(lever.settings), "says": lever.says,
            "price": lever.price, "risk": lever.risk, "how": dict(lever.how),
            "before_bytes": self.before.device_bytes, "after_bytes": self.after.device_bytes,
            "saved_bytes": self.before.device_bytes - self.after.device_bytes,
            "step_before": None if self.time_before is None else self.time_before.to_json(),
            "step_after": None if self.time_after is None else self.time_after.to_json(),
            "without": self._without(),
        }  # fmt: skip

    def _without(self) -> dict[str, Any] | None:
        less = self.without
        if less is None:
            return None
        if isinstance(less, MemfitError):
            return {"verdict": None, "device_bytes": None, "refused": less.message}
        return {"verdict": less.verdict, "device_bytes": less.device_bytes, "refused": None}


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
            "settings": _plain(_settings(self.levers)), "verdict": self.forecast.verdict,
            "device_bytes": self.forecast.device_bytes,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fitted:
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
    set_aside: tuple[SetAside, ...]
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
    duration: Duration | None = None
    """How long it takes with the changes; None where that cannot be told, or it does not run."""

    @property
    def fits(self) -> bool:
        return self.answer != "nothing fits"

    def __repr__(self) -> str:
        changes = ", ".join(change.lever.name for change in self.changes) or "no changes"
        use = f"{gib(self.after.device_bytes)} of {gib(self.gpu.capacity_bytes)}"
        return f"<Fitted: {self.workload.kind} of {self.workload.model}: {self.answer}: {changes}; {use}>"

    def __str__(self) -> str:
        from memfit.render.fit_terminal import show_fit
        from memfit.render.text import as_text

        return as_text(show_fit, self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "answer": self.answer,
            "workload": self.workload.settings(),
            "model": {
                "name": self.workload.model, "parameters": self.before.parameters,
                "trainable_parameters": self.before.trainable_parameters,
            },
            "gpu": {"name": self.gpu.name, "capacity_bytes": self.gpu.capacity_bytes},
            "margin": self.margin,
            "keep": list(self.keep),
            "global_batch": global_batch_of(self.workload),
            "before": self.before.to_json(),
            "changes": [change.to_json() for change in self.changes],
            "after": self.after.to_json(),
            "fitted_workload": self.fitted.settings(),
            "without_last": self._proof(),
            "one_step_back": self._weaker(),
            "alternatives": [each.to_json() for each in self.alternatives],
            "set_aside": [each.to_json() for each in self.set_aside],
            "smallest_gpu_bytes": self.smallest_gpu_bytes,
            "enough_gpu_bytes": self.enough_gpu_bytes,
            "margin_left": self.margin_left,
            "smaller_model": self._smaller_model(),
            "whole_model": None if self.whole_model is None else self.whole_model.to_json(),
            "duration": None if self.duration is None else self.duration.to_json(),
            "notes": list(self.notes),
            "predictions": self.predictions,
            "seconds": round(self.seconds, 3),
        }  # fmt: skip

    def _proof(self) -> dict[str, Any] | None:
        if self.without_last is None:
            return None
        return {
            "change": self.changes[-1].lever.name, "verdict": self.without_last.verdict,
            "device_bytes": self.without_last.device_bytes, "workload": self.without_last.workload.settings(),
        }  # fmt: skip

    def _weaker(self) -> dict[str, Any] | None:
        if self.one_step_back is None:
            return None
        lever, forecast = self.one_step_back
        return {
            "change": lever.name, "verdict": forecast.verdict, "device_bytes": forecast.device_bytes,
            "workload": forecast.workload.settings(),
        }  # fmt: skip

    def _smaller_model(self) -> dict[str, Any] | None:
        if self.smaller_model is None:
            return None
        name, forecast = self.smaller_model
        return {"name": name, "verdict": forecast.verdict, "device_bytes": forecast.device_bytes}


def _settings(levers: Set) -> dict[str, object]:
    made: dict[str, object] = {}
    for lever in levers:
        for name, value in lever.settings.items():
            before = made.get(name, ())
            made[name] = (*before, *value) if isinstance(value, tuple) and isinstance(before, tuple) else value
    return made


def _plain(settings: Any) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
