"""Models of the same kind that have fewer weights, for a job whose own model is too large for a card."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.jobs.workload import Workload
from memfit.models.presets import find_preset, presets

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def smaller_models(work: Workload, room: int) -> Iterator[str]:
    """The largest first; none whose weights alone are more than there is room for."""
    here = find_preset(work.model)
    if here is None:
        return
    alike = [each for each in presets() if each.model_type == here.model_type and each.parameters < here.parameters]
    for preset in sorted(alike, key=lambda each: (-each.parameters, each.name)):
        if not _has_all_weights_on_the_card(work) or preset.parameters * BYTES[work.weight_precision] <= room:
            yield preset.name


def _has_all_weights_on_the_card(work: Workload) -> bool:
    sharded = work.trains and work.world_size > 1 and work.parallel == "fsdp2"
    return work.kind != "prune" and not sharded and "weights" not in (work.offload or ())
