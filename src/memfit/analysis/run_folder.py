"""The folder of a run as a document (memfit.run/1): its memory log, peaks beside the plan's, losses, growth.

A run that is still going has only its logs: they are read as far as they are written, without the last line where that
is half a line. What came to its end has a result.json, which knows more.

A memory log is the CSV file with one row a checkpoint that memfit's jobs write:

    Timestamp,Checkpoint,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,CPU_Percent
    2025-12-28T00:15:45,02_model_loaded,2.300,2.500,2.300,2.450,6.10

"GB" in it is 2^30 bytes. An empty cell is unknown. Columns that are not known are passed over, and so are rows that
cannot be read, with a word about how many: a log whose process was killed may end in the middle of one.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from memfit.errors import InputError
from memfit.snapshots.read import Remark
from memfit.snapshots.schema import clean
from memfit.units import GiB, format_bytes

LOG, PARTS, RESULT = "memory_log.csv", "memory_log_parts.csv", "result.json"
SCHEMA = "memfit.run/1"
TRAIN_LOG = "train.log"
RUN_FILES = (LOG, PARTS, RESULT, TRAIN_LOG)
SILENT_SECONDS = 300.0
"""A run without a result that has written nothing for so long is no longer called running."""
LATER = 2.0
"""Seconds by which a log must be younger than the result to be of another run."""
MAX_BYTES = 16 << 20
MAX_POINTS = 1000
MAX_LINES = 12
_STEP = re.compile(r"step (\d{1,12})(?:/(\d{1,12}))?(?:, loss (-?[\d.]{1,30}|nan|inf))?")
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ")
PHASE_KEYS = ("predicted_allocated", "measured_allocated", "predicted_reserved", "measured_reserved")


def read_run(folder: Path, now: float) -> dict[str, Any]:
    """`now`: seconds since the epoch, by which a run that is silent for long is told from one that goes on."""
    written = {name: (folder / name).stat().st_mtime for name in RUN_FILES if (folder / name).is_file()}
    if not written:
        raise InputError(f"no run in {clean(str(folder))!r}", hint=f"a run's folder has one of {', '.join(RUN_FILES)}")
    logged = max((when for name, when in written.items() if name != RESULT), default=0.0)
    result = read_result(folder / RESULT, MAX_BYTES) or {} if written.get(RESULT, 0.0) >= logged - LATER else {}
    if set(written) == {RESULT} and not str(result.get("schema", "")).startswith("memfit."):
        raise InputError(f"the {RESULT} in {clean(str(folder))!r} is not of a run of memfit")
    lines = _lines(folder)
    log, messages = _log(folder)
    ended = bool(result) or any(line.startswith("end:") for line in lines[-3:])
    failed = bool(log and log["checkpoints"] and log["checkpoints"][-1]["failed"])
    silent = now - max(written.values()) > SILENT_SECONDS
    steps, losses = _steps(result, lines)
    return {
        "schema": SCHEMA, "kind": _kind(result, written),
        "state": "ended" if ended else "broke" if failed else "silent" if silent else "running",
        "written": max(written.values()), "messages": messages, "log": log, "steps": steps, "losses": losses,
        "peaks": list(_peaks(result, log)), "phases": list(_phases(result)), "growth": _growth(result, lines),
        "facts": list(_facts(result)), "said": lines[-MAX_LINES:],
    }  # fmt: skip


def _kind(result: Mapping[str, Any], written: Mapping[str, float]) -> str:
    said = str(result.get("schema", ""))
    if said.startswith("memfit.train") or TRAIN_LOG in written:
        return "train"
    return "prune" if said.startswith("memfit.prune") else "log"


def _lines(folder: Path) -> list[str]:
    """Of the run that began last, without their times."""
    path = folder / TRAIN_LOG
    try:
        with path.open("rb") as source:
            source.seek(max(0, path.stat().st_size - MAX_BYTES))
            text = source.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    whole = text.rpartition("\n")[0].splitlines()
    lines = [clean(_STAMP.sub("", line, count=1)) for line in whole]
    starts = [i for i, line in enumerate(lines) if line.startswith("start:")]
    return lines[starts[-1] :] if starts else lines


def _log(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    try:
        log = read_memory_log(folder / LOG, whole_lines=True)
    except InputError as error:
        return None, [error.message] if (folder / LOG).exists() else []
    try:
        parts = read_memory_log(folder / PARTS, whole_lines=True)
    except InputError:
        parts = None
    found = log_part(log, parts)
    found["checkpoints"] = _thinned(found["checkpoints"])
    found["parts"] = sorted(found["parts"], key=lambda row: -(row["peak_bytes"] or 0))[:20]
    return found, [str(remark) for remark in log.warnings if remark.kind != "empty"]


def _thinned(rows: Sequence[Any]) -> list[Any]:
    """The first and the last are kept, and of what lies between as many as a picture has room for."""
    stride = -(-len(rows) // MAX_POINTS) or 1
    return [row for i, row in enumerate(rows) if i % stride == 0 or i == len(rows) - 1]


def _steps(result: Mapping[str, Any], lines: Sequence[str]) -> tuple[dict[str, int | None], list[list[float]]]:
    done, total = 0, None
    losses: dict[int, float] = {}
    for line in lines:
        found = _STEP.match(line.partition(": ")[2] if line.startswith("start:") else line)
        if found:
            done, total = int(found[1]), int(found[2]) if found[2] else total
            if found[3] and math.isfinite(float(found[3])):
                losses[done] = float(found[3])
    known = result.get("losses")
    if isinstance(known, dict):
        losses |= {int(step): float(loss) for step, loss in known.items() if step.isdecimal() and _is_number(loss)}
    done = max(done, _whole(result.get("steps")) or 0)
    return {"done": done or None, "total": total}, [[step, losses[step]] for step in _thinned(sorted(losses))]


def _peaks(result: Mapping[str, Any], log: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    peaks = _dict(result.get("peaks"))
    predicted = _dict(result.get("predicted")) or _dict(peaks.get("predicted"))
    allocated, host = (log["peak_bytes"], log["cpu_peak_bytes"]) if log else (None, None)
    rows: tuple[tuple[str, tuple[Any, ...], tuple[Any, ...]], ...] = (
        (
            "GPU allocated",
            (predicted.get("peak_bytes"), predicted.get("gpu_allocated_bytes")),
            (result.get("gpu_peak_bytes"), peaks.get("gpu_allocated_bytes"), allocated),
        ),
        (
            "GPU reserved",
            (predicted.get("reserved_bytes"), predicted.get("gpu_reserved_bytes")),
            (result.get("gpu_reserved_bytes"),),  # a log has it at checkpoints only
        ),
        ("host", (predicted.get("host_bytes"),), (result.get("host_peak_bytes"), peaks.get("host_bytes"), host)),
    )
    for name, said, seen in rows:
        found = {"predicted_bytes": _first(said), "measured_bytes": _first(seen)}
        if any(size is not None for size in found.values()):
            yield {"name": name, **found}


def _first(sizes: Sequence[Any]) -> int | None:
    return next((size for size in map(_whole, sizes) if size is not None), None)


def _phases(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    rows = result.get("phases")
    for row in rows[:50] if isinstance(rows, list) else ():
        if isinstance(row, dict) and isinstance(row.get("phase"), str):
            sizes = {f"{key}_bytes": _whole(row.get(f"{key}_bytes")) for key in PHASE_KEYS}
            yield {"phase": clean(row["phase"]), **sizes}


def _growth(result: Mapping[str, Any], lines: Sequence[str]) -> dict[str, Any] | None:
    found = _dict(result.get("growth"))
    if isinstance(found.get("kind"), str) and isinstance(found.get("text"), str):
        return {"kind": clean(found["kind"]), "text": clean(found["text"])}
    said = next((line.partition(": ")[2] for line in reversed(lines) if line.startswith("growth:")), None)
    return None if said is None else {"kind": said.partition(":")[0], "text": said}


FACTS = {
    "model": "model", "method": "method", "sparsity": "sparsity", "perplexity_dense": "perplexity, dense",
    "perplexity_pruned": "perplexity, pruned", "seconds": "seconds", "seconds_per_step": "seconds a step",
    "tokens": "tokens", "micro_batch_size": "rows at a time", "gradient_accumulation_steps": "accumulated",
    "world_size": "processes", "trained_parameters": "parameters trained", "parameters": "parameters",
}  # fmt: skip


def _facts(result: Mapping[str, Any]) -> Iterator[list[Any]]:
    for key, name in FACTS.items():
        value = result.get(key)
        value = _dict(value).get("total", value)
        if isinstance(value, str) or _is_number(value):
            yield [name, clean(value) if isinstance(value, str) else value]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 60 else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


# -- the memory log ---------------------------------------------------------------------------------------------

MAX_LOG_BYTES = 64 << 20
MAX_ROWS = 200_000
MAX_CELL = 4096
NAME_COLUMNS = ("Checkpoint", "Part")
SIZE_COLUMNS = {
    "GPU_Allocated_GB": "allocated_bytes", "GPU_Reserved_GB": "reserved_bytes", "GPU_Peak_GB": "peak_bytes",
    "CPU_Used_GB": "cpu_used_bytes",
}  # fmt: skip
FAILED = "ERROR!"
PRECISION_BYTES = GiB // 2000  # three decimals


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    name: str
    stage: str
    at: datetime | None
    failed: bool
    allocated_bytes: int | None
    reserved_bytes: int | None
    peak_bytes: int | None
    cpu_used_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemoryLogFile:
    checkpoints: tuple[LogRow, ...]
    warnings: tuple[Remark, ...]

    @property
    def peak(self) -> LogRow | None:
        """The first checkpoint by which the highest peak had been reached."""
        known = [point for point in self.checkpoints if _most(point) is not None]
        return max(known, key=lambda point: _most(point) or 0, default=None)


def _most(point: LogRow) -> int | None:
    return point.allocated_bytes if point.peak_bytes is None else point.peak_bytes


def looks_like_a_log(start: bytes) -> bool:
    """By its first line."""
    header = start[:MAX_CELL].lstrip(b"\xef\xbb\xbf").split(b"\n", 1)[0].strip().split(b",")
    names = {name.strip() for name in header}
    return bool({b"Checkpoint", b"Part"} & names) and any(name.endswith(b"_GB") for name in names)


def read_memory_log(path: str | Path, *, whole_lines: bool = False) -> MemoryLogFile:
    """`whole_lines`: a last line without an end is left out, for it is being written."""
    text = _text(path)
    if whole_lines:
        text = text[: text.rfind("\n") + 1]
    try:
        rows = list(_rows(path, text))
    except csv.Error as error:
        raise InputError(f"cannot read memory log {str(path)!r}: {error}") from None
    points = tuple(point for point in rows if point is not None)
    return MemoryLogFile(points, tuple(_warnings(points, rows.count(None), text)))


def _text(path: str | Path) -> str:
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            raise InputError(f"cannot read memory log {str(path)!r}: it is not a file")
        if info.st_size > MAX_LOG_BYTES:
            limit = format_bytes(MAX_LOG_BYTES)
            raise InputError(f"refused to open {str(path)!r}: it is {format_bytes(info.st_size)}, the limit is {limit}")
        return Path(path).read_bytes().decode("utf-8-sig", "replace")
    except FileNotFoundError:
        raise InputError(f"no file {str(path)!r}") from None
    except OSError as error:
        raise InputError(f"cannot read memory log {str(path)!r}: {error.strerror}") from error


def _rows(path: str | Path, text: str) -> list[LogRow | None]:
    lines = [line for line in text.splitlines() if line.strip("\0 \t")]
    if len(lines) > MAX_ROWS:
        raise InputError(f"refused to open {str(path)!r}: it has {len(lines):,} rows, the limit is {MAX_ROWS:,}")
    lines = [line.replace("\0", "") for line in lines]
    reader = csv.reader(io.StringIO("\n".join(line if len(line) <= MAX_CELL else "" for line in lines)))
    header = [cell.strip() for cell in next(reader, [])]
    if not looks_like_a_log(",".join(header).encode()):
        raise InputError(
            f"cannot read memory log {str(path)!r}: its first line does not name the columns",
            hint="it begins Timestamp,Checkpoint,GPU_Allocated_GB,...",
        )
    return [_checkpoint(dict(zip(header, row, strict=False))) if row else None for row in reader]


def _checkpoint(cells: dict[str, str]) -> LogRow | None:
    name = next((cells[column] for column in NAME_COLUMNS if cells.get(column, "").strip()), "").strip()
    if not name:
        return None
    try:
        sizes = {key: _bytes(cells.get(column, "")) for column, key in SIZE_COLUMNS.items()}
    except ValueError:
        return None
    return LogRow(
        name=clean(name.removesuffix(FAILED).strip()),
        stage=clean(cells.get("Stage", "").strip()),
        at=_when(cells.get("Timestamp", "")),
        failed=name.endswith(FAILED),
        **sizes,
    )


def _bytes(cell: str) -> int | None:
    cell = cell.strip()
    if not cell or cell.lower() in ("n/a", "none"):
        return None
    value = float(cell)
    if not math.isfinite(value) or not 0 <= value < 1 << 20:
        raise ValueError(cell)
    return round(value * GiB)


def _when(cell: str) -> datetime | None:
    try:
        return datetime.fromisoformat(cell.strip()).replace(tzinfo=None)
    except ValueError:
        return None


def _warnings(points: tuple[LogRow, ...], unread: int, text: str) -> list[Remark]:
    found = []
    if not points:
        found.append(Remark("empty", "no checkpoint in it: the run ended before the first one, or logged nothing"))
    elif all(_most(point) is None for point in points):
        found.append(Remark("no_gpu", "no GPU figures in it: the run was on a machine without a GPU"))
    if unread:
        whole = "one row could not be read and was" if unread == 1 else f"{unread:,} rows could not be read and were"
        found.append(Remark("truncated", f"{whole} passed over"))
    elif text and not text.endswith("\n"):
        found.append(Remark("truncated", "it ends without a line break: the last row may be cut off"))
    if (name := next((point.name for point in points if point.failed), None)) is not None:
        found.append(Remark("failed", f"the run broke before it reached {name}; that row is the moment of the error"))
    return found


MAX_PARTS = 5000


def log_part(log: MemoryLogFile, parts: MemoryLogFile | None = None) -> dict[str, Any]:
    points = log.checkpoints
    peak = log.peak
    times = [point.at for point in points if point.at is not None]
    first = min(times, default=None)
    used = [point.cpu_used_bytes for point in points if point.cpu_used_bytes is not None]
    return {
        "checkpoints": [_row(point, first) for point in points],
        "parts": [_row(point, first) for point in (parts.checkpoints if parts else ())[:MAX_PARTS]],
        "peak_bytes": None if peak is None else _most(peak),
        "peak_between": "" if peak is None else _between(points, peak),
        "cpu_peak_bytes": max(used, default=None),
        "seconds": (max(times) - min(times)).total_seconds() if times else None,
    }


def _between(points: Sequence[LogRow], peak: LogRow) -> str:
    """A peak at a checkpoint was reached on the way to it."""
    at = points.index(peak)
    if _most(peak) == peak.allocated_bytes:
        return f"at {peak.name}"
    return f"between {points[at - 1].name} and {peak.name}" if at else f"before {peak.name}"


def _row(point: LogRow, first: Any) -> dict[str, Any]:
    return {
        "name": point.name, "stage": point.stage, "failed": point.failed,
        "seconds": None if point.at is None else (point.at - first).total_seconds(),
        "allocated_bytes": point.allocated_bytes, "reserved_bytes": point.reserved_bytes,
        "peak_bytes": point.peak_bytes, "cpu_used_bytes": point.cpu_used_bytes,
    }  # fmt: skip


def beginning(path: Path) -> bytes | None:
    """Of a file, if it is one and can be read."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as source:
            return source.read(4096)
    except (OSError, ValueError):
        return None


def read_result(path: Path, most: int) -> dict[str, Any] | None:
    """None where it is not there, larger than `most` bytes, or no object of JSON."""
    try:
        if not path.is_file() or path.stat().st_size > most:
            return None
        values = json.loads(path.read_bytes(), parse_constant=lambda name: None)
    except (OSError, ValueError, RecursionError):
        return None
    return values if type(values) is dict else None
