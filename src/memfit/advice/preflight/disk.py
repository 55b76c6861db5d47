"""Room on disk for the checkpoints, and for a model that is still to be downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit.advice.preflight.finding import Finding, Line
from memfit.advice.preflight.situation import Situation, output_folder
from memfit.advice.preflight.sizes import checkpoint_bytes
from memfit.errors import InputError
from memfit.models.checkpoint import WeightStore
from memfit.models.local_files import NotHere, cache_folder
from memfit.units import format_bytes

CHECKPOINTS, WEIGHTS = Line("machine", "disk for checkpoints"), Line("model", "weights")
PUBLISHED_BYTES = 2
"""Of a weight: models are published in 16 bit."""


def checkpoints(situation: Situation) -> Iterator[Finding]:
    from memfit.jobs.training.preparation import EarlierRun, check_output, find_beginning

    config, folder = situation.config, output_folder(situation.config)
    stops = CHECKPOINTS.failed if situation.runs_here else CHECKPOINTS.warning
    try:
        check_output(folder, resume_from=find_beginning(config, folder)[0])
    except InputError as error:
        advice = error.hint or "another --output_dir, or saving.output_dir in the file"
        if not isinstance(error, EarlierRun):
            yield stops(error.message, advice)
            return
        yield CHECKPOINTS.warning(error.message, advice)
    each = checkpoint_bytes(situation.shapes.needed(), config)
    count = config.saving.save_total_limit + 1  # a new one is whole before the oldest goes
    unused = free_on_disk(folder)
    found = f"{format_bytes(unused)} free at {folder}; {count} checkpoints of {format_bytes(each)} at once"
    details: dict[str, Any] = {
        "free_bytes": unused, "checkpoint_bytes": each, "checkpoints": count, "folder": str(folder),
    }  # fmt: skip
    if count * each > unused:
        fit = max(unused // max(each, 1) - 1, 0)
        advice = f"save_total_limit: {fit}" if fit else "another --output_dir"
        yield stops(f"{found} are {format_bytes(count * each)}", f"{advice}, or room on that disk", **details)
        return
    yield CHECKPOINTS.ok(f"{found} take {format_bytes(count * each)}", **details)


def weights(situation: Situation) -> Iterator[Finding]:
    """Whether they are here and whole; if they are not here, whether there is room for them."""
    try:
        folder = situation.folder.get()
        WeightStore.open(folder).close()
        yield WEIGHTS.ok(f"in {folder}")
    except NotHere as error:
        unused = free_on_disk(cache_folder(situation.config.model.cache_dir))
        model = situation.shapes.needed()
        size = PUBLISHED_BYTES * sum(w.numel() for name, w in model.named_parameters() if "lora_" not in name)
        details: dict[str, Any] = {"download_bytes": size, "free_bytes": unused}
        found = f"{error.message}: about {format_bytes(size)} to download, {format_bytes(unused)} free for them"
        if size > unused:
            status = WEIGHTS.failed if situation.runs_here else WEIGHTS.warning
            yield status(found, "model.cache_dir (or HF_HOME) on a larger disk", **details)
        else:
            yield WEIGHTS.warning(found, error.hint, **details)
    except InputError as error:
        yield WEIGHTS.failed(error.message, error.hint or "download or copy the file again")


def free_on_disk(folder: Path) -> int:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return shutil.disk_usage(there).free
