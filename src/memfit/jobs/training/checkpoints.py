"""Checkpoints of a run, `step_N` in its output folder: written, found, whole or not, and of this job or not.

One is written beside its place and renamed, so that one that is there is whole, however a run ends. A disk that is full
ends a run with what it has: half a checkpoint goes, the last whole one stays and is named.

Whether all files are there and whole is told without loading any. A copy that was cut off, or a disk that was full,
leaves a folder that looks like a checkpoint. The Trainer stops in the middle of such a file, and where the optimizer's
state is missing it says nothing and begins it anew.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError, MemfitError
from memfit.files import to_disk
from memfit.jobs.training.config import TrainConfig
from memfit.jobs.training.shapes import read_shape
from memfit.models.checkpoint import WeightStore, read_header
from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.jobs.training.job import TrainJob


SCHEMA = "memfit.checkpoint/1"
IDENTITY = "memfit_checkpoint.json"
STATE = "trainer_state.json"
LATEST = "latest"
_NAME = re.compile(r"(?:step_|checkpoint-)(\d{1,12})")


def step_of(folder: Path) -> int | None:
    """The step in `step_N`, or in `checkpoint-N` as the Trainer calls it."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def has_state(folder: Path) -> bool:
    """Whether a run can be continued from it: one of memfit or of the Trainer. Weights alone are only a beginning."""
    return (folder / STATE).is_file()


def find_checkpoints(output_dir: Path) -> list[Path]:
    """Those in a folder, the earliest first. A half-written one has another name, or no state yet."""
    if not output_dir.is_dir():
        return []
    found = [each for each in output_dir.iterdir() if step_of(each) is not None and has_state(each)]
    return sorted(found, key=lambda each: (step_of(each) or 0, each.name))


def find_checkpoint(said: str, output_dir: Path) -> Path:
    """What `--resume_from` means: a folder, or `latest`. It may be another program's: `has_state` tells."""
    if said.lower() == LATEST:
        there = find_checkpoints(output_dir)
        if not there:
            raise InputError(f"resume_from latest: there is no checkpoint in '{output_dir}'")
        return there[-1]
    folder = Path(said).expanduser()
    if not folder.is_dir():
        near = ", ".join(each.name for each in find_checkpoints(folder.parent)[-3:])
        raise InputError(
            f"resume_from: no folder '{said}'", hint=f"in '{folder.parent}' there is {near}" if near else None
        )
    if not has_state(folder) and (inner := find_checkpoints(folder)):
        raise InputError(
            f"resume_from '{said}' is no checkpoint: it has no {STATE}",
            hint=f"it holds {', '.join(each.name for each in inner[-3:])}: name one of them",
        )
    return folder


def steps_done(folder: Path) -> int:
    """By its state, which the Trainer reads; a folder may have been renamed."""
    done = (_read(folder / STATE) or {}).get("global_step", 0)
    return done if isinstance(done, int) else 0


def identity_of(job: TrainJob) -> dict[str, Any]:
    """What must be the same for a checkpoint to be continued, and what must be for the run to be the same."""
    config, work = job.config, job.config.workload
    method: dict[str, Any] = {"kind": config.value("method.kind")}
    if work.kind == "lora":
        targets = None if work.target_modules is None else sorted(work.target_modules)
        method |= {"rank": work.rank, "alpha": config.alpha, "target_modules": targets}
    if work.is_quantised:
        method |= {"quant": work.quant, "kbit_prepare": work.is_kbit_prepared}
        method |= {} if work.quant == "int8" else {"double": work.double_quant, "compute": work.compute_precision}
    return {
        "schema": SCHEMA, "model": config.model.name, "shape": job.shape, "method": method,
        "optimizer": work.optimizer, "precision": work.precision, "autocast": work.autocast,
        "data": job.data.fingerprint, "global_batch_size": job.batch.global_batch_size, "seed": config.seed,
        "shuffle": config.data.shuffle, "max_seq_len": config.data.max_seq_len,
    }  # fmt: skip


def write_identity(folder: Path, job: TrainJob) -> None:
    (folder / IDENTITY).write_text(json.dumps(identity_of(job), indent=1), encoding="utf-8")


def check_checkpoint(folder: Path, job: TrainJob) -> tuple[str, ...]:
    """An error if it is of another model or method; notes where the run goes on, but not as the old one would have."""
    own = identity_of(job)
    saved = _read(folder / IDENTITY)
    if saved is None:
        _check_foreign(folder, job)
        return (f"'{folder}' was not written by memfit: data order and random numbers may differ from its own run",)
    if saved.get("schema") != SCHEMA:
        raise InputError(f"'{folder / IDENTITY}' is of another version of memfit ({saved.get('schema')!r})")
    if different := _differences(saved.get("shape") or {}, own["shape"] or {}):
        raise _another_model(folder, saved.get("model"), job, different)
    for key in ("method", "optimizer"):
        if saved.get(key) != own[key]:
            raise InputError(
                f"'{folder}' was trained with {key} {_said(saved.get(key))}, and this config says {_said(own[key])}",
                hint="continue with the config of that run, or start anew without resume_from",
            )
    changed = [key for key in ("precision", "autocast", "data", "global_batch_size", "seed", "shuffle", "max_seq_len")
               if saved.get(key) != own[key]]  # fmt: skip
    if not changed:
        return ()
    return (f"resumed with another {', '.join(changed)}: the run will not be the one that was begun",)


