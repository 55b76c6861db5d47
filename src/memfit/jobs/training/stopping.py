"""Ctrl-C, and SIGTERM as schedulers send it: the step that runs is finished and saved, and the run ends there.

A second one ends it at once, and then what was trained since the last checkpoint is lost.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from memfit.errors import MemfitError
from memfit.jobs.training.preparation import TrainJob

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(MemfitError):
    """As somebody asked for. What was trained is in a checkpoint."""


def stopped(step: int, job: TrainJob) -> Stopped:
    folder = job.output_dir / f"step_{step}"
    return Stopped(
        f"stopped after step {step:,} of {job.total_steps:,}, which is saved", hint=f"--resume_from {folder} goes on"
    )


class StopRequest:
    """Whether one came while this was open. Only a program's first thread hears of signals."""

    def __init__(self) -> None:
        self.came = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            heeded = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
            self._before = {each: signal.signal(each, self._hear) for each in heeded}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
