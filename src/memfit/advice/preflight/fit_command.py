"""The command that looks for what fits: the job as it was asked for, in flags."""

from __future__ import annotations

import dataclasses
import shlex

from memfit.jobs.workload import Workload, flag


def fit_command(work: Workload, gpu: str, *, global_batch: int | None = None) -> str:
    """Only what is not as it would be without being said; accumulation follows from the global batch."""
    plain = Workload(kind=work.kind, model=work.model, loop=work.loop)
    parts = ["memfit", "fit", work.kind, "--model", work.model]
    read = {name for name in work.settings() if global_batch is None or name != "grad_accum"}
    for each in dataclasses.fields(Workload):
        value = getattr(work, each.name)
        if each.name == "loop" and work.trains and value != each.default:
            parts += ["--loop", str(value)]
        elif each.name in read and value != getattr(plain, each.name):
            parts += _said(each.name, value)
    if global_batch is not None:
        parts += ["--global-batch", str(global_batch)]
    return shlex.join([*parts, "--gpu", gpu])


def _said(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else f"--no-{name.replace('_', '-')}"]
    if isinstance(value, tuple):
        return [flag(name), ",".join(map(str, value))]
    return [flag(name), str(value)]