def _check_foreign(folder: Path, job: TrainJob) -> None:
    adapter = _read(folder / "adapter_config.json")
    if (adapter is not None) != (job.config.workload.kind == "lora"):
        holds = "LoRA adapters" if adapter is not None else "a whole model"
        raise InputError(f"'{folder}' holds {holds}, and this config says method {job.config.value('method.kind')}")
    if adapter is not None and adapter.get("r") != job.config.workload.rank:
        raise InputError(
            f"'{folder}' has adapters of rank {adapter.get('r')}, and this config says {job.config.workload.rank}"
        )
    if (folder / "config.json").is_file() and job.shape is not None:
        saved = read_shape(folder / "config.json")
        shared = {key: value for key, value in saved.items() if key in job.shape and isinstance(value, (int, str))}
        if different := _differences(shared, {key: job.shape[key] for key in shared}):
            raise _another_model(folder, saved.get("model_type"), job, different)


def _another_model(folder: Path, model: object, job: TrainJob, different: str) -> InputError:
    return InputError(
        f"'{folder}' is a checkpoint of another model ({model}), not of {job.config.model.name}: {different}",
        hint="continue with the config of that run, or start anew without resume_from",
    )


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    keys = [key for key in {**saved, **own} if saved.get(key) != own.get(key)]
    return ", ".join(f"{key} {_said(saved.get(key))} there and {_said(own.get(key))} here" for key in keys[:3])


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {each}" for key, each in value.items() if each is not None)
    return "n/a" if value is None else str(value)


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read '{path}', which is damaged: {error}", hint=EARLIER) from error
    if not isinstance(found, dict):
        raise InputError(f"'{path}' is damaged", hint=EARLIER)
    return found


PROGRESS, EARLIER = "memfit_progress.json", "resume from an earlier checkpoint"
WRITING, DELETING, OTHERS = ".writing", ".deleting", ".other-program"
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_OF_SAFETENSORS = re.compile(r"(?:\(os error |Os \{ code: )(\d+)")
"""As its newer and its older versions say it."""
_OF_TORCH = ("inline_container", "PytorchStreamWriter", "iostream error", "Parent directory")
TRIED_BYTES = 1 << 20


