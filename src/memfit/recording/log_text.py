"""The memory log as text: the blocks, the table and the CSV in the form that people and scripts already know.

"GB" in it is 2^30 bytes, as in the log that this follows; everywhere else memfit writes GiB. What is not known is
`n/a`, and an empty cell in the CSV.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from memfit.recording.gpu_memory import GpuReading
from memfit.recording.host_memory import HostReading
from memfit.units import GiB

WIDTH = 80
RULE, THIN = "=" * WIDTH, "-" * WIDTH
CSV_HEADER = "Timestamp,Checkpoint,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,CPU_Percent"
PARTS_HEADER = "Timestamp,Stage,Part,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,Seconds"
FAILED = "ERROR!"
UNKNOWN = "n/a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
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
class Part:
    """One of many alike within a stage, such as a block of the model."""

    stage: str
    name: str
    at: datetime
    seconds: float
    gpu: GpuReading | None
    host: HostReading


def checkpoint_block(point: Checkpoint) -> str:
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


def summary(points: Sequence[Checkpoint], peak_gpu: int | None, peak_host: int | None) -> str:
    header = f"{'Checkpoint':<30} {'GPU Alloc':<12} {'GPU Peak':<12} CPU Used"
    lines = [RULE, "MEMORY USAGE SUMMARY", RULE, header, THIN, *(_summary_row(point) for point in points)]
    lines += [RULE, "", f"Peak GPU Memory: {_gb(peak_gpu)}", f"Peak CPU Memory: {_gb(peak_host)}", RULE]
    return "\n".join(lines)


def where_it_broke(points: Sequence[Checkpoint]) -> str:
    """`04_after_pruning:  ERROR!`, below what was allocated at the checkpoints before."""
    wide = max(len(point.name) for point in points) + 2
    return "\n".join(
        f"{f'{point.name}:':<{wide}}{FAILED if point.failed else _gb(_allocated(point.gpu))}" for point in points
    )


def csv_row(point: Checkpoint) -> str:
    gpu, host = point.gpu, point.host
    cells = ("", "", "") if gpu is None else (_gb3(gpu.allocated_bytes), _gb3(gpu.reserved_bytes), _gb3(gpu.peak_bytes))
    name = f"{point.name} {FAILED}" if point.failed else point.name
    return ",".join([_stamp(point.at), _quoted(name), *cells, _gb3(host.used_bytes), f"{host.percent:.2f}"])


def parts_row(part: Part) -> str:
    gpu, cells = part.gpu, ("", "", "")
    if gpu is not None:
        cells = (_gb3(gpu.allocated_bytes), _gb3(gpu.reserved_bytes), _gb3(gpu.stretch_peak_bytes))
    named = (_stamp(part.at), _quoted(part.stage), _quoted(part.name))
    return ",".join([*named, *cells, _gb3(part.host.used_bytes), f"{part.seconds:.3f}"])


def parts_table(parts: Sequence[Part]) -> str:
    """Peaks of the parts. Parts in a row whose figures read the same are one line."""
    lines = [RULE, "PEAK OF EACH PART", RULE, f"{'Part':<30} {'GPU Alloc':<12} {'GPU Peak':<12} CPU Used", THIN]
    alike: list[tuple[str, list[Part]]] = []
    for part in parts:
        peak = None if part.gpu is None else part.gpu.stretch_peak_bytes
        row = _row(_allocated(part.gpu), peak, part.host.used_bytes)
        if alike and alike[-1][0] == row:
            alike[-1][1].append(part)
        else:
            alike.append((row, [part]))
    for row, same in alike:
        name = same[0].name if len(same) == 1 else f"{same[0].name} ... {same[-1].name}"
        lines.append(f"{name:<30} {row}")
    return "\n".join([*lines, RULE])


def predicted_and_measured(rows: Iterable[tuple[str, int | None, int | None]]) -> str:
    lines = [RULE, "PREDICTED AND MEASURED", RULE, f"{'Peak':<30} {'Predicted':<12} {'Measured':<12} Difference", THIN]
    for name, predicted, measured in rows:
        off = UNKNOWN
        if predicted is not None and measured:
            off = f"{100 * (predicted - measured) / measured:+.1f}%"
        lines.append(f"{name:<30} {_right(predicted, 12)} {_right(measured, 13)} {off:>13}")
    return "\n".join([*lines, RULE])


def _gpu_lines(gpu: GpuReading | None) -> list[str]:
    names = ("Allocated:", "Reserved:", "Peak:", "Free:", "Total:")
    if gpu is None:
        values: tuple[int | None, ...] = (None,) * len(names)
    else:
        values = (gpu.allocated_bytes, gpu.reserved_bytes, gpu.peak_bytes, gpu.free_bytes, gpu.total_bytes)
    return [f"{name:<11}{_gb(value)}" for name, value in zip(names, values, strict=True)]


def _summary_row(point: Checkpoint) -> str:
    peak = None if point.gpu is None else point.gpu.peak_bytes
    figures = _row(_allocated(point.gpu), peak, point.host.used_bytes)
    if point.failed:
        figures = f"{FAILED:>12}{figures[12:]}"
    return f"{point.name:<30} {figures}"


def _row(allocated: int | None, peak: int | None, host: int) -> str:
    return f"{_right(allocated, 12)} {_right(peak, 13)} {_right(host, 13)}"


def _right(count: int | None, width: int) -> str:
    return f"{_gb(count):>{width}}"


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
