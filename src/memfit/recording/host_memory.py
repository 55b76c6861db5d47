"""This process's memory on the host: what is resident now, and the most that ever was."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol


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