@dataclass(kw_only=True)
class RunState:
    """What a run knows of itself beyond what the Trainer saves."""

    micro_batch_size: int
    losses: dict[int, float] = field(default_factory=dict)
    """Of each step, over all of its tokens; the first step is 1."""
    halved: list[dict[str, Any]] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        (folder / PROGRESS).write_text(json.dumps(self.__dict__), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> RunState | None:
        """None in a checkpoint that the Trainer alone has written."""
        if (found := _read(folder / PROGRESS)) is None:
            return None
        try:
            return cls(
                micro_batch_size=int(found["micro_batch_size"]),
                halved=list(found["halved"]),
                losses={int(step): float(loss) for step, loss in found["losses"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"'{folder / PROGRESS}' is damaged", hint=EARLIER) from error


def begin(output_dir: Path, step: int) -> Path:
    """The empty folder that is to become `step_N`."""
    beside = output_dir / f"step_{step}{WRITING}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def finish(beside: Path) -> Path:
    """All on the disk first, then its name."""
    for path in (*beside.rglob("*"), beside):
        if path.is_file() or path.is_dir():
            to_disk(path)
    place = beside.with_name(beside.name.removesuffix(WRITING))
    old = _make_way(place)
    beside.rename(place)
    to_disk(place.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    return place


def _make_way(place: Path) -> Path | None:
    """What is there under another name: an older checkpoint, which may go, or None. Another program's stays."""
    if not place.exists():
        return None
    if has_state(place):
        return _set_aside(place)
    others = (place.with_name(f"{place.name}{OTHERS}{number}") for number in ("", *range(-2, -1000, -1)))
    place.rename(next(each for each in others if not each.exists()))
    return None


def keep_last(output_dir: Path, count: int, *, newest: int) -> None:
    """Only the last so many stay, and what a killed run left half-written or half-deleted goes. What is later than the
    step just written was given up when the run went back behind it."""
    for path in _by_age(output_dir, newest)[:-count]:
        shutil.rmtree(_set_aside(path), ignore_errors=True)
    remove_halves(output_dir)


def make_room(output_dir: Path, count: int, *, newest: int) -> list[Path]:
    """For a checkpoint that found none: those that would go after it anyway go before it, but never the last one."""
    doomed = _by_age(output_dir, newest)[: -max(1, count - 1)]
    for path in doomed:
        shutil.rmtree(_set_aside(path), ignore_errors=True)
    return doomed


def _by_age(output_dir: Path, newest: int) -> list[Path]:
    found = find_checkpoints(output_dir)
    return sorted(found, key=lambda each: (step_of(each) or 0) <= newest)


def remove_halves(output_dir: Path) -> None:
    for path in output_dir.glob("step_*"):
        half = path.name.endswith((WRITING, DELETING)) and step_of(path.with_suffix("")) is not None
        if half and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _set_aside(folder: Path) -> Path:
    """Renamed first: half-deleted, it must not look like a checkpoint."""
    going = folder.with_name(folder.name + DELETING)
    shutil.rmtree(going, ignore_errors=True)
    folder.rename(going)
    return going


# -- a disk that takes no more -----------------------------------------------------------------------------------------


class CannotSave(MemfitError):
    """The disk takes no more of a run. What it has saved before is whole."""


def why_not_written(error: Exception, folder: Path) -> str | None:
    """In the system's words; None where it was not the disk that failed."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    said = str(error)
    if type(error).__name__ == "SafetensorError" and (found := _OF_SAFETENSORS.search(said)):
        return os.strerror(int(found[1]))
    if isinstance(error, RuntimeError) and any(word in said for word in _OF_TORCH):
        return _why_by_trying(folder)  # torch keeps the reason to itself
    return None


def _why_by_trying(folder: Path) -> str:
    tried = folder / f".tried.{os.getpid()}"
    try:
        with tried.open("wb") as stream:
            stream.write(bytes(TRIED_BYTES))
            os.fsync(stream.fileno())
    except OSError as error:
        return error.strerror or str(error)
    finally:
        tried.unlink(missing_ok=True)
    return "torch could not write its file, and does not say why"


def cannot_save(step: int, output_dir: Path, why: str) -> CannotSave:
    return _ended(f"the checkpoint of step {step} could not be written: {why}", output_dir)


@contextmanager
def disk_errors_told(output_dir: Path) -> Iterator[None]:
    """For whatever else a run writes: its logs, its result."""
    try:
        yield
    except OSError as error:
        if error.errno not in OF_THE_DISK:
            raise
        where = error.filename if isinstance(error.filename, str) else str(output_dir)
        raise _ended(f"'{where}' could not be written: {error.strerror}", output_dir) from error


def _ended(what: str, output_dir: Path) -> CannotSave:
    free = format_bytes(shutil.disk_usage(output_dir).free) if output_dir.is_dir() else "n/a"
    whole = find_checkpoints(output_dir)
    if not whole:
        return CannotSave(
            f"{what} ({free} free at '{output_dir}')",
            hint="no checkpoint had been written before it: make room, and start again",
        )
    last = whole[-1]
    size = sum(each.stat().st_size for each in last.rglob("*") if each.is_file())
    return CannotSave(
        f"{what} ({free} free at '{output_dir}', where the last one takes {format_bytes(size)})",
        hint=f"the checkpoint of step {steps_done(last)} is whole: make room, and go on with --resume_from {last}",
    )


ADAPTERS = "adapter_model.safetensors"
STATES = {"optimizer.pt": "its state would begin anew", "scheduler.pt": "the learning rate would begin anew"}
RANDOM = "rng_state*.pth"


def check_whole(folder: Path, config: TrainConfig, *, world_size: int) -> None:
    """A sharded one has files of its own, which are left to accelerate."""
    if config.workload.parallel == "fsdp2" and world_size > 1:
        return
    lora = config.workload.kind == "lora"
    if wrong := list(incomplete(folder, lora=lora)):
        whole = [each for each in find_checkpoints(folder.parent) if not any(incomplete(each, lora=lora))]
        instead = f"--resume_from {whole[-1]}, which is whole" if whole else "copy it again, or start without it"
        raise InputError(f"'{folder}' is not whole: {'; '.join(wrong)}", hint=instead)


def processes_of(folder: Path) -> int:
    """How many wrote it: each leaves its random numbers. 0 where none did."""
    return len(list(folder.glob(RANDOM)))


def incomplete(folder: Path, *, lora: bool) -> Iterator[str]:
    """What is wrong with each of its files, in words."""
    try:
        steps_done(folder)
        RunState.read(folder)
    except InputError as error:
        yield error.message
    try:
        if lora:
            read_header(folder / ADAPTERS)
        else:
            WeightStore.open(folder).close()
    except InputError as error:
        yield error.message
    for name, lost in STATES.items():
        if not (folder / name).is_file():
            yield f"it has no {name}: {lost}"
    for path in (*(folder / name for name in STATES), *sorted(folder.glob(RANDOM))):
        if path.is_file() and not _is_whole_archive(path):
            yield f"{path.name} is cut off or damaged"


def _is_whole_archive(path: Path) -> bool:
    """torch writes zip files, whose table of contents stands at the end: what was cut off has none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return bool(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False
