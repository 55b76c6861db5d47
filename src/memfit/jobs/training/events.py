"""What a training run tells while it runs. The command line draws a bar from it; the plain text log keeps its lines."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["note", "probe", "start", "step", "checkpoint", "out-of-memory", "growth", "end"]


@dataclass(frozen=True, kw_only=True)
class TrainEvent:
    kind: Kind
    text: str = ""
    """One line for a person; empty where the numbers are enough."""
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    seconds_per_step: float | None = None
    seconds_left: float | None = None
    """By the steps that were measured so far, the first one aside; None before there is a second."""
    data_wait_share: float | None = None
    gpu_peak_bytes: int | None = None
    host_bytes: int | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, "", {})}
