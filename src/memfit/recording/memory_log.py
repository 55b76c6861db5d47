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

Blocks, table and CSV have the form that people and scripts already know. "GB" in it is 2^30 bytes;
everywhere else memfit writes GiB. What is not known is `n/a`, and an empty cell in the CSV.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from memfit.errors import InputError, MemfitError
from memfit.files import continues_log
from memfit.recording.sampler import GpuReading, GpuSource, HostReading, HostSource, ProcessMemory, find_gpu
from memfit.units import GiB

WIDTH = 80
RULE, THIN = "=" * WIDTH, "-" * WIDTH
CSV_HEADER = "Timestamp,Checkpoint,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,CPU_Percent"
PARTS_HEADER = "Timestamp,Stage,Part,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,Seconds"
FAILED = "ERROR!"
UNKNOWN = "n/a"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMoment:
    """One named moment of a run."""

    name: str
    at: datetime
    gpu: GpuReading | None
    host: HostReading
    stretch_peak_bytes: int | None
    """GPU memory: the most that was allocated since the checkpoint before this one."""
    failed: bool = False
    """The run broke on its way here: these are the figures of that moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """One of many alike within a stage, such as a block of the model."""

    stage: str
    name: str
    at: datetime
    seconds: float
    gpu: GpuReading | None
    host: HostReading


def checkpoint_block(point: LogMoment) -> str:
    host = point.host
    lines = [
        RULE, f"Memory Checkpoint: {point.name}{f' {FAILED}' if point.failed else ''}", RULE,
        "GPU Memory:", *(f"  {line}" for line in _gpu_lines(point.gpu)),
        "CPU Memory:", f"  Used:      {_gb(host.used_bytes)} ({host.percent:.1f}%)", RULE,
    ]  # fmt: skip
    return "\n".join(lines)


def gpu_status(gpu: GpuReading | None) -> str:
    usage = UNKNOWN if gpu is None else f"{100 * gpu.allocated_bytes / gpu.total_bytes:.1f}%"
    return "\n".join([RULE, "GPU MEMORY STATUS", RULE, *_gpu_lines(gpu), f"Usage:     {usage}", RULE])


def csv_row(point: LogMoment) -> str:
    host, cells = point.host, _gpu_cells(point.gpu, None if point.gpu is None else point.gpu.peak_bytes)
    name = f"{point.name} {FAILED}" if point.failed else point.name
    return ",".join([_stamp(point.at), _quoted(name), *cells, _gb3(host.used_bytes), f"{host.percent:.2f}"])


def parts_row(part: StagePart) -> str:
    named = (_stamp(part.at), _quoted(part.stage), _quoted(part.name))
    cells = _gpu_cells(part.gpu, None if part.gpu is None else part.gpu.stretch_peak_bytes)
    return ",".join([*named, *cells, _gb3(part.host.used_bytes), f"{part.seconds:.3f}"])


def _gpu_cells(gpu: GpuReading | None, peak_bytes: int | None) -> tuple[str, str, str]:
    return ("", "", "") if gpu is None else (_gb3(gpu.allocated_bytes), _gb3(gpu.reserved_bytes), _gb3(peak_bytes))


def parts_table(parts: Sequence[StagePart]) -> str:
    """Peaks of the parts. Parts in a row whose figures read the same are one line."""
    lines = [RULE, "PEAK OF EACH PART", RULE, f"{'Part':<30} {'GPU Alloc':<12} {'GPU Peak':<12} CPU Used", THIN]

    def figures(part: StagePart) -> str:
        peak = None if part.gpu is None else part.gpu.stretch_peak_bytes
        return _row(_allocated(part.gpu), peak, part.host.used_bytes)

    for row, alike in groupby(parts, figures):
        first, *others = (part.name for part in alike)
        lines.append(f"{f'{first} ... {others[-1]}' if others else first:<30} {row}")
    return "\n".join([*lines, RULE])


def predicted_and_measured(rows: Iterable[tuple[str, int | None, int | None]]) -> str:
    lines = [RULE, "PREDICTED AND MEASURED", RULE, f"{'Peak':<30} {'Predicted':<12} {'Measured':<12} Difference", THIN]
    for name, predicted, measured in rows:
        off = UNKNOWN
        if predicted is not None and measured:
            off = f"{100 * (predicted - measured) / measured:+.1f}%"
        lines.append(f"{name:<30} {_gb(predicted):>12} {_gb(measured):>13} {off:>13}")
    return "\n".join([*lines, RULE])


def _gpu_lines(gpu: GpuReading | None) -> list[str]:
    names = ("allocated", "reserved", "peak", "free", "total")
    return [f"{f'{name.title()}:':<11}{_gb(getattr(gpu, f'{name}_bytes', None))}" for name in names]


def _summary_row(point: LogMoment) -> str:
    peak = None if point.gpu is None else point.gpu.peak_bytes
    figures = _row(_allocated(point.gpu), peak, point.host.used_bytes)
    if point.failed:
        figures = f"{FAILED:>12}{figures[12:]}"
    return f"{point.name:<30} {figures}"


def _row(allocated: int | None, peak: int | None, host: int) -> str:
    return f"{_gb(allocated):>12} {_gb(peak):>13} {_gb(host):>13}"


def _allocated(gpu: GpuReading | None) -> int | None:
    return None if gpu is None else gpu.allocated_bytes


def _gb(count: int | None) -> str:
    return UNKNOWN if count is None else f"{count / GiB:.2f} GB"


def _gb3(count: int | None) -> str:
    return "" if count is None else f"{count / GiB:.3f}"


def _stamp(at: datetime) -> str:
    return at.replace(tzinfo=None).isoformat(timespec="seconds")


def _quoted(text: str) -> str:
    """A name is the user's own text: it must stay one cell."""
    text = " ".join(text.split("\n"))
    return f'"{text.replace(chr(34), chr(34) * 2)}"' if any(c in text for c in ',"\r') else text


