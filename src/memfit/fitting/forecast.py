"""Whether a job fits, asked many times: as `predict`, but only what a search has to know, and nothing asked twice.

With accumulation the second micro-step finds the gradients of the first, and those after it are like the second. So a
search looks at two of them; what it finds is then predicted with all (`whole=True`), or with the first 32.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from memfit.analysis.summary import Moment, summarise_plan
from memfit.analysis.verdict import Fit, Verdict, capacity_for, fit_card, smallest_card
from memfit.errors import MemfitError, UsageError
from memfit.files import no_collector
from memfit.fitting.levers import batch_sizes
from memfit.gpus import Context, Gpu
from memfit.jobs.training.batch import resolve_batch
from memfit.jobs.training.config import BatchConfig
from memfit.jobs.workload import Workload
from memfit.planning.predict import Peak, context_of, peak_of
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.replay import Replays
from memfit.units import MiB, in_mib

if TYPE_CHECKING:
    from memfit.planning.traced import Traced


def room_for_pruning(work: Workload, card: Gpu, margin: float) -> int:
    """The margin is left free from the start: pruning makes do with what it may use. In whole MiB, to be typed."""
    context = context_of(work, card).high_bytes
    capacity = capacity_for(card.capacity_bytes, AllocatorConfig.parse(work.alloc_conf), context)
    return max((int(capacity * (1 - margin)) - context) // MiB, 1) * MiB


def within(work: Workload, card: Gpu, margin: float) -> Workload:
    """Limit pruning to the card less the margin, unless the user set a limit."""
    if work.kind != "prune" or work.max_gpu_memory is not None:
        return work
    return with_room(work, room_for_pruning(work, card, margin))


def with_room(work: Workload, room: int) -> Workload:
    """Set max_gpu_memory to `room`, rounded up to a MiB."""
    return dataclasses.replace(work, max_gpu_memory=in_mib(room + MiB - 1))


MICRO_STEPS = 2
MOST_MICRO_STEPS = 32
"""Of thousands, no more than these are traced even for the answer."""
ROUNDING = 16 * MiB
"""Gradients in a bucket are not rounded up to 512 bytes each: no more than this for 32,000 of them."""
TRACES_KEPT = 8
"""Settings of the allocator do not change a trace: the next question is often about the same one."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    workload: Workload
    """As asked; whether it was looked at with all of its micro-steps `whole` says."""
    whole: bool
    peak: Peak
    """With all the memory that it asks for."""
    fit: Fit
    """On this card, where torch gives cached memory back before it fails; safe: with the margin asked for."""
    context: Context
    at_peak: Moment
    breakdown: dict[str, int] = field(hash=False)
    parameters: int
    trainable_parameters: int
    asks_for_bytes: int | None = None
    """Of pruning that does not begin with what the margin leaves: what it wants to have for a block. The figures are
    those of a run that has it."""
    is_bound: bool = False
    """It takes at least this, and that does not fit."""

    @property
    def verdict(self) -> Verdict:
        return self.fit.verdict

    @property
    def fits(self) -> bool:
        """With the margin."""
        return self.verdict == "safe"

    @property
    def runs(self) -> bool:
        return self.verdict != "fails"

    @property
    def device_bytes(self) -> int:
        return self.peak.device_bytes

    @property
    def use_bytes(self) -> int | None:
        """None where it fails."""
        return self.fit.device_bytes if self.runs else None

    @property
    def capacity_bytes(self) -> int:
        return self.fit.capacity_bytes

    @property
    def cached_bytes(self) -> int:
        """Held by the allocator beyond what is alive."""
        return self.peak.reserved_bytes - self.peak.allocated_bytes

    @property
    def wanted_bytes(self) -> int:
        """What it asks for, and the context; 0 where it does not ask."""
        return 0 if self.asks_for_bytes is None else self.asks_for_bytes + self.peak.context_bytes

    def to_json(self) -> dict[str, object]:
        return {
            "verdict": self.verdict, "use_bytes": self.use_bytes, "device_bytes": self.peak.device_bytes,
            "allocated_bytes": self.peak.allocated_bytes, "reserved_bytes": self.peak.reserved_bytes,
            "context_bytes": self.peak.context_bytes, "context": dataclasses.asdict(self.context),
            "at_peak": {"phase": self.at_peak.phase, "step": self.at_peak.step}, "breakdown": dict(self.breakdown),
        }  # fmt: skip


