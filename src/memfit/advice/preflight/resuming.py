"""Whether a checkpoint belongs to this job, and how it is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memfit.advice.preflight.finding import Finding, Line
from memfit.advice.preflight.situation import Situation, output_folder

RESUME = Line("config", "resume")


def resume(situation: Situation) -> Iterator[Finding]:
    from memfit.jobs.training.checkpoints import check_checkpoint, find_checkpoint, steps_done

    config = situation.config
    if config.saving.resume_from is None:
        yield RESUME.ok("a new run; checkpoints go on exactly, in data order and random numbers too")
        return
    folder = find_checkpoint(config.saving.resume_from, output_folder(config))
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
    if not notes:
        yield RESUME.ok(
            f"step {done:,} of {job.total_steps:,}: same model, method, optimizer and data; each process reads it to"
            " the host first, and the data go on where they stopped",
            **details,
        )
