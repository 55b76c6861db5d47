"""A memory log read back: the CSV file with one row a checkpoint that memfit's jobs write, and that guides know.

    Timestamp,Checkpoint,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,CPU_Percent
    2025-12-28T00:15:45,02_model_loaded,2.300,2.500,2.300,2.450,6.10

"GB" in it is 2^30 bytes. An empty cell is unknown. Columns that are not known are passed over, and so are rows that
cannot be read, with a word about how many: a log whose process was killed may end in the middle of one.
"""

from __future__ import annotations

import csv
import io
import math
import os
import stat
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from memfit.core.snapshot import Remark
from memfit.core.snapshot_schema import clean
from memfit.errors import InputError
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
class Checkpoint:
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
    checkpoints: tuple[Checkpoint, ...]
    warnings: tuple[Remark, ...]

    @property
    def peak(self) -> Checkpoint | None:
        """The first checkpoint by which the highest peak had been reached."""
        known = [point for point in self.checkpoints if _most(point) is not None]
        return max(known, key=lambda point: _most(point) or 0, default=None)


def _most(point: Checkpoint) -> int | None:
    return point.allocated_bytes if point.peak_bytes is None else point.peak_bytes


def looks_like_a_log(start: bytes) -> bool:
    """By its first line."""
    header = start[:MAX_CELL].lstrip(b"\xef\xbb\xbf").split(b"\n", 1)[0].strip().split(b",")
    names = {name.strip() for name in header}
    return bool({b"Checkpoint", b"Part"} & names) and any(name.endswith(b"_GB") for name in names)


def read_memory_log(path: str | Path) -> MemoryLogFile:
    text = _text(path)
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


def _rows(path: str | Path, text: str) -> list[Checkpoint | None]:
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


def _checkpoint(cells: dict[str, str]) -> Checkpoint | None:
    name = next((cells[column] for column in NAME_COLUMNS if cells.get(column, "").strip()), "").strip()
    if not name:
        return None
    try:
        sizes = {key: _bytes(cells.get(column, "")) for column, key in SIZE_COLUMNS.items()}
    except ValueError:
        return None
    failed = name.endswith(FAILED)
    return Checkpoint(
        name=clean(name.removesuffix(FAILED).strip()), stage=clean(cells.get("Stage", "").strip()),
        at=_when(cells.get("Timestamp", "")), failed=failed, **sizes,
    )  # fmt: skip


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


def _warnings(points: tuple[Checkpoint, ...], unread: int, text: str) -> list[Remark]:
    found = []
    if not points:
        found.append(Remark("empty", "no checkpoint in it: the run ended before the first one, or logged nothing"))
    elif all(_most(point) is None for point in points):
        found.append(Remark("no_gpu", "no GPU figures in it: the run was on a machine without a GPU"))
    if unread:
        whole = "one row" if unread == 1 else f"{unread:,} rows"
        found.append(Remark("truncated", f"{whole} could not be read and were passed over"))
    elif text and not text.endswith("\n"):
        found.append(Remark("truncated", "it ends without a line break: the last row may be cut off"))
    if any(point.failed for point in points):
        name = next(point.name for point in points if point.failed)
        found.append(Remark("failed", f"the run broke before it reached {name}; that row is the moment of the error"))
    return found
