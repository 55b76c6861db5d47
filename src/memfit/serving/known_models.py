"""Models that the page may name: presets, hub ids whose config is here, folders below the one that is served."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit.errors import UsageError
from memfit.models.presets import presets, variants
from memfit.models.registry import resolve
from memfit.serving.security import can_be_sent, inside

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
