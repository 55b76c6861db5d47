"""What lies below the folder that is served, recordings, runs and models, and which names the page may give."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.analysis.report import ENDINGS, may_be_recording
from memfit.analysis.run_folder import RUN_FILES
from memfit.errors import UsageError
from memfit.models.presets import presets, variants
from memfit.models.registry import resolve
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


FOLDER = "./"
"""How the name of a folder begins."""
_NAME = re.compile(r"[\w-][\w. -]*(/[\w-][\w.-]*)?")
DEEPEST, MOST_FOLDERS, MOST_LOOKED_AT = 4, 200, 20_000
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


def find_model(folder: Path, name: str) -> tuple[str, list[int] | None]:
    """The name as it is planned by, and of a folder also when its config was last written. Nothing that could be code
    or a path elsewhere is looked up."""
    if name.startswith(FOLDER):
        config = inside(folder, f"{name.removeprefix(FOLDER)}/config.json")
        if not config.is_file():
            raise UsageError(f"{name!r} has no config.json", hint="a model's folder holds one")
        stats = config.stat()
        return str(inside(folder, name.removeprefix(FOLDER))), [stats.st_mtime_ns, stats.st_size]
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:200]!r} is neither a preset nor a hub id",
            hint=f"a folder below the one that is served is {FOLDER}FOLDER; code is for the command line",
        )
    return name, None


def list_models(folder: Path) -> list[dict[str, Any]]:
    """In the order in which they are offered."""
    return [*_folders(folder), *_shipped(), *_cached()]


def _shipped() -> Iterator[dict[str, Any]]:
    for preset in presets():
        ids = [alias for alias in preset.aliases if "/" in alias]
        yield {"name": preset.name, "parameters": preset.parameters, "from": "preset", "also": ids,
               "quantised": [*variants().get(preset.name, {})]}  # fmt: skip


def _cached() -> Iterator[dict[str, Any]]:
    """Hub ids whose config.json some download has left here."""
    from memfit.models.files import cache_folder

    known = {alias.lower() for preset in presets() for alias in preset.aliases}
    try:
        names = sorted(os.listdir(cache_folder()))
    except OSError:
        return
    for name in names[:MOST_LOOKED_AT]:
        found = CACHED.fullmatch(name)
        hub_id = "/".join(found.groups()) if found else ""
        if found and hub_id.lower() not in known and _has_config(hub_id):
            yield {"name": hub_id, "parameters": None, "from": "Hugging Face cache", "also": [], "quantised": []}


def _has_config(hub_id: str) -> bool:
    try:
        return resolve(hub_id).kind == "hub"
    except ValueError:
        return False


def _folders(folder: Path) -> Iterator[dict[str, Any]]:
    """Breadth first, so that what lies near is found among many; links are not followed."""
    todo, looked_at, found = [(folder, 0)], 0, 0
    while todo and looked_at < MOST_LOOKED_AT and found < MOST_FOLDERS:
        here, depth = todo.pop(0)
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError:
            continue
        looked_at += len(entries)
        if here != folder and any(entry.name == "config.json" and entry.is_file() for entry in entries):
            found += 1
            name = f"{FOLDER}{here.relative_to(folder).as_posix()}"
            yield {"name": name, "parameters": None, "from": "folder", "also": [], "quantised": []}
        elif depth < DEEPEST:
            below = (entry for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name[:1] not in "._")
            todo.extend((Path(entry.path), depth + 1) for entry in below if can_be_sent(entry.name))
