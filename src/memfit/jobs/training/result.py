"""What a training run tells: events and its log meanwhile, peaks of its phases, result.json, or why it ran out.

The most that was allocated and reserved in each phase of the first steps is what a plan is held against. torch has one
counter, so it is read and set back whenever a phase begins or ends; after the first steps a training repeats itself.

Where memory ran out, what makes that place smaller is told. In the middle of a step a smaller micro-batch helps, and
the engine tries it. Elsewhere it would not: weights, gradients and the optimizer's state are as large for one row as
for a hundred.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from memfit.errors import InputError, RanOut
from memfit.files import written_whole
from memfit.jobs.training.config import TORCH_ADAMW, TrainConfig
from memfit.recording.sampler import allocator_counts
from memfit.units import duration, gib

SCHEMA = "memfit.train-result/1"
RESULT_FILE = "result.json"
MUCH_WAITING = 0.1
FEW = 10


class Expected(Protocol):
    """What a plan says of the run before it starts; None where it does not know."""

    @property
    def peak_bytes(self) -> int | None: ...

    @property
    def reserved_bytes(self) -> int | None: ...

    @property
    def phases(self) -> dict[str, tuple[int, int]]: ...


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    steps: int
    first_step: int
    """The steps that had been done before this run began, by the one that it continued."""
    losses: dict[int, float]
    """Of each step that is known, from the very first on."""
    seconds: float
    tokens: int
    data_wait_share: float
    micro_batch_size: int
    gradient_accumulation_steps: int
    world_size: int
    trained_parameters: int
    parameters: int
    gpu_peak_bytes: int | None
    gpu_reserved_bytes: int | None
    host_peak_bytes: int
    checkpoint: Path
    out_of_memory: tuple[dict[str, Any], ...] = ()
    growth: dict[str, Any] | None = None
    predicted: dict[str, Any] = field(default_factory=dict)
    """By the plan: peak_bytes and reserved_bytes, where there was one."""
    phases: tuple[dict[str, Any], ...] = ()
    """Load, forward, backward, step and so on: what the plan said of each beside what the first steps took."""

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / max(1, self.steps - self.first_step)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def first_loss(self) -> float | None:
        return self._mean_loss(of_the_first=True)

    @property
    def final_loss(self) -> float | None:
        return self._mean_loss(of_the_first=False)

    def _mean_loss(self, *, of_the_first: bool) -> float | None:
        """Of a quarter of the steps, ten at most: a single step's is mostly chance."""
        if not self.losses:
            return None
        count = max(1, min(FEW, len(self.losses) // 4))
        found = [self.losses[step] for step in sorted(self.losses, reverse=not of_the_first)][:count]
        return sum(found) / len(found)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA, "steps": self.steps, "first_step": self.first_step, "final_loss": self.final_loss,
            "losses": {str(step): loss for step, loss in sorted(self.losses.items())},
            "seconds": self.seconds, "seconds_per_step": self.seconds_per_step, "tokens": self.tokens,
            "data_wait_share": self.data_wait_share, "micro_batch_size": self.micro_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps, "world_size": self.world_size,
            "trained_parameters": self.trained_parameters, "parameters": self.parameters,
            "gpu_peak_bytes": self.gpu_peak_bytes, "gpu_reserved_bytes": self.gpu_reserved_bytes,
            "host_peak_bytes": self.host_peak_bytes, "checkpoint": str(self.checkpoint),
            "out_of_memory": list(self.out_of_memory), "growth": self.growth, "predicted": self.predicted,
            "phases": list(self.phases),
        }  # fmt: skip

    def in_lines(self) -> list[str]:
        done = self.steps - self.first_step
        lines = [
            f"trained {done:,} step{'' if done == 1 else 's'} in {self.seconds:,.1f} s, "
            f"{self.seconds_per_step:.2f} s a step, {self.tokens_per_second:,.0f} tokens a second",
            f"trained parameters: {self.trained_parameters:,} of {self.parameters:,}",
        ]
        if self.first_loss is not None and self.final_loss is not None:
            lines.append(f"loss: {self.first_loss:.4f} at first, {self.final_loss:.4f} at the end")
        lines += self._memory()
        if self.data_wait_share > MUCH_WAITING:
            lines.append(f"{self.data_wait_share:.0%} of the time went by waiting for data: a larger num_workers helps")
        for each in self.out_of_memory:
            rows = f"micro_batch_size {each['rows_before']} became {each['rows_after']}"
            where = f"step {each['step']}" if each["step"] else "the probe"
            lines.append(f"memory ran out in {where}: {rows}, at the same global batch")
        if self.growth is not None and self.growth["kind"] != "none":
            lines.append(f"growth: {self.growth['text']}")
        lines.append(f"checkpoint: {self.checkpoint}")
        return lines

    def _memory(self) -> list[str]:
        if self.gpu_peak_bytes is None:
            return [f"memory: host {gib(self.host_peak_bytes)} at most; no GPU"]
        lines = []
        for name, measured in (("peak", self.gpu_peak_bytes), ("reserved", self.gpu_reserved_bytes)):
            said = self.predicted.get(f"{name}_bytes")
            beside = f", predicted {gib(said)} ({(said - measured) / measured:+.1%})" if said and measured else ""
            lines += [] if measured is None else [f"GPU {name}: measured {gib(measured)}{beside}"]
        return [*lines, *self._by_phase(), f"host: {gib(self.host_peak_bytes)} at most"]

    def _by_phase(self) -> list[str]:
        rows = [each for each in self.phases if each["measured_allocated_bytes"] is not None]
        if not rows:
            return []
        lines = ["by phase    allocated: predicted    measured   reserved: predicted    measured"]
        for each in rows:
            sizes = [gib(each[f"{name}_bytes"]) for name in SIZES]
            lines.append("  {:<10} {:>20} {:>11} {:>21} {:>11}".format(each["phase"], *sizes))
        if self.out_of_memory:
            lines.append("  the plan was for the micro-batch that ran out of memory")
        return lines

    def write(self, folder: Path) -> None:
        with written_whole(folder / RESULT_FILE) as beside:
            beside.write_text(json.dumps(self.to_json(), indent=1), encoding="utf-8")


PHASES = ("load", "prepare", "adapt", "forward", "backward", "step")
"""Quantised weights are prepared and adapted on the GPU."""
STEPS = 2
"""The first makes the optimizer's state, the second runs with it."""
BETWEEN = ""
SIZES = ("predicted_allocated", "measured_allocated", "predicted_reserved", "measured_reserved")
"""Of a phase."""


class PhasePeaks:
    """`tell` is told of every peak that is read, since the counter no longer knows it then."""

    def __init__(self, *, gpu: bool, tell: Callable[[int, int], None]) -> None:
        self.peaks: dict[str, tuple[int, int]] = {}
        self._on, self._tell, self._phase = gpu, tell, BETWEEN
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """The weights are loaded from here on."""
        if not self._on:
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._hooks = [
            register_optimizer_step_pre_hook(lambda *_: self._enter("step")),
            register_optimizer_step_post_hook(lambda *_: self._enter(BETWEEN)),
        ]
        self._enter("load")

    def reached(self, phase: str, step: int = 0, micro_step: int = 0) -> None:
        """As `MemfitTrainer.reached` says it: forward, backward, end."""
        if self._on:
            self._enter(phase if phase in PHASES else BETWEEN)

    def end(self) -> None:
        if not self._on:
            return
        self._enter(BETWEEN)
        for hook in self._hooks:
            hook.remove()
        self._on = False

    def _enter(self, phase: str) -> None:
        import torch

        counts = allocator_counts()
        torch.cuda.reset_peak_memory_stats()
        allocated, reserved = counts.allocated_peak, counts.reserved_peak
        self._tell(allocated, reserved)
        if self._phase:
            before = self.peaks.get(self._phase, (0, 0))
            self.peaks[self._phase] = max(before[0], allocated), max(before[1], reserved)
        self._phase = phase


def beside(predicted: dict[str, tuple[int, int]], measured: dict[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """A row for each phase that either knows; what is not known is None."""
    rows = []
    for phase in (each for each in PHASES if each in predicted or each in measured):
        said, seen = (each.get(phase, (None, None)) for each in (predicted, measured))
        sizes = (said[0], seen[0], said[1], seen[1])
        rows.append({"phase": phase, **{f"{name}_bytes": size for name, size in zip(SIZES, sizes, strict=True)}})
    return rows


Kind = Literal["note", "probe", "start", "step", "checkpoint", "out-of-memory", "growth", "end"]


@dataclass(frozen=True, kw_only=True)
class TrainEvent:
    kind: Kind
    text: str = ""
    """One line for a person; empty where the numbers are enough."""
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    seconds_per_step: float | None = None
    seconds_left: float | None = None
    """By the steps that were measured so far, the first one aside; None before there is a second."""
    data_wait_share: float | None = None
    gpu_peak_bytes: int | None = None
    host_bytes: int | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, "", {})}


LOG_FILE = "train.log"


class RunLog:
    """Written line by line, so that a run that is killed leaves all of it. It is locked while the run lives: of two in
    one folder each would delete the other's checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.failed: str | None = None
        """Why no more lines are written; a run does not end for that."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / LOG_FILE).open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise InputError(f"output_dir '{folder}' cannot be written: {error.strerror}") from error
        if not _take(self._file):
            self._file.close()
            raise InputError(
                f"another run is writing to output_dir '{folder}'", hint="another --output_dir, or wait until it ends"
            )

    def write(self, text: str) -> None:
        if self.failed is not None:
            return
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        try:
            self._file.writelines(f"{now}  {line}\n" for line in text.splitlines())
        except OSError as error:
            self.failed = f"{LOG_FILE} is no longer written: {error.strerror}"

    def __call__(self, event: TrainEvent) -> None:
        self.write(in_a_line(event))

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


def in_a_line(event: TrainEvent) -> str:
    of = "" if event.total_steps is None else f"/{event.total_steps}"
    parts = [
        "" if event.step is None else f"step {event.step}{of}",
        "" if event.loss is None else f"loss {event.loss:.4f}",
        "" if event.learning_rate is None else f"lr {event.learning_rate:.3g}",
        "" if event.seconds_per_step is None else f"{event.seconds_per_step:.2f} s a step",
        "" if not event.seconds_left else f"{duration(event.seconds_left)} left",
        "" if event.data_wait_share is None else f"{event.data_wait_share:.0%} waiting for data",
        "" if event.gpu_peak_bytes is None else f"GPU peak {gib(event.gpu_peak_bytes)}",
        "" if event.host_bytes is None else f"host {gib(event.host_bytes)}",
        event.text,
    ]
    said = ", ".join(part for part in parts if part)
    return said if event.kind in ("step", "note") else f"{event.kind}: {said}" if said else event.kind


def is_written_to(folder: Path) -> bool:
    """By a run that is alive."""
    try:
        with (folder / LOG_FILE).open("r+", encoding="utf-8") as file:
            return not _take(file)
    except OSError:
        return False


def _take(file: IO[str]) -> bool:
    """The kernel lets go of it however the run ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # not every network file system can
        pass
    return True


Place = Literal["loading", "micro-step", "optimizer", "between"]
WHERE: dict[Place, str] = {
    "loading": "before the first step, while the model was put in its place", "micro-step": "in a micro-step",
    "optimizer": "in the optimizer's step", "between": "between two steps, while a checkpoint was written",
}  # fmt: skip
MOMENTS = 2
"""Adam keeps two numbers for each one that it trains, of its kind."""


def ran_out(place: Place, cause: str, config: TrainConfig, *, trained_bytes: int, probing: bool) -> RanOut:
    """A single row at a time is too much, or what does not depend on rows is. Checkpoints are as they were.
    `trained_bytes`: of the parameters that are trained."""
    where = f"{WHERE[place]} of the probe, before the run began" if probing and place == "optimizer" else WHERE[place]
    if place == "optimizer" and config.workload.optimizer in TORCH_ADAMW and trained_bytes:
        where += f" (it keeps {gib(MOMENTS * trained_bytes)} beside the weights)"
    return RanOut(f"memory ran out {where}: {cause}", hint="; ".join(_helps(place, config)))


def _helps(place: Place, config: TrainConfig) -> list[str]:
    offloaded = config.workload.offload
    found = []
    if place == "optimizer":
        if config.workload.optimizer == "adamw":
            found.append("optimizer: adamw-fused makes no copy of all gradients")
        if "optimizer" not in offloaded:
            found.append("memory.offload: [optimizer] keeps its state on the host")
    if place == "loading" and config.workload.kind == "lora" and "weights" not in offloaded:
        found.append("memory.offload: [weights] keeps frozen layers on the host")
    if config.workload.kind == "train":
        found.append("method: lora trains few parameters")
        found.append("parallel: fsdp2 shares them among GPUs")
    found.append("a smaller micro_batch_size would not help; checkpoints are as they were")
    return found
