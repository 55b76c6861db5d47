"""Memory that grows while a job trains: which kind of growth, and when it ends.

    watch = GrowthWatch()
    for step, batch in enumerate(batches):
        ...                                    # forward, backward, optimizer step, zero_grad
        watch.sample(step, tokens=batch.numel(), longest=batch.shape[1])
    print(watch.verdict().text)                # "leak: what stays allocated after a step rises by 2.00 MiB a step ..."

    Trainer(..., callbacks=[trainer_growth()])  # in anyone's transformers Trainer

Four kinds look alike in a graph of used memory and have different cures. A leak raises the floor, what is allocated
between two steps. Long batches raise only the peak, and it follows their length. Fragmentation raises what is reserved
beyond the peak. On the host it is the process that grows. Trends are Theil and Sen's: a few odd steps do not move them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, combinations
from statistics import correlation, median
from typing import Any, Literal

from memfit.recording.sampler import ProcessMemory, allocator_counts
from memfit.units import format_bytes

Kind = Literal["none", "leak", "long-batches", "fragmentation", "host-growth"]

WARM_UP = 3
"""Steps left out: the first makes the optimizer's state, and the allocator's first round of blocks comes with it."""
FEWEST, MOST = 20, 200
"""Steps that a verdict needs, and that it looks at, spread over all."""
MIB = 1 << 20
LEAST_FLOOR, LEAST_RESERVED, LEAST_HOST = 4 * MIB, 64 * MIB, 64 * MIB
STEADY = 0.5
"""Kendall's tau of a trend: 1 where every later step is higher."""
FOLLOWS, VARIES = 0.7, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    """Read at one moment of each step, after the gradients are gone; None where there is no GPU."""

    step: int
    host_bytes: int
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes: int | None = None
    """The most that was allocated since the reading before."""
    retries: int = 0
    """Times that the allocator had to give back its cache to find room."""
    tokens: int = 0
    longest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrowth:
    kind: Kind
    text: str
    bytes_per_step: float = 0.0
    runs_out_at_step: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class GrowthWatch:
    """Samples of one process. It resets torch's peak counter at each reading; `peak_bytes` is that of all of them."""

    def __init__(self, *, gpu: bool | None = None) -> None:
        import torch

        self._gpu = torch.cuda.is_available() if gpu is None else gpu
        self._host = ProcessMemory()
        self.samples: list[StepReading] = []
        self.peak_bytes: int | None = None
        self.reserved_bytes: int | None = None
        self.host_peak_bytes = self._host.read().used_bytes
        self.host_total_bytes = self._host.read().total_bytes
        self.capacity_bytes: int | None = None
        self._read_elsewhere = (0, 0)
        if self._gpu and torch.cuda.is_initialized():  # type: ignore[no-untyped-call,unused-ignore]
            torch.cuda.reset_peak_memory_stats()  # what went before in this process is not of this run

    def sample(self, step: int, *, tokens: int = 0, longest: int = 0) -> StepReading:
        host = self._host.read()
        self.host_peak_bytes = max(self.host_peak_bytes, host.used_bytes)
        made = StepReading(step=step, host_bytes=host.used_bytes, tokens=tokens, longest=longest, **self._read_gpu())
        self.samples.append(made)
        return made

    def forget(self) -> None:
        """What was sampled before the run began says nothing of its growth."""
        self.samples.clear()

    def counter_was_read(self, peak_bytes: int, reserved_bytes: int) -> None:
        """By someone who set torch's counter back: the next sample is told of it here."""
        peak, reserved = self._read_elsewhere
        self._read_elsewhere = max(peak, peak_bytes), max(reserved, reserved_bytes)

    def verdict(self) -> MemoryGrowth:
        return growth_of(self.samples, capacity_bytes=self.capacity_bytes, host_bytes=self.host_total_bytes)

    def _read_gpu(self) -> dict[str, int]:
        if not self._gpu:
            return {}
        import torch

        counts = allocator_counts()
        torch.cuda.reset_peak_memory_stats()
        if self.capacity_bytes is None:
            self.capacity_bytes = int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
        peak = max(self._read_elsewhere[0], counts.allocated_peak)
        self.peak_bytes = max(self.peak_bytes or 0, peak)
        self.reserved_bytes = max(self.reserved_bytes or 0, self._read_elsewhere[1], counts.reserved_peak)
        self._read_elsewhere = (0, 0)
        return {
            "allocated_bytes": counts.allocated, "reserved_bytes": counts.reserved, "peak_bytes": peak,
            "retries": counts.retries,
        }  # fmt: skip


def growth_of(samples: Sequence[StepReading], *, capacity_bytes: int | None, host_bytes: int) -> MemoryGrowth:
    """The most pressing kind: what ends a run comes before what only looks like it."""
    seen = _spread(samples[WARM_UP:])
    if len(seen) < FEWEST:
        return MemoryGrowth(kind="none", text=f"{len(samples)} steps are too few to tell growth from chance")
    gpu = all(each.allocated_bytes is not None for each in seen)
    found = (_leak(seen, capacity_bytes) or _fragmentation(seen, capacity_bytes)) if gpu else None
    return (
        found
        or _host_growth(seen, host_bytes)
        or (_long_batches(seen) if gpu else None)
        or MemoryGrowth(kind="none", text=f"memory does not grow over {len(samples)} steps")
    )


