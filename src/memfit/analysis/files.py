"""Whatever memfit can report on, from a path: a snapshot, a trace, a memory log, or the folder of a run.

    reported = report_file("run7/")
    reported.document            # memfit.report/1
    reported.run                 # for drawing; None if there is only a log

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
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from memfit.analysis.report import SCHEMA, report_run
from memfit.analysis.run import Run, is_trace_file, open_run, pick, runs_of_file
from memfit.errors import InputError, UsageError
from memfit.snapshots.read import Remark
from memfit.snapshots.schema import Malformed, clean, scalar
from memfit.units import GiB, format_bytes

MAX_BYTES = 64 << 20
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
        if info.st_size > MAX_BYTES:
            limit = format_bytes(MAX_BYTES)
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


def report_log(log: MemoryLogFile, parts: MemoryLogFile | None = None) -> dict[str, Any]:
    """The log alone, as a report of its own."""
    found = log_part(log, parts)
    peak = log.peak
    reserved = [point.reserved_bytes for point in log.checkpoints if point.reserved_bytes is not None]
    document = {
        "schema": SCHEMA, "origin": "measured",
        "messages": [
            {"kind": warning.kind, "text": str(warning)}
            for warning in dict.fromkeys((*log.warnings, *(parts.warnings if parts else ())))
        ],
        "device": None,
        "peak": {
            "allocated_bytes": found["peak_bytes"], "reserved_bytes": max(reserved, default=None),
            "requested_bytes": None,
        },
        "at_peak": None if peak is None else {"phase": found["peak_between"], "checkpoint": peak.name},
        "log": found,
        "notes": [
            "measured at checkpoints: what is alive, and where it was made, is not in a memory log",
            f"its figures have three decimals of GiB, so each may be {format_bytes(PRECISION_BYTES)} off",
        ],
    }  # fmt: skip
    document["next"] = list(_next(found))
    return document


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


def _next(found: dict[str, Any]) -> Iterator[str]:
    if found["peak_between"].startswith("between"):
        yield (
            f"record that stretch to see what is alive {found['peak_between']}: "
            "torch.cuda.memory._record_memory_history, then memfit report on the snapshot"
        )


LOG, PARTS, RESULT = "memory_log.csv", "memory_log_parts.csv", "result.json"
ENDINGS = (".pickle", ".pkl", ".npz", ".json", ".pickle.gz", ".pkl.gz", ".json.gz")
MAX_FILES = 24
MAX_FOLDER_BYTES = 256 << 20
MAX_RESULT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Report:
    document: dict[str, Any]
    run: Run | None = None


def report_file(
    path: str | Path,
    *,
    device: int | None = None,
    alloc_conf: str | None = None,
    on_read: Callable[[int], None] = lambda events: None,
) -> Report:
    """`on_read` is told of how many events, once the file itself has been read."""
    path = Path(path)
    if _is_folder(path):
        return _folder(path, device)
    if _is_log(path):
        if device is not None or alloc_conf is not None:
            raise UsageError(f"--device and --alloc-conf say nothing about {str(path)!r}, which is a memory log")
        return Report(_named(report_log(read_memory_log(path)), path, "memory_log"))
    if is_trace_file(path):
        run = open_run(path, device=device, alloc_conf=alloc_conf)
        return Report(_named(report_run(run), path, "trace"), run)
    if alloc_conf is not None:
        open_run(path, device=device, alloc_conf=alloc_conf)
    runs = runs_of_file(path, on_read)
    run = pick(runs, device)
    document = _named(report_run(run), path, "snapshot")
    document["devices"] = [_device(each) for each in runs]
    return Report(document, run)


def files_read(path: Path) -> list[Path]:
    """What a report on this path may read, and so must not be written over."""
    if not _is_folder(path):
        return [path]
    return [each for each in _files(path) if each.name.endswith((*ENDINGS, ".csv"))]


def _named(document: dict[str, Any], path: Path, kind: str) -> dict[str, Any]:
    schema = document.pop("schema")
    return {"schema": schema, "source": {"path": clean(str(path)), "kind": kind, "files": []}, **document}


def _device(run: Run) -> dict[str, Any]:
    return {
        "device": run.device,
        "events": len(run.trace),
        "allocated_bytes": run.timeline.peak_allocated,
        "reserved_bytes": run.timeline.peak_reserved,
    }


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _is_log(path: Path) -> bool:
    start = beginning(path)
    return start is not None and (path.suffix == ".csv" or looks_like_a_log(start))


def beginning(path: Path) -> bytes | None:
    """Of a file, if it is one and can be read."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as source:
            return source.read(4096)
    except (OSError, ValueError):
        return None


