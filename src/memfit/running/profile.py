"""`memfit.profile`: the snapshot of a forward pass or a training step, measured on a GPU or predicted without one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import chain, count
from pathlib import Path
from typing import Any

from memfit.errors import InputError, UsageError
from memfit.files import check_free, files_of_model, writing
from memfit.jobs.profile import (
    BATCH_SIZE,
    CONTEXT_LENGTH,
    OnCard,
    Profiled,
    ProfileSettings,
    check_gpu,
    course_size,
    profile_on_gpu,
)
from memfit.render.shown import Shown
from memfit.units import gib

SCHEMA = "memfit.profile/1"
PREDICT = "predict"
RESULTS = Path("results") / "memory_profiling"


@dataclass(frozen=True, kw_only=True, repr=False)
class Profile(Shown):
    """What `memfit.profile` answers: the peak, by phase, and where the snapshot lies. `print` shows it."""

    settings: ProfileSettings
    found: Profiled
    path: Path
    """The snapshot, which pytorch.org/memory_viz opens."""

    def __repr__(self) -> str:
        peak, origin = gib(self.found.peak_allocated_bytes), self.found.origin
        return f"<Profile: {self.settings.profile_type} of {self.settings.model}, {peak} {origin}, {self.path}>"

    def to_json(self) -> dict[str, Any]:
        """memfit.profile/1"""
        found, card = self.found, self.found.on_card
        return {
            "schema": SCHEMA, "origin": found.origin, "gpu": found.gpu,
            **{each.name: getattr(card, each.name, None) for each in fields(OnCard)},
            "workload": self.settings.workload.settings(),
            "peak": {"allocated_bytes": found.peak_allocated_bytes, "reserved_bytes": found.peak_reserved_bytes},
            "phases": [{"name": name, "allocated_bytes": size} for name, size in found.phases.items()],
            "snapshot": str(self.path), "notes": list(found.notes),
        }  # fmt: skip


def profile(
    model: str | None = None,
    *,
    model_size: str | None = None,
    context_length: int = CONTEXT_LENGTH,
    batch_size: int = BATCH_SIZE,
    warmup_steps: int = ProfileSettings.warmup_steps,
    measure_steps: int = ProfileSettings.measure_steps,
    profile_type: str = "forward",
    use_mixed_precision: bool = False,
    dtype: str | None = None,
    output: str | os.PathLike[str] | None = None,
    device: str = "cuda",
    gpu: str | None = None,
    force: bool = False,
) -> Profile:
    """Snapshot the memory of a forward pass or a training step, on a GPU, or predicted with `device="predict"`.

    Settings are the flags of `memfit profile`: `model_size` is one of a course's, `model` any that a plan takes; `gpu`
    names a card to predict for. The snapshot goes to `output`, .pickle or .json, or into a folder of results."""
    from memfit.snapshots.write import save_snapshot

    if (model_size is None) == (model is None):
        raise UsageError("give --model-size or --model", hint="--model-size 2.7B is the profiling guide's")
    if dtype not in (None, "bf16", "fp16"):
        raise UsageError(f"--dtype {dtype!r} is not one of bf16, fp16")
    if dtype is not None and not use_mixed_precision:
        raise UsageError(
            f"--dtype {dtype} is of the autocast region, and there is none", hint="add --use-mixed-precision"
        )
    settings = ProfileSettings.asked(
        course_size(model_size) if model_size else str(model),
        context_length=context_length,
        batch_size=batch_size,
        profile_type=profile_type,
        dtype=(dtype or "bf16") if use_mixed_precision else None,
        warmup_steps=warmup_steps,
        measure_steps=measure_steps,
    )
    path = _place(None if output is None else Path(output), settings, gpu, force)
    found = profiler_on(device, gpu)(settings)
    with writing(path, "--output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_snapshot(found.snapshot, path)
    return Profile(settings=settings, found=found, path=path)


def profiler_on(device: str, gpu: str | None) -> Callable[[ProfileSettings], Profiled]:
    if device == PREDICT:
        from memfit.planning.profile import predict_profile

        return lambda settings: predict_profile(settings, gpu)
    if gpu is not None:
        raise UsageError("--gpu is for --device predict", hint="on a GPU, that GPU is profiled")
    check_gpu(device)
    return lambda settings: profile_on_gpu(settings, device)


def prepare_suite(
    *,
    model_size: str = "2.7B",
    batch_size: int = BATCH_SIZE,
    warmup_steps: int = ProfileSettings.warmup_steps,
    measure_steps: int = 1,
    part: list[str] | None = None,
    device: str = "cuda",
    gpu: str | None = None,
    output_dir: str = str(RESULTS),
    force: bool = False,
) -> tuple[Any, list[str]]:
    """Every file of the profiling guide, about to be made, and the parts of it that are wanted."""
    from memfit.guides.profile_suite import PARTS, Suite

    wanted = [each.strip().lower() for given in part or PARTS for each in given.split(",")]
    if unknown := [each for each in wanted if each not in PARTS]:
        raise UsageError(f"--part {unknown[0]!r} is not one of {', '.join(PARTS)}")
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output-dir {output_dir!r} is a file")
    base = ProfileSettings.asked(
        course_size(model_size), batch_size=batch_size, warmup_steps=warmup_steps, measure_steps=measure_steps
    )
    profiler = None if wanted == ["d"] else profiler_on(device, gpu)  # (d) is arithmetic
    measured = "computed, nothing measured" if profiler is None else f"measured on {device}"
    where = f"predicted for {gpu or 'H200'}" if device == PREDICT else measured
    whole = Suite(base, profiler, folder, where=where)
    if not force and (why := whole.not_free(wanted)):
        raise InputError(f"--output-dir {output_dir!r} {why}", hint="--force overwrites files there")
    return whole, wanted


def _place(asked: Path | None, settings: ProfileSettings, gpu: str | None, force: bool) -> Path:
    path = asked or RESULTS / settings.file_name_on(gpu)
    if asked is None and not force:
        path = _free_beside(path)
    if path.suffix not in (".pickle", ".pkl", ".json"):
        raise UsageError(f"--output {str(path)!r} has no known ending", hint="end its name in .pickle or .json")
    if asked is not None or path.parent.is_dir():
        check_free(path, "--output", force, inputs=files_of_model(settings.model))
    return path


def _free_beside(path: Path) -> Path:
    """Nobody named it, so it need not be in anybody's way."""
    others = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(free for free in chain([path], others) if not free.exists())
