"""The command or the line of code with which to go on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.advice.explaining.fix import Fix
from memfit.advice.explaining.job import Job
from memfit.advice.explaining.smaller_job import USUAL_LENGTH
from memfit.gpus import Gpu
from memfit.units import MiB

if TYPE_CHECKING:
    from memfit.advice.explain import Explanation

PLACEHOLDERS = {"kind": "lora|train|forward|generate|prune", "model": "NAME"}
WHOLE_TEXT = "give the whole text from `Traceback` to its end, the log file, a snapshot or the folder of the run"
SNAPSHOT = (
    "a snapshot tells who holds the memory: torch.cuda.memory._record_memory_history() at the start, "
    "torch.cuda.memory._dump_snapshot('oom.pickle') in `except torch.OutOfMemoryError`, then memfit explain oom.pickle"
)


def next_steps(told: Explanation) -> list[str]:
    if told.cause.kind == "none":
        return [WHOLE_TEXT] if told.source.kind == "text" else []
    if told.cause.kind in ("host-memory", "library", "corrupt-size"):
        return []
    unsettled = told.cause.fragmentation is not None and told.cause.fragmentation.verdict == "cannot tell"
    return [*_of_the_job(told), *([SNAPSHOT] if unsettled and told.account.cached_bytes is not None else [])]


def _of_the_job(told: Explanation) -> Iterator[str]:
    job = told.job
    predicted = [fix for fix in told.fixes if fix.basis == "predicted"]
    if job.workload is None and job.missing:
        asked = " ".join(f"--{name.replace('_', '-')} {PLACEHOLDERS.get(name, 'N')}" for name in job.missing)
        yield f"savings are predicted once the job is known: add {asked}"
    elif told.gpu is None and predicted:
        yield "add --gpu NAME|SIZE to hear which of these is enough for the card"
    elif told.plan is not None and told.plan.verdict == "fails" and not any(map(_is_enough, predicted)):
        yield f"no single change is enough: {_command(job, told.gpu)} finds the smallest set of them"


def _is_enough(fix: Fix) -> bool:
    return fix.verdict in ("safe", "tight")


def _command(job: Job, gpu: Gpu | None) -> str:
    from memfit.planning.fit_command import unusual_flags

    work = job.workload
    assert work is not None
    if job.of_another_pruner:
        work = replace(work, seq_len=min(work.seq_len, USUAL_LENGTH))
    card = f"{gpu.capacity_bytes // MiB}MiB" if gpu else "..."
    return shlex.join(["memfit", "fit", work.kind, "--model", work.model, *unusual_flags(work), "--gpu", card])