class Forecasts:
    """All that is asked about one card with one margin."""

    def __init__(self, gpu: Gpu, margin: float, *, micro_steps: int = MICRO_STEPS) -> None:
        self.gpu, self.margin, self.micro_steps = gpu, margin, micro_steps
        self.made = 0
        """Predictions, not counting what was asked again."""
        self.seconds = 0.0
        self._known: dict[Workload, Forecast | MemfitError] = {}
        self._trace = lru_cache(maxsize=TRACES_KEPT)(partial(_trace, gpu))

    def ask(self, work: Workload, *, whole: bool = False) -> Forecast:
        """Raises what `predict` would: a setting that cannot be planned, or not together with another."""
        asked = with_few_micro_steps(work, MOST_MICRO_STEPS if whole else self.micro_steps)
        if asked not in self._known:
            started = time.perf_counter()
            try:
                with warnings.catch_warnings():  # of the job's own code: a plan tells them, a search would twenty times
                    warnings.simplefilter("ignore")
                    self._known[asked] = self._predicted(asked)
            except MemfitError as refusal:
                self._known[asked] = refusal
            self.made += 1
            self.seconds += time.perf_counter() - started
        found = self._known[asked]
        if isinstance(found, MemfitError):
            raise found
        job = work if found.asks_for_bytes is None else with_room(work, found.asks_for_bytes)
        return dataclasses.replace(found, workload=job, whole=asked.grad_accum == work.grad_accum)

    def glance(self, work: Workload) -> Forecast:
        """As `of`, but where a bound from below already does not leave the margin, only that."""
        return self.bound(work, (1 - self.margin) * self.gpu.capacity_bytes) or self.ask(work)

    def bound(self, work: Workload, most: float) -> Forecast | None:
        """A process of DDP has all that one alone has, which is traced sooner, and its buckets besides. What one alone
        takes, where it is for certain more than `most` bytes of the card."""
        less = self.ask(without_others(work)) if work.is_replicated else None
        if less is None or less.peak.allocated_bytes - ROUNDING + less.peak.context_bytes <= most:
            return None
        return dataclasses.replace(less, workload=work, is_bound=True)

    def refusal(self, work: Workload) -> MemfitError | None:
        """Of a process of DDP: what one alone would not do either."""
        try:
            self.ask(without_others(work))
        except MemfitError as refusal:
            return refusal
        return None

    def smallest_card(self, work: Workload) -> int:
        """On which it runs, perhaps with cached memory given back; as closely as a plan tells it."""
        traced = self._traced(with_few_micro_steps(work, self.micro_steps))
        replays = Replays(traced.trace, AllocatorConfig.parse(work.alloc_conf))
        with no_collector():
            return smallest_card(replays, context_of(traced.workload, self.gpu).high_bytes)

    def _predicted(self, work: Workload) -> Forecast:
        from memfit.jobs.pruning.placement import NoRoom

        try:
            return self._replayed(work, self._traced(work))
        except NoRoom as refusal:
            if (work.gpu_budget_bytes or 0) < room_for_pruning(work, self.gpu, self.margin):
                raise  # it is not the card that has too little
            return self._with_room(work, refusal.least)

    def _with_room(self, work: Workload, least: int) -> Forecast:
        """Asked from above, so it may take less, and leave the margin all the same."""
        enough = self._replayed(work, self._traced(with_room(work, least)))
        begins = least <= enough.capacity_bytes - enough.peak.context_bytes
        fit = enough.fit if begins else dataclasses.replace(enough.fit, verdict="fails")
        return dataclasses.replace(enough, asks_for_bytes=least, fit=fit)

    def _replayed(self, work: Workload, traced: Traced) -> Forecast:
        context = context_of(traced.workload, self.gpu)
        replays = Replays(traced.trace, AllocatorConfig.parse(work.alloc_conf))
        with no_collector():
            report = summarise_plan(replays.ample)
            fit = fit_card(replays, self.gpu.capacity_bytes, context.high_bytes, self.margin)
        return Forecast(
            workload=work,
            whole=True,
            peak=peak_of(replays, context),
            fit=fit,
            context=context,
            at_peak=report.at_peak,
            breakdown=report.breakdown,
            parameters=traced.parameters,
            trainable_parameters=traced.trainable_parameters,
        )

    def _traced(self, work: Workload) -> Traced:
        return self._trace(dataclasses.replace(work, alloc_conf=""))


def _trace(gpu: Gpu, work: Workload) -> Traced:
    from memfit.planning.traced import trace_workload
    from memfit.platform import platform_of

    return trace_workload(work, platform_of(gpu), few=True)


def without_others(work: Workload) -> Workload:
    """In place of a process of DDP, one that is alone."""
    return _without_buckets(work, world_size=1) if work.is_replicated else work


def with_few_micro_steps(work: Workload, most: int = MICRO_STEPS) -> Workload:
    """To look at, never to propose: a change to it would be one of another global batch."""
    if not work.trains:
        return work
    few = dataclasses.replace(work, grad_accum=min(work.grad_accum, most))
    return few if work.is_replicated else _without_buckets(few)


def few_micro_steps_note(work: Workload, looked_at: int = MICRO_STEPS) -> str | None:
    if not work.trains or work.grad_accum <= looked_at:
        return None
    return f"looked at with {looked_at} of {work.grad_accum} micro-steps, the others are like the last of them"


def _without_buckets(work: Workload, **changes: Any) -> Workload:
    """How gradients lie in them is then of no account."""
    return dataclasses.replace(work, gradient_as_bucket_view=None, **changes)


FLAGS = {
    "micro_batch_size": "--batch-size", "gradient_accumulation_steps": "--grad-accum",
    "global_batch_size": "--global-batch",
}  # fmt: skip
"""Of a config's keys, the flags that were typed."""


def with_global_batch(work: Workload, rows: int | None) -> Workload:
    """The workload with as many micro-steps as the global batch needs. Accumulation that was asked for must agree."""
    if rows is None:
        return work
    if not work.trains:
        raise UsageError("--global-batch is for training", hint=f"{work.kind} has --batch-size")
    said = BatchConfig(
        micro_batch_size=work.batch_size,
        gradient_accumulation_steps=work.grad_accum if work.grad_accum > 1 else None,
        global_batch_size=rows,
    )
    try:
        sizes = resolve_batch(said, work.world_size)
    except UsageError as error:
        raise UsageError(_in_flags(error.message), hint=_in_flags(error.hint or "")) from error
    return dataclasses.replace(work, grad_accum=sizes.gradient_accumulation_steps)


def _in_flags(text: str) -> str:
    for key, name in FLAGS.items():
        text = text.replace(key, name)
    return text


def global_batch_of(work: Workload) -> int | None:
    """The rows of one optimizer step over all GPUs, which no advice changes."""
    return batch_sizes(work).global_batch_size if work.trains else None
