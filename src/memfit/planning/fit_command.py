"""The command that looks for what fits: the job as it was asked for, in flags."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator

from memfit.jobs.workload import Workload, flag


def fit_command(work: Workload, gpu: str, *, global_batch: int | None = None) -> str:
    """Accumulation follows from the global batch."""
    parts = ["memfit", "fit", work.kind, "--model", work.model]
    parts += unusual_flags(work, without=() if global_batch is None else ("grad_accum",))
    if global_batch is not None:
        parts += ["--global-batch", str(global_batch)]
    return shlex.join([*parts, "--gpu", gpu])


def unusual_flags(work: Workload, *, without: tuple[str, ...] = ()) -> Iterator[str]:
    """Of the settings that this kind of job reads, only what is not as it would be without being said."""
    usual = Workload(kind=work.kind, model=work.model, loop=work.loop)
    read = [name for name in work.settings() if name not in without]
    for each in dataclasses.fields(Workload):
        value = getattr(work, each.name)
        if each.name == "loop" and work.trains and value != each.default:
            yield from ("--loop", str(value))
        elif each.name in read and value != getattr(usual, each.name):
            yield from _said(each.name, value)


def _said(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else f"--no-{name.replace('_', '-')}"]
    if isinstance(value, tuple):
        return [flag(name), ",".join(map(str, value))]
    return [flag(name), str(value)]
