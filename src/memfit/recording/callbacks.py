"""A memory log for anyone's training run: one line in a Hugging Face Trainer or a Lightning one.

    Trainer(..., callbacks=[memfit.trainer_memory("out/memory_log.csv")])
    lightning.Trainer(..., callbacks=[memfit.lightning_memory("out/memory_log.csv")])

A checkpoint is taken at the start, after the first optimizer steps, then every `every` steps, around evaluation and
saving, and at the end. Reading the allocator's counters costs microseconds and never waits for the GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfit.recording.memory_log import MemoryLog

FIRST_STEPS = 3
"""The first step makes the optimizer's state, the second is the first that is typical."""


class _Moments:
    """What both kinds of callback share: which moments of a run are worth a checkpoint."""

    def __init__(self, path: str | Path | None = None, *, every: int = 100, log: MemoryLog | None = None) -> None:
        if every < 1:
            raise ValueError(f"every {every} steps is never")
        self.every = every
        self.log = log or MemoryLog(path, quiet=True)

    def began(self) -> None:
        self.log.checkpoint("train_begin")

    def stepped(self, step: int) -> None:
        if step <= FIRST_STEPS or step % self.every == 0:
            self.log.checkpoint(f"step_{step}")

    def evaluated(self, step: int) -> None:
        self.log.checkpoint(f"step_{step}_after_eval")

    def saved(self, step: int) -> None:
        self.log.checkpoint(f"step_{step}_after_save")

    def ended(self) -> None:
        self.log.checkpoint("train_end")


def trainer_memory(path: str | Path | None = None, *, every: int = 100, log: MemoryLog | None = None) -> Any:
    """A callback for `transformers.Trainer`."""
    from transformers import TrainerCallback

    moments = _Moments(path, every=every, log=log)

    class TrainerMemory(TrainerCallback):  # type: ignore[misc,unused-ignore]
        log = moments.log

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            moments.began()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            moments.stepped(state.global_step)

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            moments.evaluated(state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            moments.saved(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            moments.ended()

    return TrainerMemory()


def lightning_memory(path: str | Path | None = None, *, every: int = 100, log: MemoryLog | None = None) -> Any:
    """A callback for `lightning.Trainer` (or `pytorch_lightning.Trainer`)."""
    try:
        from lightning.pytorch.callbacks import Callback  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        from pytorch_lightning.callbacks import Callback  # type: ignore[import-not-found,unused-ignore]

    moments = _Moments(path, every=every, log=log)

    class LightningMemory(Callback):  # type: ignore[misc,valid-type,unused-ignore]
        log = moments.log

        def on_train_start(self, trainer: Any, module: Any) -> None:
            moments.began()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            moments.stepped(trainer.global_step)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            moments.evaluated(trainer.global_step)

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            moments.saved(trainer.global_step)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            moments.ended()

    return LightningMemory()
