"""The memory log of a training run: a row at its beginning, at every logging step, and where it ends or breaks.

Only the first process keeps one. torch has a single counter of peaks, and the run's own watch sets it back after every
step: `GPU Peak` comes from there.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from memfit.errors import InputError
from memfit.jobs.training.preparation import TrainJob
from memfit.recording.gpu_memory import GpuReading, GpuSource, find_gpu
from memfit.recording.growth import GrowthWatch
from memfit.recording.memory_log import MemoryLog

FILE = "memory_log.csv"


class WatchedGpu:
    """The counters as they are, with the peak that the run's watch has seen."""

    def __init__(self, gpu: GpuSource, watch: GrowthWatch) -> None:
        self._gpu, self._watch = gpu, watch

    def read(self) -> GpuReading:
        now = self._gpu.read()
        peak = max(now.peak_bytes, self._watch.peak_bytes or 0)
        return dataclasses.replace(now, peak_bytes=peak, stretch_peak_bytes=None)


def open_memory_log(job: TrainJob, watch: GrowthWatch, *, gpu: bool) -> MemoryLog | None:
    """None where none is wanted. A run that goes on from a checkpoint goes on with its log."""
    wanted = job.config.logging.memory_log
    if not wanted:
        return None
    path = job.output_dir / FILE if wanted is True else Path(wanted).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"logging.memory_log '{path}' cannot be written: {error.strerror}") from error
    card = find_gpu(reset=False) if gpu else None
    source = None if card is None else WatchedGpu(card, watch)
    return MemoryLog(path, quiet=True, append=job.resume_from is not None, gpu=source)
