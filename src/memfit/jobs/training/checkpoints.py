"""Checkpoints of a run, `step_N` in its output folder: which there are, and whether one belongs to this job."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError
from memfit.jobs.training.shapes import read_shape

if TYPE_CHECKING:
    from memfit.jobs.training.preparation import TrainJob

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
    config = job.config
    method: dict[str, Any] = {"kind": config.method.kind}
    if config.method.kind == "lora":
        targets = config.method.target_modules
        method |= {
            "rank": config.method.rank, "alpha": config.method.scaling_alpha,
            "target_modules": None if targets is None else sorted(targets),
        }  # fmt: skip
    return {
        "schema": SCHEMA, "model": config.model.name, "shape": job.shape, "method": method,
        "optimizer": config.optimizer.name, "precision": config.precision,
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
    changed = [key for key in ("precision", "data", "global_batch_size", "seed", "shuffle", "max_seq_len")
               if saved.get(key) != own[key]]  # fmt: skip
    if not changed:
        return ()
    return (f"resumed with another {', '.join(changed)}: the run will not be the one that was begun",)


def _check_foreign(folder: Path, job: TrainJob) -> None:
    adapter = _read(folder / "adapter_config.json")
    if (adapter is not None) != (job.config.method.kind == "lora"):
        holds = "LoRA adapters" if adapter is not None else "a whole model"
        raise InputError(f"'{folder}' holds {holds}, and this config says method {job.config.method.kind}")
    if adapter is not None and adapter.get("r") != job.config.method.rank:
        raise InputError(
            f"'{folder}' has adapters of rank {adapter.get('r')}, and this config says {job.config.method.rank}"
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
        raise InputError(f"cannot read '{path}': {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"'{path}' is damaged")
    return found
