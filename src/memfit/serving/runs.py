"""The view Runs: folders of recorded runs, live ones too, one by one and side by side."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from memfit.analysis.run_folder import RUN_FILES, read_run
from memfit.errors import InputError, MemfitError
from memfit.serving.found import look_below
from memfit.serving.security import inside
from memfit.snapshots.schema import clean

MOST_LISTED = 100
SOON = 60

router = APIRouter(prefix="/api/runs")


@router.get("")
def list_runs(request: Request) -> dict[str, Any]:
    """The newest first, each in a line."""
    folder: Path = request.app.state.settings.dir
    found = look_below(folder)
    newest = sorted(found.runs, key=lambda name: -found.runs[name])
    rows = [row for name in newest[:MOST_LISTED] if (row := _row(folder, name)) is not None]
    return {"runs": rows, "more": found.more or len(newest) > MOST_LISTED}


@router.get("/run")
def tell_run(request: Request, name: str) -> dict[str, Any]:
    return _read(request.app.state.settings.dir, name)


def _row(folder: Path, name: str) -> dict[str, Any] | None:
    files = [folder / name / file for file in RUN_FILES]
    try:
        written = [(info.st_mtime_ns, info.st_size) for file in files if file.is_file() for info in (file.stat(),)]
        return _row_as_of(folder, name, tuple(written), int(time.time() // SOON))
    except (MemfitError, OSError):  # it went meanwhile, or cannot be read
        return None


@lru_cache(maxsize=4 * MOST_LISTED)
def _row_as_of(folder: Path, name: str, written: tuple[tuple[int, int], ...], now: int) -> dict[str, Any]:
    """A page looks every few seconds: what was not written to is not read again. But a run may have fallen silent."""
    run = _read(folder, name)
    kept = ("name", "path", "kind", "state", "written", "steps", "peaks", "growth")
    last = run["losses"][-1][1] if run["losses"] else None
    points = run["log"]["checkpoints"] if run["log"] else []
    return {**{key: run[key] for key in kept}, "loss": last, "at": points[-1]["name"] if points else None}


def _read(folder: Path, name: str) -> dict[str, Any]:
    place = inside(folder, name)
    for file in RUN_FILES:
        inside(folder, f"{name}/{file}")
    try:
        run = read_run(place, time.time())
    except OSError as error:
        raise InputError(f"cannot read {clean(name)!r}: {error.strerror}") from error
    listed = sorted(each.name for each in look_below(place, depth=0).recordings)
    return {"name": clean(name) if name != "." else "(this folder)", "path": name, **run, "recordings": listed}
