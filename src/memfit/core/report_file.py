"""Whatever memfit can report on, from a path: a snapshot, a trace, a memory log, or the folder of a run.

reported = report_file("run7/")
reported.document            # memfit.report/1
reported.run                 # for drawing; None if there is only a log
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.core.log_report import log_part, report_log
from memfit.core.memory_log_file import MemoryLogFile, looks_like_a_log, read_memory_log
from memfit.core.run import Run, is_trace_file, open_run, pick, runs_of_file
from memfit.core.run_report import report_run
from memfit.core.snapshot_schema import Malformed, clean, scalar
from memfit.errors import InputError, UsageError

LOG, PARTS, RESULT = "memory_log.csv", "memory_log_parts.csv", "result.json"
ENDINGS = (".pickle", ".pkl", ".npz", ".json", ".pickle.gz", ".pkl.gz", ".json.gz")
MAX_FILES = 24
MAX_FOLDER_BYTES = 256 << 20
MAX_RESULT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Reported:
    document: dict[str, Any]
    run: Run | None = None


def report_file(path: str | Path, *, device: int | None = None, alloc_conf: str | None = None) -> Reported:
    path = Path(path)
    if _is_folder(path):
        return _folder(path, device)
    if _is_log(path):
        if device is not None or alloc_conf is not None:
            raise UsageError(f"--device and --alloc-conf say nothing about {str(path)!r}, which is a memory log")
        return Reported(_named(report_log(read_memory_log(path)), path, "memory_log"))
    if is_trace_file(path):
        run = open_run(path, device=device, alloc_conf=alloc_conf)
        return Reported(_named(report_run(run), path, "trace"), run)
    if alloc_conf is not None:
        open_run(path, device=device, alloc_conf=alloc_conf)
    runs = runs_of_file(path)
    run = pick(runs, device)
    document = _named(report_run(run), path, "snapshot")
    document["devices"] = [_device(each) for each in runs]
    return Reported(document, run)


def files_read(path: Path) -> list[Path]:
    """What a report on this path may read, and so must not be written over."""
    if not _is_folder(path):
        return [path]
    return [each for each in _files(path) if each.name.endswith((*ENDINGS, ".csv"))]


def _named(document: dict[str, Any], path: Path, kind: str) -> dict[str, Any]:
    schema = document.pop("schema")
    return {"schema": schema, "source": {"path": clean(str(path)), "kind": kind, "files": []}, **document}


def _device(run: Run) -> dict[str, Any]:
    course = run.course
    reserved = course.reserved_peak_event
    return {
        "device": run.device, "events": len(run.trace), "allocated_bytes": course.allocated_at(course.peak_event),
        "reserved_bytes": None if reserved is None else course.reserved_at(reserved),
    }  # fmt: skip


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _is_log(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as source:
            start = source.read(4096)
    except (OSError, ValueError):
        return False
    return path.suffix == ".csv" or looks_like_a_log(start)


# -- a folder ----------------------------------------------------------------------------------------------------


def _folder(folder: Path, device: int | None) -> Reported:
    """The recording that needed most is reported; the log, the result and the other recordings stand beside it."""
    files = sorted(_files(folder))
    log = _log(folder / LOG, files)
    parts = _log(folder / PARTS, files)
    passed_over: list[str] = []
    rows, best = [], None
    for path in _recordings(files):
        try:
            reported = report_file(path, device=device)
        except InputError as error:
            passed_over.append(error.message)
            continue
        rows.append(_file_row(path, reported.document))
        if best is None or _peak(reported) > _peak(best[1]):
            best = path, reported
    if best is None and log is None:
        raise InputError(
            f"nothing to report on in {str(folder)!r}",
            hint="a run's folder has a memory_log.csv, a snapshot (*.pickle, *.json) or a trace (*.npz)",
        )
    if best is not None:
        document, run = best[1].document, best[1].run
        messages = document["messages"]
    else:
        assert log is not None
        document, run = _named(report_log(log, parts), folder, "run_folder"), None
        messages = document["messages"]
    messages += [{"kind": "passed_over", "text": text} for text in passed_over[:5]]
    document["source"] = {
        "path": clean(str(folder)), "kind": "run_folder", "files": rows,
        "reported": clean(best[0].name) if best is not None else LOG,
    }  # fmt: skip
    document["log"] = None if log is None else log_part(log, parts)
    document["result"] = _result(folder / RESULT)
    return Reported(document, run)


def _files(folder: Path) -> Iterator[Path]:
    try:
        for path in folder.iterdir():
            if path.is_file() and not path.name.startswith("."):
                yield path
    except OSError as error:
        raise InputError(f"cannot read the folder {str(folder)!r}: {error.strerror}") from error


def _recordings(files: list[Path]) -> list[Path]:
    """Newest first, as many as can be read in a while."""
    found = [path for path in files if path.name.endswith(ENDINGS) and _may_be_recording(path)]
    found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    kept: list[Path] = []
    size = 0
    for path in found[:MAX_FILES]:
        size += path.stat().st_size
        if kept and size > MAX_FOLDER_BYTES:
            break
        kept.append(path)
    return sorted(kept)


def _may_be_recording(path: Path) -> bool:
    """Of JSON files only those that begin as a snapshot does."""
    if not path.name.endswith(".json"):
        return True
    try:
        with path.open("rb") as source:
            return b'"segments"' in source.read(4096)
    except OSError:
        return False


def _log(path: Path, files: list[Path]) -> MemoryLogFile | None:
    if path not in files:
        return None
    try:
        return read_memory_log(path)
    except InputError:
        return None


def _peak(reported: Reported) -> int:
    return int(reported.document["peak"]["allocated_bytes"] or 0)


def _file_row(path: Path, document: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": clean(path.name), "kind": document["source"]["kind"], "origin": document["origin"],
        "allocated_bytes": document["peak"]["allocated_bytes"], "reserved_bytes": document["peak"]["reserved_bytes"],
    }  # fmt: skip


def _result(path: Path) -> dict[str, Any] | None:
    """Plain values of the result's top level; what is nested is for programs that know it."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_RESULT_BYTES:
            return None
        values = json.loads(path.read_bytes(), parse_constant=lambda name: None)
    except (OSError, ValueError, RecursionError):
        return None
    if type(values) is not dict:
        return None
    plain: dict[str, Any] = {}
    for key, value in list(values.items())[:100]:
        try:
            plain[clean(key)] = scalar(value, RESULT)
        except Malformed:
            plain[clean(key)] = f"({type(value).__name__})"
    return plain
