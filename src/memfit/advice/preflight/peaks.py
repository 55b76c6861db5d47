"""Memory beside the training step: evaluation that gathers logits, and saving that copies weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memfit.advice.preflight.finding import CannotTell, Finding, Line
from memfit.advice.preflight.situation import Situation
from memfit.advice.preflight.sizes import checkpoint_bytes, loading_bytes
from memfit.jobs.training.config import DataConfig
from memfit.recording.machine import host_memory
from memfit.units import gib

EVALUATION, SAVING = Line("config", "evaluation peak"), Line("config", "saving peak")
EVALUATED_ROWS = 100
FP32_BYTES = 4


def evaluation(situation: Situation) -> Iterator[Finding]:
    words = getattr(getattr(situation.shapes.needed(), "config", None), "vocab_size", None)
    if not isinstance(words, int):
        raise CannotTell("the model does not say how many words it knows")
    workload = situation.asked.workload
    data: DataConfig = situation.config.data
    length = data.max_seq_len if workload is None else workload.seq_len
    size = EVALUATED_ROWS * length * words * FP32_BYTES
    gathered = f"the fp32 logits of {EVALUATED_ROWS} rows of {length:,} tokens are {gib(size)}"
    details: dict[str, Any] = {"rows": EVALUATED_ROWS, "logits_bytes": size}
    if workload is not None and workload.loop == "trainer":
        yield EVALUATION.warning(
            f"the Trainer gathers logits over an evaluation: {gathered}",
            "prediction_loss_only=True, or eval_accumulation_steps=1 to move them to the host", **details,
        )  # fmt: skip
        return
    yield EVALUATION.ok(f"nothing is evaluated during the run; {gathered}, which nobody gathers here", **details)


def saving(situation: Situation) -> Iterator[Finding]:
    model, config = situation.shapes.needed(), situation.config
    written = checkpoint_bytes(model, config)
    if config.parallel.kind == "fsdp2" and situation.asked.world_size > 1:
        whole, host = loading_bytes(model), host_memory()
        unused = host["total_bytes"] - host["used_bytes"]
        found = f"fsdp2 gathers the weights for a checkpoint, {gib(whole)} on the host of the first process"
        details: dict[str, Any] = {"gathered_bytes": whole, "free_bytes": unused}
        if whole > unused:
            yield SAVING.warning(f"{found}, which has {gib(unused)} free here", "a host with more memory", **details)
        else:
            yield SAVING.ok(f"{found}, which has {gib(unused)} free here", **details)
        return
    yield SAVING.ok(f"{gib(written)} are copied to the host and written from there: no copy on the GPU", bytes=written)
