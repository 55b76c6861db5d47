"""Beside a pruning that streams blocks: the guides' way, with the whole model on the card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memfit.advice.forecast import Forecast, Forecasts
from memfit.errors import MemfitError
from memfit.jobs.workload import Workload
from memfit.models.registry import load_config, resolve
from memfit.planning.guides import pruning_guides

BYTES = 2
BUFFERS = 2
"""The public code keeps the inputs of a block and its outputs, for all windows."""


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    forecast: Forecast
    """Of the whole model on the card and one window through it: the least that this way takes."""
    buffers_bytes: int
    """Calculated: what it keeps of the calibration text, on top of that."""
    guides: tuple[dict[str, Any], ...]
    """What the guides' own formulas say of it."""

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.forecast.verdict, "device_bytes": self.forecast.device_bytes,
            "buffers_bytes": self.buffers_bytes, "guides": list(self.guides),
            "workload": self.forecast.workload.settings(),
        }  # fmt: skip


def whole_model(work: Workload, forecasts: Forecasts) -> WholeModel | None:
    if work.kind != "prune":
        return None
    whole = Workload(
        kind="forward", model=work.model, seq_len=work.seq_len, precision=work.precision, attention=work.attention
    )
    hidden = getattr(load_config(resolve(work.model)), "hidden_size", 0)
    try:
        forecast = forecasts.of(whole)
    except MemfitError:
        return None
    buffers = BUFFERS * work.nsamples * work.seq_len * hidden * BYTES
    guides = pruning_guides(work.settings(), forecast.parameters, hidden)
    return WholeModel(forecast=forecast, buffers_bytes=buffers, guides=tuple(guides))
