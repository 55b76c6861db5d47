"""Whether a checkpoint is whole and belongs to this job, and how it is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit.advice.preflight.finding import Finding, Line
from memfit.advice.preflight.situation import Situation, output_folder
from memfit.jobs.training.checkpoints import check_checkpoint, steps_done
from memfit.jobs.training.whole_checkpoint import check_whole, processes_of

RESUME = Line("config", "resume")


def resume(situation: Situation) -> Iterator[Finding]:
    from memfit.jobs.training.preparation import find_beginning, note_on_weights

    config = situation.config
    if config.saving.resume_from is None:
        yield RESUME.ok("a new run; checkpoints go on exactly, in data order and random numbers too")
        return

    folder, weights = find_beginning(config, output_folder(config))
    if folder is None:
        assert weights is not None
        yield RESUME.warning(note_on_weights(situation.job.needed(), weights), folder=str(weights.folder))
        return
    check_whole(folder, config, world_size=situation.asked.world_size)
    yield from _belongs(folder, situation)


def _belongs(folder: Path, situation: Situation) -> Iterator[Finding]:
    job = situation.job.needed()
    notes, done = check_checkpoint(folder, job), steps_done(folder)
    details: dict[str, Any] = {"folder": str(folder), "steps_done": done, "total_steps": job.total_steps}
    if done >= job.total_steps:
        yield RESUME.failed(
            f"'{folder}' has {done:,} steps, and this config ends at step {job.total_steps:,}",
            "a larger max_steps or epochs goes on from there", **details,
        )  # fmt: skip
        return
    for note in notes:
        yield RESUME.warning(note, "resume with the config of that run", **details)
    wrote, now = processes_of(folder), situation.asked.world_size
    if wrote != now:
        yield RESUME.warning(
            f"'{folder}' holds the random numbers of {_processes(wrote)}, and {_processes(now)} would train: the data"
            " go on where they stopped, dropout draws anew",
            f"the very same run goes on with --nproc_per_node={wrote}" if wrote else None, **details,
        )  # fmt: skip
    elif not notes:
        yield RESUME.ok(
            f"step {done:,} of {job.total_steps:,}: whole, and of the same model, method, optimizer and data; each"
            " process reads it to the host first, and the data go on where they stopped",
            **details,
        )


def _processes(count: int) -> str:
    return "no process" if count == 0 else "1 process" if count == 1 else f"{count} processes"
