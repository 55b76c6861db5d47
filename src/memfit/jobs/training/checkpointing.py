"""How a checkpoint is written: beside its place and renamed, so that one that is there is whole, however a run ends."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.errors import InputError
from memfit.jobs.training.checkpoints import find_checkpoints, step_of

PROGRESS = "memfit_progress.json"
WRITING, DELETING = ".writing", ".deleting"


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
    if place.exists():
        _delete(place)
    beside.rename(place)
    _to_disk(place.parent)
    return place


def keep_last(output_dir: Path, count: int, *, never: Sequence[Path] = ()) -> None:
    """Only the last so many stay, and what a killed run left half-written or half-deleted goes."""
    for path in find_checkpoints(output_dir)[:-count]:
        if path not in never:
            _delete(path)
    for path in output_dir.glob("step_*"):
        half = path.name.endswith((WRITING, DELETING)) and step_of(path.with_suffix("")) is not None
        if half and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _delete(folder: Path) -> None:
    """Renamed first: half-deleted, it must not look like a checkpoint."""
    going = folder.with_name(folder.name + DELETING)
    shutil.rmtree(going, ignore_errors=True)
    folder.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def _to_disk(path: Path) -> None:
    if not path.is_file() and not path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
