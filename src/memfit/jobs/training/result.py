"""What came of a training run, for a person and as result.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from memfit.core.whole_file import written_whole
from memfit.units import gib

SCHEMA = "memfit.train-result/1"
FILE = "result.json"
MUCH_WAITING = 0.1
FEW = 10


class Expected(Protocol):
    """What a plan says of the run before it starts; None where it does not know."""

    @property
    def peak_bytes(self) -> int | None: ...

    @property
    def reserved_bytes(self) -> int | None: ...

    @property
    def phases(self) -> dict[str, tuple[int, int]]: ...


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    steps: int
    first_step: int
    """The steps that had been done before this run began, by the one that it continued."""
    losses: dict[int, float]
    """Of each step that is known, from the very first on."""
    seconds: float
    tokens: int
    data_wait_share: float
    micro_batch_size: int
    gradient_accumulation_steps: int
    world_size: int
    trained_parameters: int
    parameters: int
    gpu_peak_bytes: int | None
    gpu_reserved_bytes: int | None
    host_peak_bytes: int
    checkpoint: Path
    out_of_memory: tuple[dict[str, Any], ...] = ()
    growth: dict[str, Any] | None = None
    predicted: dict[str, Any] = field(default_factory=dict)
    """By the plan: peak_bytes and reserved_bytes, where there was one."""
    phases: tuple[dict[str, Any], ...] = ()
    """Load, forward, backward and step: what the plan said of each beside what the first steps took."""

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / max(1, self.steps - self.first_step)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def first_loss(self) -> float | None:
        return self._mean_loss(of_the_first=True)

    @property
    def final_loss(self) -> float | None:
        return self._mean_loss(of_the_first=False)

    def _mean_loss(self, *, of_the_first: bool) -> float | None:
        """Of a quarter of the steps, ten at most: a single step's is mostly chance."""
        if not self.losses:
            return None
        count = max(1, min(FEW, len(self.losses) // 4))
        found = [self.losses[step] for step in sorted(self.losses, reverse=not of_the_first)][:count]
        return sum(found) / len(found)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA, "steps": self.steps, "first_step": self.first_step, "final_loss": self.final_loss,
            "losses": {str(step): loss for step, loss in sorted(self.losses.items())},
            "seconds": self.seconds, "seconds_per_step": self.seconds_per_step, "tokens": self.tokens,
            "data_wait_share": self.data_wait_share, "micro_batch_size": self.micro_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps, "world_size": self.world_size,
            "trained_parameters": self.trained_parameters, "parameters": self.parameters,
            "gpu_peak_bytes": self.gpu_peak_bytes, "gpu_reserved_bytes": self.gpu_reserved_bytes,
            "host_peak_bytes": self.host_peak_bytes, "checkpoint": str(self.checkpoint),
            "out_of_memory": list(self.out_of_memory), "growth": self.growth, "predicted": self.predicted,
            "phases": list(self.phases),
        }  # fmt: skip

    def in_lines(self) -> list[str]:
        done = self.steps - self.first_step
        lines = [
            f"trained {done:,} step{'' if done == 1 else 's'} in {self.seconds:,.1f} s, "
            f"{self.seconds_per_step:.2f} s a step, {self.tokens_per_second:,.0f} tokens a second",
            f"trained parameters: {self.trained_parameters:,} of {self.parameters:,}",
        ]
        if self.first_loss is not None and self.final_loss is not None:
            lines.append(f"loss: {self.first_loss:.4f} at first, {self.final_loss:.4f} at the end")
        lines += self._memory()
        if self.data_wait_share > MUCH_WAITING:
            lines.append(f"{self.data_wait_share:.0%} of the time went by waiting for data: a larger num_workers helps")
        for each in self.out_of_memory:
            rows = f"micro_batch_size {each['rows_before']} became {each['rows_after']}"
            where = f"step {each['step']}" if each["step"] else "the probe"
            lines.append(f"memory ran out in {where}: {rows}, at the same global batch")
        if self.growth is not None and self.growth["kind"] != "none":
            lines.append(f"growth: {self.growth['text']}")
        lines.append(f"checkpoint: {self.checkpoint}")
        return lines

    def _memory(self) -> list[str]:
        if self.gpu_peak_bytes is None:
            return [f"memory: host {gib(self.host_peak_bytes)} at most; no GPU"]
        lines = []
        for name, said, measured in (
            ("peak", self.predicted.get("peak_bytes"), self.gpu_peak_bytes),
            ("reserved", self.predicted.get("reserved_bytes"), self.gpu_reserved_bytes),
        ):
            if measured is None:
                continue
            beside = f", predicted {gib(said)} ({(said - measured) / measured:+.1%})" if said and measured else ""
            lines.append(f"GPU {name}: measured {gib(measured)}{beside}")
        return [*lines, *self._by_phase(), f"host: {gib(self.host_peak_bytes)} at most"]

    def _by_phase(self) -> list[str]:
        rows = [each for each in self.phases if each["measured_allocated_bytes"] is not None]
        if not rows:
            return []
        names = ("predicted_allocated", "measured_allocated", "predicted_reserved", "measured_reserved")
        lines = ["by phase    allocated: predicted    measured   reserved: predicted    measured"]
        for each in rows:
            sizes = [gib(each[f"{name}_bytes"]) for name in names]
            lines.append("  {:<10} {:>20} {:>11} {:>21} {:>11}".format(each["phase"], *sizes))
        if self.out_of_memory:
            lines.append("  the plan was for the micro-batch that ran out of memory")
        return lines

    def write(self, folder: Path) -> None:
        with written_whole(folder / FILE) as beside:
            beside.write_text(json.dumps(self.to_json(), indent=1), encoding="utf-8")
