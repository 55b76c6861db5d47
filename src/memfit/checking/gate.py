"""`memfit gate`: a list of jobs with limits, predicted again and held against the figures of last time.

    memfit.gate("gate.yaml", baseline="memory.json")

The file is YAML: `jobs`, each with a `name` and the settings of a line of `plan batch`, or `from:` another tool's job
file, or `script:` a command; a `limit` of bytes, a card (`gpu`), or both. The baseline is JSON that `update` writes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memfit.errors import InputError, MemfitError, UsageError
from memfit.files import check_free, writing, written_whole
from memfit.gpus import find_gpu
from memfit.jobfiles.file import read_job
from memfit.jobs.settings import plain_name, plain_value
from memfit.jobs.training.config_file import parse_yaml
from memfit.planning.many import predict_many
from memfit.planning.predict import Plan, predict
from memfit.render.shown import Shown
from memfit.scripts.plan import trace_script
from memfit.units import parse_bytes
from memfit.versions import versions

SCHEMA, BASELINE = "memfit.gate/1", "memfit.gate-baseline/1"
MOST = 1 << 62
"""Bytes."""
MAX_BYTES, MAX_JOBS = 1 << 20, 1 << 12
TOLERANCE = 0.01
OF_JOB = ("name", "from", "script", "limit", "gpu", "tolerance", "without")
GateStatus = Literal["ok", "new", "over limit", "grew", "no plan"]
PASSED: tuple[GateStatus, ...] = ("ok", "new")


@dataclass(frozen=True, kw_only=True)
class GatedJob:
    """One job of the file."""

    name: str
    limit_bytes: int | None
    gpu: str | None
    tolerance: float
    baseline_bytes: int | None
    plan: Plan | None = None
    error: str | None = None
    """Why there is no plan, and what to do."""

    @property
    def device_bytes(self) -> int | None:
        return None if self.plan is None else self.plan.peak.device_bytes

    @property
    def needed_bytes(self) -> int | None:
        """What is held against the limit: where a card is named, what the job takes on it."""
        return None if self.plan is None else self.plan.needed_bytes

    @property
    def status(self) -> GateStatus:
        if self.plan is None or self.needed_bytes is None or self.device_bytes is None:
            return "no plan"
        if self.plan.verdict == "fails" or (self.limit_bytes is not None and self.needed_bytes > self.limit_bytes):
            return "over limit"
        if self.baseline_bytes is None:
            return "new"
        return "grew" if self.device_bytes > self.baseline_bytes * (1 + self.tolerance) else "ok"

    def to_json(self) -> dict[str, Any]:
        now, before = self.device_bytes, self.baseline_bytes
        grown = None if now is None or before is None else now - before
        capacity = None if self.plan is None or self.plan.gpu is None else self.plan.gpu.capacity_bytes
        return {
            "name": self.name, "status": self.status, "device_bytes": self.device_bytes,
            "needed_bytes": self.needed_bytes, "limit_bytes": self.limit_bytes, "gpu": self.gpu,
            "capacity_bytes": capacity, "baseline_bytes": self.baseline_bytes, "grown_bytes": grown,
            "tolerance": self.tolerance, "error": self.error,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GateResult(Shown):
    """What `memfit.gate` found, a row a job. `passed` is its verdict; `print` shows the table."""

    file: str
    baseline: str | None
    jobs: tuple[GatedJob, ...]
    updated: bool
    notes: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Growth is accepted where the baseline was updated; a limit is not."""
        accepted = (*PASSED, "grew") if self.updated else PASSED
        return all(job.status in accepted for job in self.jobs)

    def __repr__(self) -> str:
        failed = sum(job.status not in PASSED for job in self.jobs)
        return f"<GateResult: {'passed' if self.passed else 'failed'}: {failed} of {len(self.jobs)} jobs>"

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA, "file": self.file, "baseline": self.baseline, "passed": self.passed,
            "updated": self.updated, "jobs": [job.to_json() for job in self.jobs], "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }  # fmt: skip


