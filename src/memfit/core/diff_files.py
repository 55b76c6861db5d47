"""Two files that memfit can read, compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfit.core.cut import one_step
from memfit.core.memory_log_file import looks_like_a_log
from memfit.core.run import Run, is_trace_file, open_run
from memfit.core.run_diff import diff_runs
from memfit.core.snapshot_schema import clean
from memfit.errors import InputError


def diff_files(
    a: str | Path, b: str | Path, *, step_a: int | None = None, step_b: int | None = None, device: int | None = None
) -> dict[str, Any]:
    runs = [
        _opened(path, step, flag, device) for path, step, flag in ((a, step_a, "--step-a"), (b, step_b, "--step-b"))
    ]
    document = diff_runs(*runs)
    for side, path in (("a", a), ("b", b)):
        document[side] = {"path": clean(str(path)), **document[side]}
    return document


def _opened(path: str | Path, step: int | None, flag: str, device: int | None) -> Run:
    _refuse_logs(Path(path))
    run = open_run(path, device=None if is_trace_file(path) else device)
    return run if step is None else one_step(run, step, flag=flag)


def _refuse_logs(path: Path) -> None:
    try:
        if not path.is_file():
            return
        with path.open("rb") as source:
            start = source.read(4096)
    except (OSError, ValueError):
        return
    if looks_like_a_log(start):
        raise InputError(
            f"{str(path)!r} is a memory log: it has checkpoints, no events to compare",
            hint="compare snapshots or traces; `memfit report` shows a log",
        )
