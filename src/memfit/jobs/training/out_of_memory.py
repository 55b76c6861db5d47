"""The end of a training run that does not fit: where memory ran out, and what makes that place smaller.

In the middle of a step a smaller micro-batch helps, and `recovery` tries it. Elsewhere it would not: weights, gradients
and the optimizer's state are as large for one row as for a hundred.
"""

from __future__ import annotations

from typing import Literal

from memfit.errors import MemfitError
from memfit.jobs.training.config import TrainConfig
from memfit.units import gib

Place = Literal["loading", "micro-step", "optimizer", "between"]
WHERE: dict[Place, str] = {
    "loading": "before the first step, while the model was put in its place", "micro-step": "in a micro-step",
    "optimizer": "in the optimizer's step", "between": "between two steps, while a checkpoint was written",
}  # fmt: skip
ADAM = ("adamw", "adamw-fused", "adamw-single")
MOMENTS = 2
"""Adam keeps two numbers for each one that it trains, of its kind."""


class RanOut(MemfitError):
    """A single row at a time is too much, or what does not depend on rows is. Checkpoints are as they were."""


def ran_out(place: Place, cause: str, config: TrainConfig, *, trained_bytes: int, probing: bool) -> RanOut:
    """`trained_bytes`: of the parameters that are trained."""
    where = f"{WHERE[place]} of the probe, before the run began" if probing and place == "optimizer" else WHERE[place]
    if place == "optimizer" and config.optimizer.name in ADAM and trained_bytes:
        where += f" (it keeps {gib(MOMENTS * trained_bytes)} beside the weights)"
    return RanOut(f"memory ran out {where}: {cause}", hint="; ".join(_helps(place, config)))


def _helps(place: Place, config: TrainConfig) -> list[str]:
    offloaded = config.memory.offload
    found = []
    if place == "optimizer":
        if config.optimizer.name == "adamw":
            found.append("optimizer: adamw-fused makes no copy of all gradients")
        if "optimizer" not in offloaded:
            found.append("memory.offload: [optimizer] keeps its state on the host")
    if place == "loading" and config.method.kind == "lora" and "weights" not in offloaded:
        found.append("memory.offload: [weights] keeps frozen layers on the host")
    if config.method.kind == "full":
        found.append("method: lora trains few parameters")
        found.append("parallel: fsdp2 shares them among GPUs")
    found.append("a smaller micro_batch_size would not help; checkpoints are as they were")
    return found