def gate(
    file: str | Path,
    *,
    baseline: str | Path | None = None,
    tolerance: float | str | None = None,
    gpu: str | None = None,
    update: bool = False,
) -> GateResult:
    """Predict every job of a file, and say which one takes more than its limit, or more than `tolerance` (a share, or
    "2%") above the baseline. `update` writes the baseline anew. `gpu` is for jobs that name no card."""
    started = time.perf_counter()
    path = Path(file)
    if update and baseline is None:
        raise UsageError("a baseline is to be updated, and none is named", hint="--baseline memory.json")
    document = _document(path)
    if update and baseline is not None:
        check_free(Path(baseline), "--baseline", True, inputs=(path,))
    before = _before(baseline, missing_is_new=update)
    known, jobs = before.get("jobs", {}), []
    usual = _share(tolerance if tolerance is not None else document.get("tolerance", TOLERANCE), "tolerance")
    card = gpu if gpu is not None else document.get("gpu")
    for each in _jobs(document, path):
        jobs.append(_gated(each, path.parent, card, usual, known.get(each["name"])))
    if update and baseline is not None:
        _update(Path(baseline), jobs, known)
    return GateResult(
        file=str(path), baseline=None if baseline is None else str(baseline), jobs=tuple(jobs), updated=update,
        notes=tuple(_notes(before, jobs)), seconds=time.perf_counter() - started,
    )  # fmt: skip


def _document(path: Path) -> Mapping[str, Any]:
    document = parse_yaml(_text(path), f"'{path}'")
    for key in document:
        if key not in ("jobs", "gpu", "tolerance"):
            raise InputError(f"'{path}': unknown key {str(key)!r}", hint="keys: jobs, gpu, tolerance")
    return document


def _jobs(document: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    jobs = document.get("jobs")
    if not isinstance(jobs, list) or not jobs or len(jobs) > MAX_JOBS:
        raise InputError(
            f"'{path}': jobs is not a list of jobs", hint="jobs: [{name: small, kind: train, model: gpt2}]"
        )
    names: set[str] = set()
    for number, each in enumerate(jobs, 1):
        name = each.get("name") if isinstance(each, dict) else None
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise InputError(f"'{path}': job {number} has no name", hint="name: qwen-lora")
        if name in names:
            raise InputError(f"'{path}': two jobs are called {name!r}")
        names.add(name)
    return [{str(key): value for key, value in each.items()} for each in jobs]


def _gated(job: dict[str, Any], folder: Path, usual_card: Any, usual: float, before: Any) -> GatedJob:
    name = job["name"]
    card = job.get("gpu", usual_card)
    if card is not None:
        find_gpu(str(card))
    found = {
        "name": name, "gpu": None if card is None else str(card),
        "limit_bytes": _limit(job["limit"], name) if "limit" in job else None,
        "tolerance": _share(job["tolerance"], f"tolerance of {name}") if "tolerance" in job else usual,
        "baseline_bytes": None if before is None else before["device_bytes"],
    }  # fmt: skip
    try:
        return GatedJob(**found, plan=_plan(job, folder, found["gpu"]))
    except MemfitError as error:
        return GatedJob(**found, error="; ".join([error.message, *(error.hint or "").splitlines()]))


def _limit(said: Any, name: str) -> int:
    size = parse_bytes(str(said), flag=f"limit of {name}")
    if size == 0:
        raise UsageError(f"limit of {name}: no job takes nothing", hint="such as 20GiB")
    if size > MOST:
        raise UsageError(f"limit of {name}: no card has so much", hint="such as 20GiB")
    return size


def _plan(job: Mapping[str, Any], folder: Path, card: str | None) -> Plan:
    if "from" in job and "script" in job:
        raise UsageError("from and script are two jobs")
    settings = {plain_name(key): plain_value(plain_name(key), each) for key, each in job.items() if key not in OF_JOB}
    if "script" in job:
        if settings:
            raise UsageError(f"{next(iter(settings))} has no effect: a script has arguments of its own")
        return trace_script(_words(job["script"], folder), gpu=card)
    if "from" in job:
        files = job["from"] if isinstance(job["from"], list) else [job["from"]]
        read = read_job(*(folder / str(each) for each in files), without=_keys(job.get("without")), **settings)
        return predict(read.workload, gpu=card)
    answer = next(predict_many([settings], gpu=card))
    if isinstance(answer, Plan):
        return answer
    raise answer.error


def _keys(said: Any) -> list[str]:
    """One name as text is a list of one."""
    names = [said] if isinstance(said, str) else said or []
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise UsageError("without is not a list of keys", hint="without: [neftune_noise_alpha]")
    return names


def _words(said: Any, folder: Path) -> list[str]:
    """Of a command; a file is looked for beside the list of jobs."""
    if not isinstance(said, list) or not said:
        raise UsageError("script is not a list of words", hint="script: [train.py, --batch_size, 8]")
    return [str(folder / str(each)) if (folder / str(each)).is_file() else str(each) for each in said]


def _share(said: Any, what: str) -> float:
    text = str(said).strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < (10 if text.endswith("%") else 1):  # 2 would be 200 %, and nobody means that
        raise UsageError(f"{what} {text!r} is not a share", hint="such as 0.02 or 2%")
    return share


def _text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"'{path}' is not a file")
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"'{path}' has more than {MAX_BYTES:,} bytes")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"'{path}' is not UTF-8 text") from error
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror}") from error


