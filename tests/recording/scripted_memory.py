"""Sources that read out a script instead of a machine: GB in, as the log prints them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from memfit.recording.sampler import GpuReading, HostReading
from memfit.units import GiB


def gb(size: float) -> int:
    return round(size * GiB)


class ScriptedGpu:
    """Each reading is (allocated, reserved, peak since the reading before); the overall peak follows from those."""

    def __init__(self, *readings: tuple[float, float, float], total: float = 15.47) -> None:
        self.readings = list(readings)
        self.total = total
        self.peak = 0

    def read(self) -> GpuReading:
        allocated, reserved, stretch = self.readings.pop(0)
        self.peak = max(self.peak, gb(stretch))
        return GpuReading(
            allocated_bytes=gb(allocated), reserved_bytes=gb(reserved), peak_bytes=self.peak,
            stretch_peak_bytes=gb(stretch), total_bytes=gb(self.total),
        )  # fmt: skip


class ScriptedHost:
    """The first value is read when the log begins. The last one stays."""

    def __init__(self, *used: float, total: float = 40.0, high_water: Iterable[float] | None = None) -> None:
        self.used = list(used)
        self.total = total
        self.high_water = None if high_water is None else list(high_water)

    def read(self) -> HostReading:
        used = self.used.pop(0) if len(self.used) > 1 else self.used[0]
        mark = None
        if self.high_water is not None:
            mark = gb(self.high_water.pop(0) if len(self.high_water) > 1 else self.high_water[0])
        return HostReading(used_bytes=gb(used), total_bytes=gb(self.total), high_water_bytes=mark)


class Clock:
    def __init__(self, *seconds: int) -> None:
        self.seconds = list(seconds)

    def __call__(self) -> datetime:
        return datetime(2025, 12, 28, 0, 15, 0, 999_000) + timedelta(seconds=self.seconds.pop(0))
