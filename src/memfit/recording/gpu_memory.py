"""What torch's allocator says of one GPU, and peaks between two readings.

torch keeps one peak, since it was last reset. To know the peak of each stretch of a run the counter has to be reset at
every reading, and then the peak of the whole run is gone; so the source remembers that one itself. Where another
program depends on torch's own counter, `reset=False` leaves it alone, and a stretch's peak is known only if it rose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


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

        # Nested as torch keeps them: to flatten them all takes five times as long as to read them.
        counts: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self.index)
        allocated, reserved = (counts.get(name, {}).get("all", {}) for name in ("allocated_bytes", "reserved_bytes"))
        peak = int(allocated.get("peak", 0))
        rose = peak > self._peak
        self._peak = max(self._peak, peak)
        if self.reset:
            torch.cuda.reset_peak_memory_stats(self.index)
            _wiped[self.index] = max(_wiped.get(self.index, 0), peak)
        else:
            self._peak = max(self._peak, _wiped.get(self.index, 0))
        return GpuReading(
            allocated_bytes=int(allocated.get("current", 0)),
            reserved_bytes=int(reserved.get("current", 0)),
            peak_bytes=self._peak, stretch_peak_bytes=peak if self.reset or rose else None, total_bytes=self._total,
        )  # fmt: skip


def find_gpu(*, reset: bool = True) -> CudaMemory | None:
    """The GPU that torch would use; None where there is none, or no torch."""
    try:
        import torch
    except ImportError:
        return None
    return CudaMemory(reset=reset) if torch.cuda.is_available() else None
