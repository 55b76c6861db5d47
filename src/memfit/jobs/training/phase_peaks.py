"""The most that was allocated and reserved in each phase of the first steps: what a plan is held against.

torch has one counter, so it is read and set back whenever a phase begins or ends. After the first steps nothing is done
any more: a training repeats itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PHASES = ("load", "forward", "backward", "step")
STEPS = 2
"""The first makes the optimizer's state, the second runs with it."""
BETWEEN = ""


class PhasePeaks:
    """`tell` is told of every peak that is read, since the counter no longer knows it then."""

    def __init__(self, *, gpu: bool, tell: Callable[[int, int], None]) -> None:
        self.peaks: dict[str, tuple[int, int]] = {}
        self._on, self._tell, self._phase = gpu, tell, BETWEEN
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """The weights are loaded from here on."""
        if not self._on:
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._hooks = [
            register_optimizer_step_pre_hook(lambda *_: self._enter("step")),
            register_optimizer_step_post_hook(lambda *_: self._enter(BETWEEN)),
        ]
        self._enter("load")

    def reached(self, phase: str, step: int = 0, micro_step: int = 0) -> None:
        """As `MemfitTrainer.reached` says it: forward, backward, end."""
        if self._on:
            self._enter(phase if phase in PHASES else BETWEEN)

    def end(self) -> None:
        if not self._on:
            return
        self._enter(BETWEEN)
        for hook in self._hooks:
            hook.remove()
        self._on = False

    def _enter(self, phase: str) -> None:
        import torch

        counts: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict()
        torch.cuda.reset_peak_memory_stats()
        allocated, reserved = (
            int(counts.get(name, {}).get("all", {}).get("peak", 0)) for name in ("allocated_bytes", "reserved_bytes")
        )
        self._tell(allocated, reserved)
        if self._phase:
            before = self.peaks.get(self._phase, (0, 0))
            self.peaks[self._phase] = max(before[0], allocated), max(before[1], reserved)
        self._phase = phase


def beside(predicted: dict[str, tuple[int, int]], measured: dict[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """A row for each phase that either knows; what is not known is None."""
    rows = []
    for phase in PHASES:
        if phase not in predicted and phase not in measured:
            continue
        said, seen = (each.get(phase, (None, None)) for each in (predicted, measured))
        rows.append({
            "phase": phase, "predicted_allocated_bytes": said[0], "measured_allocated_bytes": seen[0],
            "predicted_reserved_bytes": said[1], "measured_reserved_bytes": seen[1],
        })  # fmt: skip
    return rows
