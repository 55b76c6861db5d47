"""Memory over time, sampled beside the work: the driver's view and torch's, and this process's host memory.

    with Sampler(interval=0.1) as sampler:
        train()
    sampler.save_csv("memory.csv")

A sample costs some 50 microseconds in a thread of its own and never touches a stream, so the work does not wait for it.
"""

from __future__ import annotations

import csv
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from memfit.core.whole_file import written_whole
from memfit.recording.nvml import NoNvml, gpu_of_torch_device, nvml


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    time_s: float
    device_used_bytes: int | None
    """All processes together, as the driver counts."""
    allocated_bytes: int | None
    reserved_bytes: int | None
    host_bytes: int


class Sampler:
    """Takes a sample every `interval` seconds between start and stop. What cannot be read is None."""

    def __init__(self, interval: float = 0.1, *, device: int = 0, max_samples: int = 1_000_000) -> None:
        if not interval > 0:
            raise ValueError(f"an interval of {interval} seconds is none")
        self.interval, self.device, self.max_samples = interval, device, max_samples
        self.samples: list[Sample] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError("this sampler already runs")
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="memfit-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    @property
    def peak(self) -> Sample | None:
        """The sample with the most memory in use on the device, or on the host where no GPU is seen."""
        key = lambda s: (s.device_used_bytes or 0, s.reserved_bytes or 0, s.host_bytes)  # noqa: E731
        return max(self.samples, key=key, default=None)

    def save_csv(self, path: str | Path) -> None:
        with written_whole(path) as beside, beside.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(field.name for field in fields(Sample))
            writer.writerows(["" if value is None else value for value in astuple(each)] for each in self.samples)

    def _run(self) -> None:
        import psutil

        process = psutil.Process()
        with ExitStack() as stack:
            library = handle = None
            with suppress(NoNvml):
                library = stack.enter_context(nvml())
                handle = gpu_of_torch_device(library, self.device)
            started = time.monotonic()
            while True:
                self.samples.append(self._sample(time.monotonic() - started, library, handle, process))
                if self._stop.wait(self.interval) or len(self.samples) >= self.max_samples:
                    break
            self.samples.append(self._sample(time.monotonic() - started, library, handle, process))

    def _sample(self, at: float, library: Any, handle: Any, process: Any) -> Sample:
        allocated, reserved = _torch_counts(self.device)
        return Sample(
            time_s=round(at, 6),
            device_used_bytes=None if handle is None else int(library.nvmlDeviceGetMemoryInfo(handle).used),
            allocated_bytes=allocated, reserved_bytes=reserved, host_bytes=process.memory_info().rss,
        )  # fmt: skip


def _torch_counts(device: int) -> tuple[int | None, int | None]:
    """Only if the program itself uses torch on a GPU: sampling must not start CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None, None
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
