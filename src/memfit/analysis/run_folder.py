"""The folder of a run as a document (memfit.run/1): checkpoints, peaks beside the plan's, losses, growth.

A run that is still going has only its logs: they are read as far as they are written, without the last line where that
is half a line. What came to its end has a result.json, which knows more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit.analysis.files import LOG, PARTS, RESULT, log_part, read_memory_log, read_result
from memfit.errors import InputError
from memfit.snapshots.schema import clean

SCHEMA = "memfit.run/1"
TRAIN_LOG = "train.log"
RUN_FILES = (LOG, PARTS, RESULT, TRAIN_LOG)
SILENT_SECONDS = 300.0
"""A run without a result that has written nothing for so long is no longer called running."""
LATER = 2.0
"""Seconds by which a log must be younger than the result to be of another run."""
MAX_BYTES = 16 << 20
MAX_POINTS = 1000
MAX_LINES = 12
_STEP = re.compile(r"step (\d{1,12})(?:/(\d{1,12}))?(?:, loss (-?[\d.]{1,30}|nan|inf))?")
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ")
PHASE_KEYS = ("predicted_allocated", "measured_allocated", "predicted_reserved", "measured_reserved")


def read_run(folder: Path, now: float) -> dict[str, Any]:
    """`now`: seconds since the epoch, by which a run that is silent for long is told from one that goes on."""
    written = {name: (folder / name).stat().st_mtime for name in RUN_FILES if (folder / name).is_file()}
    if not written:
        raise InputError(f"no run in {clean(str(folder))!r}", hint=f"a run's folder has one of {', '.join(RUN_FILES)}")
    logged = max((when for name, when in written.items() if name != RESULT), default=0.0)
    result = read_result(folder / RESULT, MAX_BYTES) or {} if written.get(RESULT, 0.0) >= logged - LATER else {}
    if set(written) == {RESULT} and not str(result.get("schema", "")).startswith("memfit."):
        raise InputError(f"the {RESULT} in {clean(str(folder))!r} is not of a run of memfit")
    lines = _lines(folder)
    log, messages = _log(folder)
    ended = bool(result) or any(line.startswith("end:") for line in lines[-3:])
    failed = bool(log and log["checkpoints"] and log["checkpoints"][-1]["failed"])
    silent = now - max(written.values()) > SILENT_SECONDS
    steps, losses = _steps(result, lines)
    return {
        "schema": SCHEMA, "kind": _kind(result, written),
        "state": "ended" if ended else "broke" if failed else "silent" if silent else "running",
        "written": max(written.values()), "messages": messages, "log": log, "steps": steps, "losses": losses,
        "peaks": list(_peaks(result, log)), "phases": list(_phases(result)), "growth": _growth(result, lines),
        "facts": list(_facts(result)), "said": lines[-MAX_LINES:],
    }  # fmt: skip


def _kind(result: Mapping[str, Any], written: Mapping[str, float]) -> str:
    said = str(result.get("schema", ""))
    if said.startswith("memfit.train") or TRAIN_LOG in written:
        return "train"
    return "prune" if said.startswith("memfit.prune") else "log"


def _lines(folder: Path) -> list[str]:
    """Of the run that began last, without their times."""
    path = folder / TRAIN_LOG
    try:
        with path.open("rb") as source:
            source.seek(max(0, path.stat().st_size - MAX_BYTES))
            text = source.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    whole = text.rpartition("\n")[0].splitlines()
    lines = [clean(_STAMP.sub("", line, count=1)) for line in whole]
    starts = [i for i, line in enumerate(lines) if line.startswith("start:")]
    return lines[starts[-1] :] if starts else lines


def _log(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    try:
        log = read_memory_log(folder / LOG, whole_lines=True)
    except InputError as error:
        return None, [error.message] if (folder / LOG).exists() else []
    try:
        parts = read_memory_log(folder / PARTS, whole_lines=True)
    except InputError:
        parts = None
    found = log_part(log, parts)
    found["checkpoints"] = _thinned(found["checkpoints"])
    found["parts"] = sorted(found["parts"], key=lambda row: -(row["peak_bytes"] or 0))[:20]
    return found, [str(remark) for remark in log.warnings if remark.kind != "empty"]


def _thinned(rows: Sequence[Any]) -> list[Any]:
    """The first and the last are kept, and of what lies between as many as a picture has room for."""
    stride = -(-len(rows) // MAX_POINTS) or 1
    return [row for i, row in enumerate(rows) if i % stride == 0 or i == len(rows) - 1]


def _steps(result: Mapping[str, Any], lines: Sequence[str]) -> tuple[dict[str, int | None], list[list[float]]]:
    done, total = 0, None
    losses: dict[int, float] = {}
    for line in lines:
        found = _STEP.match(line.partition(": ")[2] if line.startswith("start:") else line)
        if found:
            done, total = int(found[1]), int(found[2]) if found[2] else total
            if found[3] and math.isfinite(float(found[3])):
                losses[done] = float(found[3])
    known = result.get("losses")
    if isinstance(known, dict):
        losses |= {int(step): float(loss) for step, loss in known.items() if step.isdecimal() and _is_number(loss)}
    done = max(done, _whole(result.get("steps")) or 0)
    return {"done": done or None, "total": total}, [[step, losses[step]] for step in _thinned(sorted(losses))]


def _peaks(result: Mapping[str, Any], log: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    peaks = _dict(result.get("peaks"))
    predicted = _dict(result.get("predicted")) or _dict(peaks.get("predicted"))
    points = log["checkpoints"] if log else []
    reserved = max((point["reserved_bytes"] for point in points if point["reserved_bytes"] is not None), default=None)
    allocated, host = (log["peak_bytes"], log["cpu_peak_bytes"]) if log else (None, None)
    rows: tuple[tuple[str, tuple[Any, ...], tuple[Any, ...]], ...] = (
        (
            "GPU allocated",
            (predicted.get("peak_bytes"), predicted.get("gpu_allocated_bytes")),
            (result.get("gpu_peak_bytes"), peaks.get("gpu_allocated_bytes"), allocated),
        ),
        (
            "GPU reserved",
            (predicted.get("reserved_bytes"), predicted.get("gpu_reserved_bytes")),
            (result.get("gpu_reserved_bytes"), reserved),
        ),
        ("host", (predicted.get("host_bytes"),), (result.get("host_peak_bytes"), peaks.get("host_bytes"), host)),
    )
    for name, said, seen in rows:
        found = {"predicted_bytes": _first(said), "measured_bytes": _first(seen)}
        if any(size is not None for size in found.values()):
            yield {"name": name, **found}


def _first(sizes: Sequence[Any]) -> int | None:
    return next((size for size in map(_whole, sizes) if size is not None), None)


def _phases(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    rows = result.get("phases")
    for row in rows[:50] if isinstance(rows, list) else ():
        if isinstance(row, dict) and isinstance(row.get("phase"), str):
            sizes = {f"{key}_bytes": _whole(row.get(f"{key}_bytes")) for key in PHASE_KEYS}
            yield {"phase": clean(row["phase"]), **sizes}


def _growth(result: Mapping[str, Any], lines: Sequence[str]) -> dict[str, Any] | None:
    found = _dict(result.get("growth"))
    if isinstance(found.get("kind"), str) and isinstance(found.get("text"), str):
        return {"kind": clean(found["kind"]), "text": clean(found["text"])}
    said = next((line.partition(": ")[2] for line in reversed(lines) if line.startswith("growth:")), None)
    return None if said is None else {"kind": said.partition(":")[0], "text": said}


FACTS = {
    "model": "model", "method": "method", "sparsity": "sparsity", "perplexity_dense": "perplexity, dense",
    "perplexity_pruned": "perplexity, pruned", "seconds": "seconds", "seconds_per_step": "seconds a step",
    "tokens": "tokens", "micro_batch_size": "rows at a time", "gradient_accumulation_steps": "accumulated",
    "world_size": "processes", "trained_parameters": "parameters trained", "parameters": "parameters",
}  # fmt: skip


def _facts(result: Mapping[str, Any]) -> Iterator[list[Any]]:
    for key, name in FACTS.items():
        value = result.get(key)
        value = _dict(value).get("total", value)
        if isinstance(value, str) or _is_number(value):
            yield [name, clean(value) if isinstance(value, str) else value]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 60 else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