def _before(baseline: str | Path | None, *, missing_is_new: bool) -> dict[str, Any]:
    if baseline is None or (missing_is_new and not Path(baseline).exists()):
        return {}
    if not Path(baseline).exists():
        raise InputError(f"no baseline '{baseline}'", hint="--update writes it")
    try:
        found = json.loads(_text(Path(baseline)))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise _no_baseline(baseline, "it is no JSON") from error
    if not isinstance(found, dict) or found.get("schema") != BASELINE:
        raise _no_baseline(baseline, "another kind of document")
    if not isinstance(found.get("jobs"), dict) or not isinstance(found.get("versions"), dict):
        raise _no_baseline(baseline, "its jobs or versions are not there")
    for name, job in found["jobs"].items():
        size = job.get("device_bytes") if isinstance(job, dict) else None
        if type(size) is not int or not 0 < size <= MOST:
            raise _no_baseline(baseline, f"job {name[:100]!r} has no size of more than 0 bytes that a card could have")
    return found


def _no_baseline(baseline: str | Path, why: str) -> InputError:
    """What was damaged is not replaced unasked: its figures may be had back."""
    hint = "bring it back from version control; or delete it, and --update makes it anew"
    return InputError(f"'{baseline}' is not a baseline of `memfit gate`: {why}", hint=hint)


def _update(path: Path, jobs: list[GatedJob], known: Mapping[str, Any]) -> None:
    """A job without a plan keeps the figures that it had: when it has one again, its growth is seen."""
    figures = {
        job.name: known[job.name] if job.plan is None else {**_peak(job.plan), "workload": job.plan.workload}
        for job in jobs
        if job.plan is not None or job.name in known
    }
    made = {"schema": BASELINE, "versions": versions(), "jobs": figures}
    with writing(path, "--baseline"), written_whole(path) as beside:
        beside.write_text(json.dumps(made, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _peak(plan: Plan) -> dict[str, int]:
    names = ("device_bytes", "reserved_bytes", "allocated_bytes")
    return {name: getattr(plan.peak, name) for name in names}


def _notes(before: Mapping[str, Any], jobs: list[GatedJob]) -> Iterator[str]:
    then, now = before.get("versions") or {}, versions()
    other = [f"{name} {then[name]}, now {now[name]}" for name in now if name in then and then[name] != now[name]]
    if other:
        yield f"the baseline was made with {'; '.join(other)}"
    gone = [name for name in before.get("jobs", {}) if name not in {job.name for job in jobs}]
    if gone:
        yield f"in the baseline, and no job any more: {', '.join(gone)}"
