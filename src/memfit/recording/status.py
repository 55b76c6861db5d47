"""Where a running memfit job is, for `memfit watch` in another terminal: one small file a job.

The file lies in a folder of this user alone; what is read back is checked as any foreign text, and the file of a
process that has ended is passed over.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memfit.files import written_whole

MAX_BYTES = 64 << 10
MAX_TEXT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    pid: int
    started: float
    """Of the process, since the epoch: a number that is used again belongs to another process."""
    command: str
    at: str
    """The latest checkpoint."""
    done: int | None = None
    total: int | None = None
    allocated_bytes: int | None = None
    peak_bytes: int | None = None
    capacity_bytes: int | None = None

    @property
    def headroom_bytes(self) -> int | None:
        if self.capacity_bytes is None or self.peak_bytes is None:
            return None
        return self.capacity_bytes - self.peak_bytes


def folder() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"memfit-{os.getuid() if hasattr(os, 'getuid') else 'jobs'}"


def publish(command: str, at: str, **numbers: int | None) -> None:
    """Say where this process is. A job never fails because nobody can be told."""
    with suppress(OSError):
        status = JobStatus(pid=os.getpid(), started=_started(os.getpid()) or 0.0, command=command, at=at, **numbers)
        place = folder()
        place.mkdir(mode=0o700, exist_ok=True)
        if place.stat().st_uid != os.getuid():
            return
        with written_whole(place / f"{status.pid}.json") as beside:
            beside.write_text(json.dumps(asdict(status)))


@contextmanager
def published(command: str) -> Iterator[None]:
    """The file goes when the job ends, however it ends."""
    publish(command, "start")
    try:
        yield
    finally:
        with suppress(OSError):
            (folder() / f"{os.getpid()}.json").unlink(missing_ok=True)


def running_jobs() -> list[JobStatus]:
    found = []
    for path in sorted(folder().glob("*.json")):
        status = _read(path)
        if status is not None and _started(status.pid) == status.started:
            found.append(status)
    return found


def _read(path: Path) -> JobStatus | None:
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        values: Any = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return _checked(values) if isinstance(values, dict) else None


def _checked(values: dict[str, Any]) -> JobStatus | None:
    pid, started, command, at = (values.get(name) for name in ("pid", "started", "command", "at"))
    if type(pid) is not int or not isinstance(started, (int, float)):
        return None
    if not isinstance(command, str) or not isinstance(at, str):
        return None
    numbers = {
        name: value if type(value := values.get(name)) is int and 0 <= value < 1 << 60 else None
        for name in ("done", "total", "allocated_bytes", "peak_bytes", "capacity_bytes")
    }
    return JobStatus(pid=pid, started=started, command=_line(command), at=_line(at), **numbers)


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)[:MAX_TEXT]


def _started(pid: int) -> float | None:
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except (psutil.Error, ValueError, OverflowError):
        return None
