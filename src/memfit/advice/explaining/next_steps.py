"""The command or the line of code with which to go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memfit.advice.explaining.accounting import Account
from memfit.advice.explaining.cause import Cause
from memfit.advice.explaining.fix import Fix
from memfit.advice.explaining.job import Job
from memfit.gpus import Gpu
from memfit.units import MiB

if TYPE_CHECKING:
    from memfit.planning.predict import Plan

PLACEHOLDERS = {"kind": "lora|train|forward|generate|prune", "model": "NAME"}


def next_steps(
    cause: Cause, account: Account, job: Job, gpu: Gpu | None, plan: Plan | None, fixes: Sequence[Fix]
) -> list[str]:
    return [] if cause.kind == "none" else list(_steps(cause, account, job, gpu, plan, fixes))


def _steps(
    cause: Cause, account: Account, job: Job, gpu: Gpu | None, plan: Plan | None, fixes: Sequence[Fix]
) -> Iterator[str]:
    if cause.kind in ("host-memory", "library", "corrupt-size"):
        return
    if plan is not None:
        if not any(fix.basis == "predicted" and fix.verdict in ("safe", "tight") for fix in fixes):
            yield f"no single change is enough: {_command(job, gpu)} finds the smallest set of them"
    elif job.workload is None and job.missing:
        asked = " ".join(f"--{name.replace('_', '-')} {PLACEHOLDERS.get(name, 'N')}" for name in job.missing)
        yield f"savings are predicted once the job is known: add {asked}"
    unsettled = cause.fragmentation is not None and cause.fragmentation.verdict == "cannot tell"
    if unsettled and account.cached_bytes is not None:
        yield (
            "a snapshot tells who holds the memory: torch.cuda.memory._record_memory_history() at the start, "
            "torch.cuda.memory._dump_snapshot('oom.pickle') in `except torch.OutOfMemoryError`, then memfit "
            "explain oom.pickle"
        )


def _command(job: Job, gpu: Gpu | None) -> str:
    from memfit.planning.train_plan import unusual_flags

    work = job.workload
    assert work is not None
    card = f"{gpu.capacity_bytes // MiB}MiB" if gpu else "..."
    return " ".join(["memfit fit", work.kind, "--model", work.model, *unusual_flags(work), "--gpu", card])
