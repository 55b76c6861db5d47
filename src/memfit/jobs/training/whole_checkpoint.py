"""Whether the files of a checkpoint are all there and whole, without loading any of them.

A copy that was cut off, or a disk that was full, leaves a folder that looks like a checkpoint. The Trainer stops in the
middle of such a file, and where the optimizer's state is missing it says nothing and begins it anew.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

from memfit.errors import InputError
from memfit.jobs.training.checkpointing import Progress
from memfit.jobs.training.checkpoints import find_checkpoints, steps_done
from memfit.jobs.training.config import TrainConfig
from memfit.models.checkpoint import WeightStore, read_header

ADAPTERS = "adapter_model.safetensors"
STATES = {"optimizer.pt": "its state would begin anew", "scheduler.pt": "the learning rate would begin anew"}
RANDOM = "rng_state*.pth"


def check_whole(folder: Path, config: TrainConfig, *, world_size: int) -> None:
    """A sharded one has files of its own, which are left to accelerate."""
    if config.parallel.kind == "fsdp2" and world_size > 1:
        return
    lora = config.method.kind == "lora"
    if wrong := list(incomplete(folder, lora=lora)):
        whole = [each for each in find_checkpoints(folder.parent) if not any(incomplete(each, lora=lora))]
        instead = f"--resume_from {whole[-1]}, which is whole" if whole else "copy it again, or start without it"
        raise InputError(f"'{folder}' is not whole: {'; '.join(wrong)}", hint=instead)


def processes_of(folder: Path) -> int:
    """How many wrote it: each leaves its random numbers. 0 where none did."""
    return len(list(folder.glob(RANDOM)))


def incomplete(folder: Path, *, lora: bool) -> Iterator[str]:
    """What is wrong with each of its files, in words."""
    try:
        steps_done(folder)
        Progress.read(folder)
    except InputError as error:
        yield error.message
    try:
        if lora:
            read_header(folder / ADAPTERS)
        else:
            WeightStore.open(folder).close()
    except InputError as error:
        yield error.message
    for name, lost in STATES.items():
        if not (folder / name).is_file():
            yield f"it has no {name}: {lost}"
    for path in (*(folder / name for name in STATES), *sorted(folder.glob(RANDOM))):
        if path.is_file() and not _is_whole_archive(path):
            yield f"{path.name} is cut off or damaged"


def _is_whole_archive(path: Path) -> bool:
    """torch writes zip files, whose table of contents stands at the end: what was cut off has none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return bool(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False
