"""Whether the files of a checkpoint are all there and whole, without loading any of them.

A copy that was cut off, or a disk that was full, leaves a folder that looks like a checkpoint. The Trainer stops in the
middle of such a file, and where the optimizer's state is missing it says nothing and begins it anew.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memfit.errors import InputError
from memfit.jobs.training.checkpointing import Progress
from memfit.jobs.training.checkpoints import find_checkpoints
from memfit.models.checkpoint import WeightStore, read_header

ADAPTERS = "adapter_model.safetensors"
STATES = {"optimizer.pt": "its state would begin anew", "scheduler.pt": "the learning rate would begin anew"}
RANDOM = "rng_state*.pth"


@dataclass(frozen=True)
class Incomplete:
    """What is wrong with one file, in words."""

    what: str


def incomplete(folder: Path, *, lora: bool) -> Iterator[Incomplete]:
    """Of a checkpoint that is not sharded: a sharded one has files of its own."""
    yield from _weights(folder, lora=lora)
    for name, loss in STATES.items():
        if not (folder / name).is_file():
            yield Incomplete(f"it has no {name}: {loss}")
    for path in sorted([*(folder / name for name in STATES), *folder.glob(RANDOM)]):
        if path.is_file() and not _is_whole_archive(path):
            yield Incomplete(f"{path.name} is cut off or damaged")
    try:
        Progress.read(folder)
    except InputError as error:
        yield Incomplete(error.message)


def processes_of(folder: Path) -> int:
    """How many wrote it: each leaves its random numbers. 0 where none did."""
    return len(list(folder.glob(RANDOM)))


def whole_ones_beside(folder: Path, *, lora: bool) -> list[Path]:
    """Other checkpoints of that run that can be continued, the latest last."""
    others = (each for each in find_checkpoints(folder.parent) if each != folder)
    return [each for each in others if not any(incomplete(each, lora=lora))]


def _weights(folder: Path, *, lora: bool) -> Iterator[Incomplete]:
    try:
        if lora:
            read_header(folder / ADAPTERS)
        else:
            WeightStore.open(folder).close()
    except InputError as error:
        yield Incomplete(error.message)


def _is_whole_archive(path: Path) -> bool:
    """torch writes zip files, whose table of contents stands at the end: what was cut off has none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return bool(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False
