"""Memory over time, sampled beside the work: the driver's view and torch's, and this process's host memory.

    with Sampler(interval=0.1) as sampler:
        train()
    sampler.save_csv("memory.csv")

A sample costs some 50 microseconds in a thread of its own and never touches a stream, so the work does not wait for it.

torch keeps one peak, since it was last reset. To know the peak of each stretch of a run the counter has to be reset at
every reading, and then the peak of the whole run is gone; so the source remembers that one itself. Where another
program depends on torch's own counter, `reset=False` leaves it alone, and a stretch's peak is known only if it rose.
"""

from __future__ import annotations

import csv
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from memfit.files import written_whole
from memfit.recording.machine import NoNvml, gpu_of_torch_device, nvml


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

    def __exit__(self, *_: object) -> None:
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
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            host_bytes=process.memory_info().rss,
        )


def _torch_counts(device: int) -> tuple[int | None, int | None]:
    """Only if the program itself uses torch on a GPU: sampling must not start CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None, None
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    """The most that was allocated in this process: since it began, or since an earlier source was last read."""
    stretch_peak_bytes: int | None
    """The most that was allocated since the reading before this one; None if torch's counter does not tell."""
    total_bytes: int

    @property
    def free_bytes(self) -> int:
        """What this process's tensors leave of the card. Not what the driver has free: other processes count not."""
        return self.total_bytes - self.allocated_bytes


class GpuSource(Protocol):
    def read(self) -> GpuReading: ...


_wiped: dict[int, int] = {}
"""The highest peak of each GPU that a reset took from torch's counter: who only looks is told of it."""


class AllocatorCounts(NamedTuple):
    """Of torch's allocator on one GPU: bytes now, and at most since the peaks were last set back."""

    allocated: int
    reserved: int
    allocated_peak: int
    reserved_peak: int
    retries: int
    """Times that it had to give back its cache to find room."""


def allocator_counts(device: int | None = None) -> AllocatorCounts:
    import torch

    # Nested as torch keeps them: to flatten them all takes five times as long as to read them.
    counts: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)
    both = [counts.get(name, {}).get("all", {}) for name in ("allocated_bytes", "reserved_bytes")]
    figures = [int(each.get(figure, 0)) for figure in ("current", "peak") for each in both]
    return AllocatorCounts._make([*figures, int(counts.get("num_alloc_retries", 0))])


class CudaMemory:
    """The counters of `cuda:index`. Reading them takes microseconds and waits for no stream."""

    def __init__(self, index: int | None = None, *, reset: bool = True) -> None:
        import torch

        self.index = torch.cuda.current_device() if index is None else index
        self.reset = reset
        self._total = int(torch.cuda.get_device_properties(self.index).total_memory)
        self._peak = 0

    def read(self) -> GpuReading:
        import torch

        counts = allocator_counts(self.index)
        peak = counts.allocated_peak
        rose = peak > self._peak
        self._peak = max(self._peak, peak)
        if self.reset:
            torch.cuda.reset_peak_memory_stats(self.index)
            _wiped[self.index] = max(_wiped.get(self.index, 0), peak)
        else:
            self._peak = max(self._peak, _wiped.get(self.index, 0))
        return GpuReading(
            allocated_bytes=counts.allocated,
            reserved_bytes=counts.reserved,
            peak_bytes=self._peak,
            stretch_peak_bytes=peak if self.reset or rose else None,
            total_bytes=self._total,
        )


def find_gpu(*, reset: bool = True) -> CudaMemory | None:
    """The GPU that torch would use; None where there is none, or no torch."""
    try:
        import torch
    except ImportError:
        return None
    return CudaMemory(reset=reset) if torch.cuda.is_available() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    used_bytes: int
    """Resident memory of this process. Pages of files that it has mapped count, as they do in `top`."""
    total_bytes: int
    """Memory of the machine."""
    high_water_bytes: int | None
    """The most that was ever resident in this process; None where the system does not tell."""

    @property
    def percent(self) -> float:
        return 100 * self.used_bytes / self.total_bytes


class HostSource(Protocol):
    def read(self) -> HostReading: ...


class ProcessMemory:
    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._total = int(psutil.virtual_memory().total)

    def read(self) -> HostReading:
        used = int(self._process.memory_info().rss)
        high = _high_water()
        # Both are kept in pages by different counters, so the mark may lag behind by some.
        return HostReading(
            used_bytes=used, total_bytes=self._total, high_water_bytes=None if high is None else max(high, used)
        )


def _high_water() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return most if sys.platform == "darwin" else most << 10
