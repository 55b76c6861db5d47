"""Memory at named moments of a run: printed, kept in a CSV file, summed up at the end.

    with MemoryLog("out/memory_log.csv") as log:
        log.checkpoint("01_start")
        with log.until("02_model_loaded"):       # a checkpoint if it ends well, ERROR! in the log if it does not
            model = load()
        for i, block in enumerate(model.blocks):
            work(block)
            log.part(f"block {i}")               # a peak of its own, in out/memory_log_parts.csv

Every row is in the file before the next line of your code runs, so the log of a killed process ends where it died.
GPU figures are those of torch's allocator in this process; host figures are this process's resident memory. Where there
is no GPU they are n/a, and empty in the file. `GPU Peak` is the peak since the log began. Peaks of stretches and parts
are found by resetting torch's own peak counter at each reading; `reset_peaks=False` leaves that alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Literal

from memfit.core.whole_file import continues_log
from memfit.errors import InputError, MemfitError
from memfit.recording import log_text
from memfit.recording.gpu_memory import GpuReading, GpuSource, find_gpu
from memfit.recording.host_memory import HostSource, ProcessMemory
from memfit.recording.log_text import Checkpoint, Part

Say = Callable[[str], None]


class MemoryLog:
    """Checkpoints of one run. `quiet` prints nothing; `say` takes each text instead of stdout."""

    def __init__(
        self, path: str | Path | None = None, *, quiet: bool = False, say: Say | None = None, append: bool = False,
        gpu: GpuSource | Literal["find"] | None = "find", host: HostSource | None = None, reset_peaks: bool = True,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:  # fmt: skip
        self.path: Path | None = None
        self.points: list[Checkpoint] = []
        self.parts: list[Part] = []
        self._say: Say = (lambda _: None) if quiet else say or _to_stdout
        self._gpu = find_gpu(reset=reset_peaks) if gpu == "find" else gpu
        self._host = host or ProcessMemory()
        self._now, self._append = now, False
        first = self._host.read()
        self._high_water = first.high_water_bytes
        self._peak_host, self._peak_gpu, self._stretch = first.used_bytes, 0, 0
        self._stretch_known = True
        self._towards: str | None = None
        self._part_began = time.perf_counter()
        self._closed = False
        if path is not None:
            self.write_to(path, append=append)

    # -- what the program says of itself

    def checkpoint(self, name: str) -> Checkpoint:
        """Read, print and write down the memory of this moment."""
        return self._reached(name)

    def failed(self, name: str) -> Checkpoint:
        """The run broke on its way here: the memory of that moment."""
        return self._reached(name, failed=True)

    @contextmanager
    def until(self, name: str) -> Iterator[None]:
        """The stretch of work that ends at this checkpoint. If it breaks, the checkpoint is marked as an error; what
        was wrong with the question, a MemfitError, is none of the machine's and not marked."""
        self._towards, self._part_began = name, time.perf_counter()
        try:
            yield
        except MemfitError:
            raise
        except Exception:
            self._reached(name, failed=True)
            raise
        finally:
            self._towards = None
        self._reached(name)

    def part(self, name: str) -> Part:
        """One of many alike has ended: its peak, quietly."""
        now = time.perf_counter()
        gpu, host = self._read_gpu(), self._host.read()
        self._saw_host(host.used_bytes, host.high_water_bytes)
        stage = self._towards or (self.points[-1].name if self.points else "")
        seconds, self._part_began = now - self._part_began, now
        part = Part(stage=stage, name=name, at=self._now(), seconds=seconds, gpu=gpu, host=host)
        self._write_part(part, first=not self.parts)
        self.parts.append(part)
        return part

    def write_to(self, path: str | Path, *, append: bool = False) -> None:
        """From here on to this file too, which gets what there is already; `append` keeps what an earlier run wrote."""
        self.path, self._append = Path(path).absolute(), append
        _begin(self.path, log_text.CSV_HEADER, append)
        for point in self.points:
            self._write(self.path, log_text.csv_row(point))
        for number, part in enumerate(self.parts):
            self._write_part(part, first=number == 0)

    def moved_to(self, path: str | Path) -> None:
        """The folder with the file has been renamed: go on in its new place."""
        if self.path is not None:
            self.path = Path(path).absolute()

    # -- what came of it

    @property
    def peak_gpu_bytes(self) -> int | None:
        """The most that was allocated on the GPU since the log began; None without a GPU."""
        return None if self._gpu is None else self._peak_gpu

    @property
    def peak_host_bytes(self) -> int:
        """The most that was resident since the log began. Between two readings it is known if the process's own
        high-water mark rose; else it was not more than what the readings saw or the process had held before."""
        return self._peak_host

    @property
    def broke(self) -> bool:
        return any(point.failed for point in self.points)

    def summary(self) -> str:
        return log_text.summary(self.points, self.peak_gpu_bytes, self.peak_host_bytes)

    def where_it_broke(self) -> str:
        return log_text.where_it_broke(self.points)

    @staticmethod
    def parts_path(path: Path) -> Path:
        return path.with_name(f"{path.stem}_parts{path.suffix}")

    # -- its end

    def close(self) -> None:
        """Print the summary. Once: a second call does nothing."""
        if self._closed or not self.points:
            return
        self._closed = True
        if self.parts:
            self._say(f"\n{log_text.parts_table(self.parts)}")
        self._say(f"\n{self.summary()}")
        if self.broke:
            self._say(f"\n{self.where_it_broke()}")

    def __enter__(self) -> MemoryLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if isinstance(error, MemfitError):
            return
        if isinstance(error, Exception) and not self.broke:
            self._reached("error", failed=True)
        self.close()

    # -- readings

    def _reached(self, name: str, *, failed: bool = False) -> Checkpoint:
        gpu, host = self._read_gpu(), self._host.read()
        self._saw_host(host.used_bytes, host.high_water_bytes)
        stretch = self._stretch if gpu is not None and self._stretch_known else None
        self._stretch, self._stretch_known = 0, True
        point = Checkpoint(
            name=name, at=self._now(), gpu=gpu, host=host, stretch_peak_bytes=stretch, failed=failed,
        )  # fmt: skip
        self.points.append(point)
        self._write(self.path, log_text.csv_row(point))
        self._say(f"\n{log_text.checkpoint_block(point)}")
        return point

    def _read_gpu(self) -> GpuReading | None:
        if self._gpu is None:
            return None
        reading = self._gpu.read()
        self._peak_gpu = max(self._peak_gpu, reading.peak_bytes)
        if reading.stretch_peak_bytes is None:
            self._stretch_known = False
        else:
            self._stretch = max(self._stretch, reading.stretch_peak_bytes)
        return reading

    def _write(self, path: Path | None, row: str) -> None:
        """Opened anew for each row: nothing stays open or in a buffer. A run does not die of its log."""
        if path is None or self.path is None:
            return
        try:
            with path.open("a", encoding="utf-8", newline="") as file:
                file.write(f"{row}\n")
        except OSError as error:
            self.path = None
            self._say(f"the memory log '{path}' ends here: {error.strerror}")

    def _write_part(self, part: Part, *, first: bool) -> None:
        if self.path is not None:
            if first:
                _begin(self.parts_path(self.path), log_text.PARTS_HEADER, self._append)
            self._write(self.parts_path(self.path), log_text.parts_row(part))

    def _saw_host(self, used: int, high_water: int | None) -> None:
        self._peak_host = max(self._peak_host, used)
        if high_water is not None and self._high_water is not None and high_water > self._high_water:
            self._peak_host = max(self._peak_host, high_water)


def print_gpu_memory_summary() -> None:
    """The GPU's memory as it is now, on stdout. torch's counters are only read."""
    gpu = find_gpu(reset=False)
    _to_stdout(f"\n{log_text.gpu_status(None if gpu is None else gpu.read())}")


def _begin(path: Path, header: str, append: bool) -> None:
    """A log of an earlier run is replaced, or continued; any other file of that name is not touched."""
    try:
        there = continues_log(path, header, "memory log")
        if not (there and append):
            path.write_text(f"{header}\n", encoding="utf-8", newline="")
    except OSError as error:
        raise InputError(f"the memory log '{path}' cannot be written: {error.strerror}") from error


def _to_stdout(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