def _leak(seen: Sequence[StepReading], capacity: int | None) -> MemoryGrowth | None:
    highest = max(each.peak_bytes or 0 for each in seen)
    return _growing(
        "leak", seen, [each.allocated_bytes or 0 for each in seen], LEAST_FLOOR,
        None if capacity is None else capacity - highest,
        "leak: what stays allocated after a step rises by {size} a step{until}; something keeps tensors, such as a "
        "list of losses that still have their graphs (use .item() or .detach())",
    )  # fmt: skip


def _fragmentation(seen: Sequence[StepReading], capacity: int | None) -> MemoryGrowth | None:
    """What is reserved beyond the highest peak so far: long batches alone do not raise that."""
    highest = accumulate((each.peak_bytes or 0 for each in seen), max)
    retries = seen[-1].retries - seen[0].retries
    also = f", and the allocator gave its cache back {retries} times" if retries else ""
    return _growing(
        "fragmentation", seen, [(each.reserved_bytes or 0) - top for each, top in zip(seen, highest, strict=True)],
        LEAST_RESERVED, None if capacity is None else capacity - (seen[-1].reserved_bytes or 0),
        f"fragmentation: reserved memory rises by {{size}} a step while what is used does not{also}{{until}}; "
        "memory.alloc_conf: expandable_segments:True helps, or fewer different lengths",
    )  # fmt: skip


def _host_growth(seen: Sequence[StepReading], host_bytes: int) -> MemoryGrowth | None:
    return _growing(
        "host-growth", seen, [each.host_bytes for each in seen], LEAST_HOST, host_bytes - seen[-1].host_bytes,
        "host growth: this process's memory rises by {size} a step{until}; look at the data loader's workers and at "
        "lists of Python objects that grow",
    )  # fmt: skip


def _growing(
    kind: Kind, seen: Sequence[StepReading], values: Sequence[int], least: int, room: int | None, text: str
) -> MemoryGrowth | None:
    """Where these values rise, until there is no more `room`."""
    slope = rising(seen, values, least=least)
    if slope is None:
        return None
    end = None if room is None else seen[-1].step + int(max(0, room) / slope)
    until = "" if end is None else f" and runs out at about step {end:,}"
    told = text.format(size=format_bytes(round(slope)), until=until)
    return MemoryGrowth(kind=kind, bytes_per_step=slope, runs_out_at_step=end, text=told)


def _long_batches(seen: Sequence[StepReading]) -> MemoryGrowth | None:
    peaks = [each.peak_bytes or 0 for each in seen]
    lengths = [each.longest or each.tokens for each in seen]
    varies = max(peaks) - min(peaks) >= VARIES * median(peaks) and len(set(lengths)) > 1
    if not varies or correlation(lengths, peaks) < FOLLOWS:
        return None
    top = max(range(len(seen)), key=lambda place: peaks[place])
    return MemoryGrowth(
        kind="long-batches",
        text=f"long batches: the peak follows the length of the batch, {format_bytes(peaks[top])} at "
        f"{lengths[top]:,} tokens; nothing grows, and the longest batch decides",
    )


def rising(seen: Sequence[StepReading], values: Sequence[int], *, least: int) -> float | None:
    """Bytes a step, where they rise steadily and by more than `least` over all; None otherwise."""
    steps = [each.step for each in seen]
    pairs = combinations(zip(steps, values, strict=True), 2)
    slopes = [(after - before) / (later - earlier) for (earlier, before), (later, after) in pairs if later > earlier]
    if not slopes:
        return None
    slope = median(slopes)
    tau = (sum(each > 0 for each in slopes) - sum(each < 0 for each in slopes)) / len(slopes)
    steady = tau > STEADY and slope * (steps[-1] - steps[0]) > least
    return slope if steady and _still(values) else None


def _still(values: Sequence[int]) -> bool:
    """A cache that has filled up is no growth: the later half must rise too."""
    half = len(values) // 2
    later = values[half:]
    quarter = max(1, len(later) // 4)
    return median(later[-quarter:]) > median(later[:quarter])


def _spread(samples: Sequence[StepReading]) -> list[StepReading]:
    if len(samples) <= MOST:
        return list(samples)
    return [samples[place * (len(samples) - 1) // (MOST - 1)] for place in range(MOST)]


def trainer_growth(on_growth: Callable[[MemoryGrowth], None] | None = None, *, every: int = 50) -> Any:
    """A callback for `transformers.Trainer`; without `on_growth`, each new verdict is logged as a warning."""
    import logging

    from transformers import TrainerCallback

    watch = GrowthWatch()
    tell = on_growth or (lambda growth: logging.getLogger("memfit").warning("%s", growth.text))

    class TrainerGrowth(TrainerCallback):  # type: ignore[misc,unused-ignore]
        said: Kind = "none"

        def __init__(self) -> None:
            self.watch = watch

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.sample(state.global_step)
            if state.global_step % every == 0:
                verdict = watch.verdict()
                if verdict.kind not in ("none", self.said):
                    self.said = verdict.kind
                    tell(verdict)

    return TrainerGrowth()