# -- a folder ----------------------------------------------------------------------------------------------------


def _folder(folder: Path, device: int | None) -> Report:
    """The recording that needed most is reported; the log, the result and the other recordings stand beside it."""
    files = sorted(_files(folder))
    log = _log(folder / LOG, files)
    parts = _log(folder / PARTS, files)
    passed_over: list[str] = []
    rows, best = [], None
    for path in _recordings(files):
        try:
            reported = report_file(path, device=device)
        except InputError as error:
            passed_over.append(error.message)
            continue
        rows.append(_file_row(path, reported.document))
        if best is None or _peak(reported) > _peak(best[1]):
            best = path, reported
    if best is None and log is None:
        raise InputError(
            f"nothing to report on in {str(folder)!r}",
            hint="a run's folder has a memory_log.csv, a snapshot (*.pickle, *.json) or a trace (*.npz)",
        )
    if best is not None:
        document, run = best[1].document, best[1].run
    else:
        assert log is not None
        document, run = _named(report_log(log, parts), folder, "run_folder"), None
    document["messages"] += [{"kind": "passed_over", "text": text} for text in passed_over[:5]]
    document["source"] = {
        "path": clean(str(folder)), "kind": "run_folder", "files": rows,
        "reported": clean(best[0].name) if best is not None else LOG,
    }  # fmt: skip
    document["log"] = None if log is None else log_part(log, parts)
    document["result"] = _result(folder / RESULT)
    return Report(document, run)


def _files(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and _is_file(entry):
                    yield Path(entry.path)
    except OSError as error:
        raise InputError(f"cannot read the folder {str(folder)!r}: {error.strerror}") from error


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to where nobody may look
        return False


def _recordings(files: list[Path]) -> list[Path]:
    """Newest first, as many as can be read in a while."""
    found = [path for path in files if path.name.endswith(ENDINGS) and may_be_recording(path)]
    found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    kept: list[Path] = []
    size = 0
    for path in found[:MAX_FILES]:
        size += path.stat().st_size
        if kept and size > MAX_FOLDER_BYTES:
            break
        kept.append(path)
    return sorted(kept)


def may_be_recording(path: Path) -> bool:
    """Of JSON files only those that begin as a snapshot does."""
    return not path.name.endswith(".json") or b'"segments"' in (beginning(path) or b"")


def _log(path: Path, files: list[Path]) -> MemoryLogFile | None:
    if path not in files:
        return None
    try:
        return read_memory_log(path)
    except InputError:
        return None


def _peak(reported: Report) -> int:
    return int(reported.document["peak"]["allocated_bytes"] or 0)


def _file_row(path: Path, document: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": clean(path.name), "kind": document["source"]["kind"], "origin": document["origin"],
        "allocated_bytes": document["peak"]["allocated_bytes"], "reserved_bytes": document["peak"]["reserved_bytes"],
    }  # fmt: skip


def read_result(path: Path, most: int) -> dict[str, Any] | None:
    """None where it is not there, larger than `most` bytes, or no object of JSON."""
    try:
        if not path.is_file() or path.stat().st_size > most:
            return None
        values = json.loads(path.read_bytes(), parse_constant=lambda name: None)
    except (OSError, ValueError, RecursionError):
        return None
    return values if type(values) is dict else None


def _result(path: Path) -> dict[str, Any] | None:
    """Plain values of the result's top level; what is nested is for programs that know it."""
    values = read_result(path, MAX_RESULT_BYTES)
    if values is None:
        return None
    plain: dict[str, Any] = {}
    for key, value in list(values.items())[:100]:
        try:
            plain[clean(key)] = scalar(value, RESULT)
        except Malformed:
            plain[clean(key)] = f"({type(value).__name__})"
    return plain
