"""The memory levers of a model's blocks, switched on before it goes to its device: the same for a plan and a run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from torch import nn

from memfit.jobs.training.block_checkpointing import checkpoint_blocks
from memfit.jobs.training.offload.activations import ActivationsOnHost
from memfit.jobs.training.offload.weights import FrozenWeightsOnHost

Checkpointing = Literal["none", "full", "selective"]


def use_block_levers(
    model: nn.Module, *, checkpointing: Checkpointing, offload: Collection[str], adapters: bool, setting: str
) -> None:
    """`setting` is how the user asked for checkpointing."""
    on_host = ActivationsOnHost() if "activations" in offload else None
    if checkpointing != "none":
        selective = checkpointing == "selective"
        checkpoint_blocks(model, setting=setting, frozen=adapters, selective=selective, on_host=on_host)
    elif on_host is not None:
        on_host.watch_blocks(model)
    if "weights" in offload:
        FrozenWeightsOnHost(model)