Say = Callable[[str], None]


class MemoryLog:
    """Checkpoints of one run. `quiet` prints nothing; `say` takes each text instead of stdout."""

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        quiet: bool = False,
        say: Say | None = None,
        append: bool = False,
        gpu: GpuSource | Literal["find"] | None = "find",
        host: HostSource | None = None,
        reset_peaks: bool = True,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.path: Path | None = None
        self.points: list[LogMoment] = []
        self.parts: list[StagePart] = []
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

    def checkpoint(self, name: str) -> LogMoment:
        """Read, print and write down the memory of this moment."""
        return self._reached(name)

    def failed(self, name: str) -> LogMoment:
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

    def part(self, name: str) -> StagePart:
        """One of many alike has ended: its peak, quietly."""
        now = time.perf_counter()
        gpu, host = self._read_gpu(), self._host.read()
        self._saw_host(host.used_bytes, host.high_water_bytes)
        stage = self._towards or (self.points[-1].name if self.points else "")
        seconds, self._part_began = now - self._part_began, now
        part = StagePart(stage=stage, name=name, at=self._now(), seconds=seconds, gpu=gpu, host=host)
        self._write_part(part, first=not self.parts)
        self.parts.append(part)
        return part

    def write_to(self, path: str | Path, *, append: bool = False) -> None:
        """From here on to this file too, which gets what there is already; `append` keeps what an earlier run wrote."""
        self.path, self._append = Path(path).absolute(), append
        _begin(self.path, CSV_HEADER, append)
        for point in self.points:
            self._write(self.path, csv_row(point))
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
        header = f"{'Checkpoint':<30} {'GPU Alloc':<12} {'GPU Peak':<12} CPU Used"
        lines = [RULE, "MEMORY USAGE SUMMARY", RULE, header, THIN, *(_summary_row(point) for point in self.points)]
        peaks = f"Peak GPU Memory: {_gb(self.peak_gpu_bytes)}", f"Peak CPU Memory: {_gb(self.peak_host_bytes)}"
        return "\n".join([*lines, RULE, "", *peaks, RULE])

    def where_it_broke(self) -> str:
        """`04_after_pruning:  ERROR!`, below what was allocated at the checkpoints before."""
        wide = max(len(point.name) for point in self.points) + 2
        return "\n".join(
            f"{f'{point.name}:':<{wide}}{FAILED if point.failed else _gb(_allocated(point.gpu))}"
            for point in self.points
        )

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
            self._say(f"\n{parts_table(self.parts)}")
        self._say(f"\n{self.summary()}")
        if self.broke:
            self._say(f"\n{self.where_it_broke()}")

    def __enter__(self) -> MemoryLog:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if isinstance(error, MemfitError):
            return
        if isinstance(error, Exception) and not self.broke:
            self._reached("error", failed=True)
        self.close()

    # -- readings

    def _reached(self, name: str, *, failed: bool = False) -> LogMoment:
        gpu, host = self._read_gpu(), self._host.read()
        self._saw_host(host.used_bytes, host.high_water_bytes)
        stretch = self._stretch if gpu is not None and self._stretch_known else None
        self._stretch, self._stretch_known = 0, True
        point = LogMoment(name=name, at=self._now(), gpu=gpu, host=host, stretch_peak_bytes=stretch, failed=failed)
        self.points.append(point)
        self._write(self.path, csv_row(point))
        self._say(f"\n{checkpoint_block(point)}")
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

    def _write_part(self, part: StagePart, *, first: bool) -> None:
        if self.path is not None:
            if first:
                _begin(self.parts_path(self.path), PARTS_HEADER, self._append)
            self._write(self.parts_path(self.path), parts_row(part))

    def _saw_host(self, used: int, high_water: int | None) -> None:
        self._peak_host = max(self._peak_host, used)
        if high_water is not None and self._high_water is not None and high_water > self._high_water:
            self._peak_host = max(self._peak_host, high_water)


