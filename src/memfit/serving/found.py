"""What lies below the folder that is served: recordings and folders of runs; no link leads out of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memfit.analysis.files import ENDINGS, may_be_recording
from memfit.analysis.run_folder import RUN_FILES
from memfit.serving.security import OutsidePath, can_be_sent, inside

MAX_DEPTH = 6
MAX_ENTRIES = 20_000
"""A home folder has millions of files: those that come first are looked at, and that there are more is said."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    path: Path
    name: str
    """From the folder that is served."""
    size: int
    changed: float


@dataclass(slots=True)
class ServedFiles:
    recordings: list[FoundFile]
    runs: dict[str, float]
    """By name, when each was written to last."""
    more: bool = False
    """Not everything was looked at, or something has a name that cannot be sent."""


def look_below(folder: Path, depth: int = MAX_DEPTH) -> ServedFiles:
    root, found, seen = folder.resolve(), ServedFiles([], {}), 0
    for entry in _entries(root, depth):
        seen += 1
        if seen > MAX_ENTRIES:
            found.more = True
            break
        path = Path(entry.path)
        is_run = entry.name in RUN_FILES
        if not is_run and not entry.name.endswith(ENDINGS):
            continue
        if not can_be_sent(entry.path):
            found.more |= path.is_file() and (is_run or may_be_recording(path))
            continue
        name = path.relative_to(root).as_posix()
        try:
            if not inside(root, name).is_file():
                continue
            info = entry.stat()
        except (OSError, OutsidePath):
            continue
        if is_run:
            run = path.parent.relative_to(root).as_posix()
            found.runs[run] = max(found.runs.get(run, 0.0), info.st_mtime)
        elif may_be_recording(path):
            found.recordings.append(FoundFile(path, name, info.st_size, info.st_mtime))
    found.recordings.sort(key=lambda each: -each.changed)
    return found


def _entries(folder: Path, depth: int) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in listed:
        if entry.name.startswith("."):
            continue
        if not entry.is_dir(follow_symlinks=False):
            yield entry
        elif depth > 0:
            yield from _entries(Path(entry.path), depth - 1)
