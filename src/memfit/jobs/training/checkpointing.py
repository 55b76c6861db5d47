"""How a checkpoint is written: beside its place and renamed, so that one that is there is whole, however a run ends.

A disk that is full ends a run with what it has: half a checkpoint goes, the last whole one stays and is named.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.errors import InputError, MemfitError
from memfit.jobs.training.checkpoints import find_checkpoints, has_state, step_of, steps_done
from memfit.units import format_bytes

PROGRESS = "memfit_progress.json"
WRITING, DELETING, OTHERS = ".writing", ".deleting", ".other-program"
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_OF_SAFETENSORS = re.compile(r"\(os error (\d+)\)")
_OF_TORCH = ("inline_container", "PytorchStreamWriter", "iostream error", "Parent directory")
TRIED_BYTES = 1 << 20


@dataclass(kw_only=True)
class Progress:
    """What a run knows of itself beyond what the Trainer saves."""

    micro_batch_size: int
    losses: dict[int, float] = field(default_factory=dict)
    """Of each step, over all of its tokens; the first step is 1."""
    halved: list[dict[str, Any]] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        (folder / PROGRESS).write_text(json.dumps(self.__dict__), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Progress | None:
        """None in a checkpoint that the Trainer alone has written."""
        path = folder / PROGRESS
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                micro_batch_size=int(found["micro_batch_size"]), halved=list(found["halved"]),
                losses={int(step): float(loss) for step, loss in found["losses"].items()},
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"'{path}' is damaged", hint="resume from an earlier checkpoint") from error


def begin(output_dir: Path, step: int) -> Path:
    """The empty folder that is to become `step_N`."""
    beside = output_dir / f"step_{step}{WRITING}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def finish(beside: Path) -> Path:
    """All on the disk first, then its name."""
    for path in (*beside.rglob("*"), beside):
        _to_disk(path)
    place = beside.with_name(beside.name.removesuffix(WRITING))
    old = _make_way(place)
    beside.rename(place)
    _to_disk(place.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    return place


def _make_way(place: Path) -> Path | None:
    """What is there under another name: an older checkpoint, which may go, or None. Another program's stays."""
    if not place.exists():
        return None
    if has_state(place):
        return _set_aside(place)
    place.rename(next(each for each in _other_names(place) if not each.exists()))
    return None


def _other_names(place: Path) -> Iterator[Path]:
    yield place.with_name(f"{place.name}{OTHERS}")
    yield from (place.with_name(f"{place.name}{OTHERS}-{number}") for number in range(2, 1000))


def keep_last(output_dir: Path, count: int, *, newest: int) -> None:
    """Only the last so many stay, and what a killed run left half-written or half-deleted goes. What is later than the
    step just written was given up when the run went back behind it."""
    for path in _by_age(output_dir, newest)[:-count]:
        shutil.rmtree(_set_aside(path), ignore_errors=True)
    remove_halves(output_dir)


def make_room(output_dir: Path, count: int, *, newest: int) -> list[Path]:
    """For a checkpoint that found none: those that would go after it anyway go before it, but never the last one."""
    doomed = _by_age(output_dir, newest)[: -max(1, count - 1)]
    for path in doomed:
        shutil.rmtree(_set_aside(path), ignore_errors=True)
    return doomed


def _by_age(output_dir: Path, newest: int) -> list[Path]:
    found = find_checkpoints(output_dir)
    return sorted(found, key=lambda each: (step_of(each) or 0) <= newest)


def remove_halves(output_dir: Path) -> None:
    for path in output_dir.glob("step_*"):
        half = path.name.endswith((WRITING, DELETING)) and step_of(path.with_suffix("")) is not None
        if half and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _set_aside(folder: Path) -> Path:
    """Renamed first: half-deleted, it must not look like a checkpoint."""
    going = folder.with_name(folder.name + DELETING)
    shutil.rmtree(going, ignore_errors=True)
    folder.rename(going)
    return going


def _to_disk(path: Path) -> None:
    if not path.is_file() and not path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- a disk that takes no more -----------------------------------------------------------------------------------------


class CannotSave(MemfitError):
    """The disk takes no more of a run. What it has saved before is whole."""


def why_not_written(error: Exception, folder: Path) -> str | None:
    """In the system's words; None where it was not the disk that failed."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    said = str(error)
    if type(error).__name__ == "SafetensorError" and (found := _OF_SAFETENSORS.search(said)):
        return os.strerror(int(found[1]))
    if isinstance(error, RuntimeError) and any(word in said for word in _OF_TORCH):
        return _why_by_trying(folder)  # torch keeps the reason to itself
    return None


def _why_by_trying(folder: Path) -> str:
    tried = folder / f".tried.{os.getpid()}"
    try:
        with tried.open("wb") as stream:
            stream.write(bytes(TRIED_BYTES))
            os.fsync(stream.fileno())
    except OSError as error:
        return error.strerror or str(error)
    finally:
        tried.unlink(missing_ok=True)
    return "torch could not write its file, and does not say why"


def cannot_save(step: int, output_dir: Path, why: str) -> CannotSave:
    return _ended(f"the checkpoint of step {step} could not be written: {why}", output_dir)


@contextmanager
def disk_errors_told(output_dir: Path) -> Iterator[None]:
    """For whatever else a run writes: its logs, its result."""
    try:
        yield
    except OSError as error:
        if error.errno not in OF_THE_DISK:
            raise
        where = error.filename if isinstance(error.filename, str) else str(output_dir)
        raise _ended(f"'{where}' could not be written: {error.strerror}", output_dir) from error


def _ended(what: str, output_dir: Path) -> CannotSave:
    free = format_bytes(shutil.disk_usage(output_dir).free) if output_dir.is_dir() else "n/a"
    whole = find_checkpoints(output_dir)
    if not whole:
        return CannotSave(
            f"{what} ({free} free at '{output_dir}')",
            hint="no checkpoint had been written before it: make room, and start again",
        )
    last = whole[-1]
    size = sum(each.stat().st_size for each in last.rglob("*") if each.is_file())
    return CannotSave(
        f"{what} ({free} free at '{output_dir}', where the last one takes {format_bytes(size)})",
        hint=f"the checkpoint of step {steps_done(last)} is whole: make room, and go on with --resume_from {last}",
    )
