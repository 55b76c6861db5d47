"""Profile the memory of a model's forward pass or training step on a GPU: warm up, record, take the snapshot.

The steps are the jobs' own (`run.py`), so that what is profiled here and what is predicted
(`planning/profile.py`) cannot be two things.
"""

from __future__ import annotations

import dataclasses
import re
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from memfit.errors import RanOut, UnknownName, UsageError
from memfit.jobs.settings import check_one_of, check_whole
from memfit.jobs.workload import Workload

if TYPE_CHECKING:
    import torch

ProfileType = Literal["forward", "training"]
MODEL_SIZES = {
    "small": "memfit.models.basics:small", "medium": "memfit.models.basics:medium",
    "large": "memfit.models.basics:large", "xl": "memfit.models.basics:xl",
    "2.7B": "memfit.models.basics:two_point_seven_b",
}  # fmt: skip
MAX_STEPS = 10_000
CONTEXT_LENGTH, BATCH_SIZE = 512, 4


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    workload: Workload
    """A forward pass or a training step, of fp32 weights, under autocast or not."""
    model: str
    """As it was called: one of the course's sizes, or anything that `memfit plan --model` takes."""
    warmup_steps: int = 5
    measure_steps: int = 10

    def __post_init__(self) -> None:
        check_whole("--warmup-steps", self.warmup_steps, least=0, most=MAX_STEPS)
        check_whole("--measure-steps", self.measure_steps, most=MAX_STEPS)

    @classmethod
    def asked(
        cls,
        model: str,
        *,
        context_length: int = CONTEXT_LENGTH,
        batch_size: int = BATCH_SIZE,
        profile_type: str = "forward",
        dtype: str | None = None,
        **steps: int,
    ) -> ProfileSettings:
        """`dtype` is that of the autocast region; None: no mixed precision."""
        work = Workload(
            kind="forward", model=model_of(model), batch_size=batch_size, seq_len=context_length, outputs="dropped",
        )  # fmt: skip
        return cls(workload=work, model=model, **steps).of_step(profile_type, dtype)

    def of_step(self, profile_type: str, dtype: str | None = None, **changes: Any) -> ProfileSettings:
        """The same model with another kind of step."""
        check_one_of("--profile-type", profile_type, ProfileType)
        kind, precision = "train" if profile_type == "training" else "forward", f"amp-{dtype}" if dtype else "fp32"
        work = self.workload.changed(kind=kind, precision=precision, **changes)
        return dataclasses.replace(self, workload=work)

    @property
    def profile_type(self) -> ProfileType:
        return "training" if self.workload.trains else "forward"

    @property
    def steps(self) -> int:
        return self.warmup_steps + self.measure_steps

    @property
    def file_name(self) -> str:
        return self.file_name_on(None)

    def file_name_on(self, card: str | None) -> str:
        """Model, length and kind as in `guides/profile_suite.py`; what is set otherwise than there is added."""
        work, usual = self.workload, (BATCH_SIZE, ProfileSettings.warmup_steps, ProfileSettings.measure_steps)
        numbers = {"batch": work.batch_size, "warmup": self.warmup_steps, "measure": self.measure_steps}
        said = [f"{name}{has}" for (name, has), plain in zip(numbers.items(), usual, strict=True) if has != plain]
        named = (self.model, f"ctx{work.seq_len}", self.profile_type, *said, work.autocast_type, card, "snapshot")
        return "_".join(re.sub(r"[^\w.-]", "-", part) for part in named if part is not None) + ".pickle"


def model_of(size: str) -> str:
    known = {name.lower(): factory for name, factory in MODEL_SIZES.items()}
    return known.get(size.lower(), size)


def course_size(size: str) -> str:
    """A size of the course by whatever spelling."""
    for name in MODEL_SIZES:
        if name.lower() == size.lower():
            return name
    raise UnknownName("model size", size, list(MODEL_SIZES), more=f"sizes: {', '.join(MODEL_SIZES)}")


