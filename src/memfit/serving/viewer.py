"""The views Runs and Viewer: folders of recorded runs, and recordings below the folder that is served or dropped onto
the page, drawn a window at a time."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response

from memfit.analysis.report import ENDINGS, may_be_recording
from memfit.analysis.run_folder import RUN_FILES, read_run
from memfit.errors import InputError, MemfitError
from memfit.serving.security import OutsidePath, can_be_sent, inside
from memfit.serving.workers import OpenedFile, Readers
from memfit.snapshots.schema import clean
from memfit.units import GiB, format_bytes

MOST_UPLOAD_BYTES, MOST_UPLOADS = GiB, 2
MOST_LISTED = 500
MAX_NAME = 200
MAX_QUESTION = 16 << 10
QUESTIONS = ("page", "whole", "stretch", "sums")

router = APIRouter(prefix="/api/viewer")


@router.get("/files")
def list_files(request: Request) -> dict[str, Any]:
    found = look_below(request.app.state.settings.dir)
    listed = found.recordings[:MOST_LISTED]
    files = [
        {"name": clean(each.name), "path": each.name, "bytes": each.size, "changed": each.changed} for each in listed
    ]
    return {"files": files, "more": found.more or len(listed) < len(found.recordings)}


@router.post("/open")
async def open_file(request: Request) -> dict[str, Any]:
    name = (await _question(request)).get("path")
    if not isinstance(name, str):
        raise HTTPException(400, "which file?")
    path = inside(request.app.state.settings.dir, name)
    if not await run_in_threadpool(path.is_file):
        raise InputError(f"no file {clean(name)!r} below the folder that is served")
    info = path.stat()
    key = hashlib.sha256(f"{path}\0{info.st_mtime_ns}\0{info.st_size}".encode("utf-8", "replace")).hexdigest()[:24]
    reader = await _readers(request).open(key, path, clean(name))
    return {"key": key, **reader.state}


@router.post("/upload")
async def upload(request: Request, name: str = "dropped") -> dict[str, Any]:
    """Into a file of a bounded size that goes as soon as it is read, or when the server ends."""
    readers = _readers(request)
    if readers.receiving >= MOST_UPLOADS:
        raise HTTPException(429, f"{MOST_UPLOADS} files are being received already")
    handle, place = tempfile.mkstemp(prefix="memfit-")
    readers.receiving += 1
    try:
        with open(handle, "wb") as out:
            await _receive(request, out)
        key = f"u{secrets.token_hex(12)}"
        reader = await readers.open(key, Path(place), clean(name)[:MAX_NAME] or "dropped", temporary=True)
    except BaseException:
        Path(place).unlink(missing_ok=True)
        raise
    finally:
        readers.receiving -= 1
    return {"key": key, **reader.state}


async def _receive(request: Request, out: BinaryIO) -> None:
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MOST_UPLOAD_BYTES:
            raise HTTPException(413, f"a dropped file may have {format_bytes(MOST_UPLOAD_BYTES)} at most")
        await run_in_threadpool(out.write, chunk)
    if not size:
        raise HTTPException(400, "the file that was dropped is empty")


@router.get("/{key}/state")
async def tell_state(request: Request, key: str) -> dict[str, Any]:
    return _find(request, key).state


@router.post("/{key}/close")
async def close(request: Request, key: str) -> dict[str, Any]:
    await _readers(request).close(key)
    return {}


@router.post("/{key}/{question}")
async def answer(request: Request, key: str, question: str) -> Response:
    if question not in QUESTIONS:
        raise HTTPException(404, "there is no such question")
    return (await _find(request, key).ask(question, await _question(request))).response()


def _readers(request: Request) -> Readers:
    readers: Readers = request.app.state.readers
    return readers


def _find(request: Request, key: str) -> OpenedFile:
    return _readers(request).find(key)


async def _question(request: Request) -> dict[str, Any]:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_QUESTION:
            raise HTTPException(413, "a question is a short text")
    try:
        asked = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        asked = None
    if type(asked) is not dict:
        raise HTTPException(400, "a question is an object of JSON")
    return asked


RUNS_LISTED = 100
SOON = 60

runs = APIRouter(prefix="/api/runs")


@runs.get("")
def list_runs(request: Request) -> dict[str, Any]:
    """The newest first, each in a line."""
    folder: Path = request.app.state.settings.dir
    found = look_below(folder)
    newest = sorted(found.runs, key=lambda name: -found.runs[name])
    rows = [row for name in newest[:RUNS_LISTED] if (row := _row(folder, name)) is not None]
    return {"runs": rows, "more": found.more or len(newest) > RUNS_LISTED}


@runs.get("/run")
def tell_run(request: Request, name: str) -> dict[str, Any]:
    return _read(request.app.state.settings.dir, name)


def _row(folder: Path, name: str) -> dict[str, Any] | None:
    files = [folder / name / file for file in RUN_FILES]
    try:
        written = [(info.st_mtime_ns, info.st_size) for file in files if file.is_file() for info in (file.stat(),)]
        return _row_as_of(folder, name, tuple(written), int(time.time() // SOON))
    except (MemfitError, OSError):  # it went meanwhile, or cannot be read
        return None


@lru_cache(maxsize=4 * RUNS_LISTED)
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


# -- what lies below the folder that is served -------------------------------------------------------------------------

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