def print_gpu_memory_summary() -> None:
    """The GPU's memory as it is now, on stdout. torch's counters are only read."""
    gpu = find_gpu(reset=False)
    _to_stdout(f"\n{gpu_status(None if gpu is None else gpu.read())}")


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


FIRST_STEPS = 3
"""The first step makes the optimizer's state, the second is the first that is typical."""


BEGIN, STEP, EVALUATED, SAVED, END = (
    "train_begin", "step_{}", "step_{}_after_eval", "step_{}_after_save", "train_end",
)  # fmt: skip
"""The moments of a training that are worth a checkpoint."""


def trainer_memory(path: str | Path | None = None, *, every: int = 100, log: MemoryLog | None = None) -> Any:
    """A callback for `transformers.Trainer`."""
    from transformers import TrainerCallback

    hooks = {
        "on_train_begin": BEGIN, "on_step_end": STEP, "on_evaluate": EVALUATED, "on_save": SAVED, "on_train_end": END,
    }  # fmt: skip
    step_of = lambda args, state, control: state.global_step  # noqa: E731
    return _callback("TrainerMemory", TrainerCallback, hooks, step_of, every, log or MemoryLog(path, quiet=True))


def lightning_memory(path: str | Path | None = None, *, every: int = 100, log: MemoryLog | None = None) -> Any:
    """A callback for `lightning.Trainer` (or `pytorch_lightning.Trainer`)."""
    try:
        from lightning.pytorch.callbacks import Callback  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        from pytorch_lightning.callbacks import Callback  # type: ignore[import-not-found,unused-ignore]

    hooks = {
        "on_train_start": BEGIN, "on_train_batch_end": STEP, "on_validation_end": EVALUATED,
        "on_save_checkpoint": SAVED, "on_train_end": END,
    }  # fmt: skip
    step_of = lambda trainer, *_: trainer.global_step  # noqa: E731
    return _callback("LightningMemory", Callback, hooks, step_of, every, log or MemoryLog(path, quiet=True))


def _callback(
    name: str, base: Any, hooks: Mapping[str, str], step_of: Callable[..., int], every: int, log: MemoryLog
) -> Any:
    """With a checkpoint at each hook, by the moment that it is; of the steps, at the first ones and `every` so many."""
    if every < 1:
        raise ValueError(f"every {every} steps is never")

    def at(moment: str) -> Callable[..., None]:
        def reached(_: Any, *given: Any, **__: Any) -> None:
            step = step_of(*given)
            if moment != STEP or step <= FIRST_STEPS or step % every == 0:
                log.checkpoint(moment.format(step))

        return reached

    return type(name, (base,), {"log": log, **{hook: at(moment) for hook, moment in hooks.items()}})()