@dataclass(frozen=True, kw_only=True)
class OnCard:
    """What a plan says of the card that was named."""

    verdict: Literal["safe", "tight", "fails"]
    capacity_bytes: int
    headroom_bytes: int
    smallest_gpu_bytes: int


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """What a profile gave, measured or predicted."""

    origin: Literal["measured", "predicted"]
    gpu: str
    snapshot: dict[str, Any]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    phases: dict[str, int]
    """The peak of each phase over all measured steps, in the order in which they first come."""
    notes: tuple[str, ...] = ()
    on_card: OnCard | None = None

    @property
    def fits(self) -> bool:
        return self.on_card is None or self.on_card.verdict != "fails"

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name])

    def allocations(self) -> list[dict[str, Any]]:
        """The allocation events of the measured steps."""
        traces = self.snapshot["device_traces"]
        return [event for events in traces for event in events if event["action"] == "alloc"]


def check_gpu(device: str) -> None:
    import torch

    if not device.startswith("cuda") or not torch.cuda.is_available():
        raise UsageError(
            f"--device {device}: there is no such GPU for this torch ({torch.__version__})",
            hint="--device predict needs none: it predicts the same snapshot",
        )


def profile_on_gpu(settings: ProfileSettings, device: str) -> Profiled:
    """Peaks are those of the measured steps; the warm-up has made the optimizer's state and filled the pools."""
    import torch

    from memfit.jobs.build import prepare
    from memfit.jobs.run import run_job
    from memfit.recording.recorder import stop_history

    where = torch.device(device)
    settings, notes = _with_what_the_card_can(settings)
    job = prepare(settings.workload)
    phases = _MeasuredPhases(settings, where)
    try:
        run_job(job, where, phases, steps=settings.steps)
        torch.cuda.synchronize(where)
        snapshot = torch.cuda.memory._snapshot(where)
    except torch.OutOfMemoryError as error:
        raise RanOut(f"{settings.profile_type} at context {settings.workload.seq_len} ran out of memory") from error
    finally:
        stop_history()
    phases.write_marks(snapshot, where.index or 0)
    return Profiled(
        origin="measured", gpu=torch.cuda.get_device_name(where), snapshot=snapshot,
        peak_allocated_bytes=max(phases.peaks.values()), peak_reserved_bytes=phases.reserved, phases=phases.peaks,
        notes=notes,
    )  # fmt: skip


def _with_what_the_card_can(settings: ProfileSettings) -> tuple[ProfileSettings, tuple[str, ...]]:
    import torch

    if not settings.workload.has_bf16 or torch.cuda.is_bf16_supported(including_emulation=False):
        return settings, ()
    return settings.of_step(settings.profile_type, "fp16"), ("this card has no bf16: fp16 was used instead",)


class _MeasuredPhases:
    """Starts the history when the warm-up is over, and notes when each phase began."""

    def __init__(self, settings: ProfileSettings, device: torch.device) -> None:
        self.first, self.device = settings.warmup_steps + 1, device
        self.began: list[tuple[int, str, int]] = []
        self.recording = False
        self.peaks: dict[str, int] = {}
        self.reserved = 0

    @contextmanager
    def __call__(self, name: str, step: int = 0) -> Iterator[None]:
        import torch

        if step == self.first and not self.recording:
            from memfit.recording.recorder import start_history

            torch.cuda.synchronize(self.device)
            start_history()
            self.recording = True
        if self.recording:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.began.append((time.time_ns() // 1000, name, step))
        yield
        if self.recording:
            self.peaks[name] = max(self.peaks.get(name, 0), torch.cuda.max_memory_allocated(self.device))
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self.device))

    def write_marks(self, snapshot: dict[str, Any], device: int) -> None:
        from memfit.snapshots.read import FORMAT

        times = [event["time_us"] for event in snapshot["device_traces"][device]]
        marks = [{"before": bisect_left(times, at), "phase": name, "step": step} for at, name, step in self.began]
        snapshot["memfit"] = {"format": FORMAT, "origin": "measured", "device": device, "marks": marks}
