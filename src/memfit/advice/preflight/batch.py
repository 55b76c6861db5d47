"""Whether the global batch is exactly what the config says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memfit.advice.preflight.finding import Finding, Line
from memfit.advice.preflight.situation import Situation
from memfit.jobs.training.processes import processes

BATCH = Line("config", "global batch")
SHOWN = 8


def global_batch(situation: Situation) -> Iterator[Finding]:
    sizes, config = situation.batch.get(), situation.config.batch
    rungs = ", ".join(str(rows) for rows in sizes.rungs[:SHOWN]) + (", ..." if len(sizes.rungs) > SHOWN else "")
    details: dict[str, Any] = {**sizes.to_json(), "rungs": list(sizes.rungs)}
    if situation.asked.workload is not None:
        yield BATCH.ok(f"{sizes.in_words()}; micro-batches that keep it: {rungs}", **details)
        return
    if config.global_batch_size is None:
        yield BATCH.ok(
            f"{sizes.in_words()}; not stated, so it changes with the number of GPUs",
            f"global_batch_size: {sizes.global_batch_size} keeps it", **details,
        )  # fmt: skip
        return
    start = f"start it under torchrun --nproc_per_node={sizes.world_size}" if sizes.world_size > processes() else None
    yield BATCH.ok(f"{sizes.in_words()}, as stated; micro-batches that keep it: {rungs}", start, **details)
