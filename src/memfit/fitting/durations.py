"""How long a training takes, before it runs: an estimate with its range and what it rests on.

    time = estimate(Workload(kind="lora", model="qwen2.5-7b", grad_accum=16), find_gpu("RTX 4090"), steps=1000)
    time.step.likely, time.total, time.in_words()

The ops of a step are counted and put on a roofline (`fitting/step_cost.py`), which no GPU reaches; and the host can
launch only so many kernels a second. How far real steps are from these two bounds was measured on the H200, and a step
takes the longer of the two. On other cards nothing was measured, so the range is wider there. What is left out: traffic
between GPUs, reading data, and saving.
"""

from __future__ import annotations

import dataclasses
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from memfit.errors import MemfitError, UsageError
from memfit.fitting.step_cost import step_cost_of
from memfit.gpus import Gpu, name_in_catalogue
from memfit.jobs.workload import Workload
from memfit.render.pieces import time_words

if TYPE_CHECKING:
    from memfit.jobs.training.job import TrainJob
    from memfit.planning.predict import Plan

MEASURED_ON = "H200"


@dataclass(frozen=True)
class Range:
    least: float
    likely: float
    most: float

    def times(self, number: float) -> Range:
        return Range(self.least * number, self.likely * number, self.most * number)

    def to_json(self) -> dict[str, float]:
        return {"least": round(self.least, 6), "likely": round(self.likely, 6), "most": round(self.most, 6)}


@dataclass(frozen=True)
class Pace:
    """What a step takes: so many times its roofline, or so long for each kernel that the host launches."""

    of_roofline: Range
    kernel_seconds: Range

    def estimate(self, roofline: float, kernels: int) -> Range:
        pairs = zip(astuple(self.of_roofline.times(roofline)), astuple(self.kernel_seconds.times(kernels)), strict=True)
        return Range(*(max(pair) for pair in pairs))


AS_MEASURED = Pace(Range(1.25, 1.6, 2.5), Range(24e-6, 30e-6, 45e-6))
"""27 jobs on the H200, accuracy/measured/step_times.jsonl: each of them lies in the range."""
ELSEWHERE = Pace(Range(1.1, 1.6, 3.2), Range(12e-6, 30e-6, 90e-6))
"""Smaller chips come nearer to their peak, throttled ones less near; hosts differ by more than cards do."""


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Of a training on one card, or on several alike."""

    gpu: str
    step: Range
    """Seconds of one step of the optimizer."""
    roofline_seconds: float
    kernels: int
    tokens_per_step: int
    """Over all processes."""
    steps: int | None
    """That are to be run; None where nobody said."""
    basis: str

    @property
    def total(self) -> Range | None:
        return None if self.steps is None else self.step.times(self.steps)

    @property
    def tokens_per_second(self) -> Range:
        each = self.step
        return Range(*(self.tokens_per_step / seconds for seconds in (each.most, each.likely, each.least)))

    def to_json(self) -> dict[str, Any]:
        return {
            "origin": "estimated", "basis": self.basis, "step_seconds": self.step.to_json(),
            "tokens_per_second": {name: round(value) for name, value in self.tokens_per_second.to_json().items()},
            "tokens_per_step": self.tokens_per_step, "steps": self.steps,
            "total_seconds": None if self.total is None else self.total.to_json(),
            "roofline_seconds": round(self.roofline_seconds, 6), "kernels": self.kernels,
        }  # fmt: skip

    def in_words(self) -> str:
        """One line: a step, tokens a second, and all of it where it is known how much that is."""
        return time_words(self.to_json())


def estimate(work: Workload, gpu: Gpu, *, steps: int | None = None, tokens: int | None = None) -> Duration | None:
    """None where the card's speed is unknown, or the job's ops cannot be counted, or nothing is trained. `tokens` are
    all that are to be trained on, padding among them."""
    from memfit.fitting.step_cost import seconds

    if steps is not None and tokens is not None:
        raise UsageError("--steps and --tokens both say how long it trains", hint="give one of them")
    card = name_in_catalogue(gpu.name)
    cost = step_cost_of(work) if work.trains and card is not None and gpu.bandwidth is not None else None
    bound = None if cost is None else seconds(cost, gpu)
    if card is None or cost is None or bound is None:
        return None
    measured = card == MEASURED_ON
    each = work.batch_size * work.seq_len * work.grad_accum * work.world_size
    if tokens is not None:
        steps = -(-tokens // each)
    return Duration(
        gpu=card,
        step=(AS_MEASURED if measured else ELSEWHERE).estimate(bound, cost.kernels),
        roofline_seconds=bound,
        kernels=cost.kernels,
        tokens_per_step=each,
        steps=steps,
        basis=_basis(work, card, measured),
    )


def with_duration(plan: Plan, work: Workload, **asked: int) -> tuple[Plan, str | None]:
    """The plan of a training that fits with its time, or else why there is none."""
    if plan.gpu is None or plan.verdict == "fails" or not work.trains:
        return plan, None
    time = estimate(work, plan.gpu, **asked)
    if time is None:
        return plan, why_none(plan.gpu)
    return dataclasses.replace(plan, duration=time.to_json()), None


def estimate_training(job: TrainJob, gpu: Gpu) -> Duration | None:
    """Of the steps that are left, with all of their micro-steps and rows as long as they are on average: a micro-batch
    is as long as its longest row."""
    from memfit.jobs.training.checkpoints import steps_done
    from memfit.planning.training import workload_of

    try:
        work = workload_of(job)
    except MemfitError:
        return None
    longest = max(2, round(_mean_longest(job)))
    work = dataclasses.replace(work, seq_len=longest, grad_accum=job.batch.gradient_accumulation_steps)
    done = 0 if job.resume_from is None else steps_done(job.resume_from)
    return estimate(work, gpu, steps=job.total_steps - done if job.knows_its_steps else None)


def _mean_longest(job: TrainJob) -> float:
    """In the order of the first epoch."""
    from memfit.jobs.training.data import epoch_order

    order = epoch_order(len(job.data), seed=job.config.seed, epoch=0, shuffle=job.config.data.shuffle)
    lengths: list[int] = job.data.lengths[order].tolist()
    rows = job.batch.micro_batch_size
    longest = [max(lengths[start : start + rows]) for start in range(0, len(lengths), rows)]
    return sum(longest) / len(longest)


def _basis(work: Workload, card: str, measured: bool) -> str:
    where = "on this card" if measured else f"on an {MEASURED_ON}; on the {card} nothing was measured"
    alone = "" if work.world_size == 1 else ", traffic between GPUs"
    eager = " (those of the step without torch.compile: compiled it is faster)" if work.is_compiled else ""
    return (
        f"counted operations{eager} at the peak speed of the {card} and kernels that the host launches, times what"
        f" steps were measured to take beyond that {where}; reading data and saving{alone} left out"
    )


def why_none(gpu: Gpu | None) -> str:
    if gpu is None:
        return "no card is named"
    if name_in_catalogue(gpu.name) is None:
        return f"a size has no speed, and {gpu.name} is no card of `memfit gpus`, as 'RTX 4090' is"
    if gpu.bandwidth is None:
        return f"the speed of the {gpu.name} is not known"
    return "the operations of this job cannot be counted"
