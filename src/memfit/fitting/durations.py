"""How long a job takes, before it runs: what a step costs, and an estimate with its range and what it rests on.

    cost = step_cost(Workload(kind="lora", model="qwen2.5-7b", grad_checkpointing=True, grad_accum=16))
    cost.flops, cost.bytes_moved, cost.host_bytes
    seconds(cost, find_gpu("RTX 4090"))
    time = estimate(Workload(kind="lora", model="qwen2.5-7b", grad_accum=16), find_gpu("RTX 4090"), steps=1000)
    time.step.likely, time.total, time.in_words()

Nothing is a formula of the model: the job's own step runs without memory while its ops are counted
(`tracing/costs.py`), so what checkpointing computes again and what a chunked loss reads again is there by itself.
Blocks are alike, so two models of few blocks give the line for any number of them; a micro-step in the middle of an
accumulation, and a micro-batch of a pruning, stand for the others. Each generated token reads a longer cache by the
same amount: the line through the third and the fourth is held against the last, and where it does not meet that (a
window that is full) all are counted.

The time is a roofline, kernel by kernel: each takes the longer of its arithmetic at the card's peak and its bytes at
the card's bandwidth, and one runs after the other; a phase takes as long as its kernels, or as its bytes over the link
to the host where that is longer. No kernel reaches its peak, so this is a bound from below. What it is good for is the
ratio of two of them: how much longer a step takes with a lever on. A small model's kernels are shorter than the host
takes to launch them; there both time and ratio say little, and `kernels` tells how many there are.

How far real steps are from these two bounds, the roofline and what the host can launch, was measured on the H200, and
an estimate takes the longer of the two. On other cards nothing was measured, so the range is wider there. What is left
out: traffic between GPUs, reading data, and saving.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import MemfitError, UsageError
from memfit.events import OpCost, Trace
from memfit.gpus import Gpu, name_in_catalogue
from memfit.jobs.workload import Workload
from memfit.render.pieces import time_words

if TYPE_CHECKING:
    from memfit.jobs.training.job import TrainJob
    from memfit.planning.few import Blocks
    from memfit.planning.predict import Plan
    from memfit.tracing.costs import OpCosts
    from memfit.tracing.tracer import Tracer

# -- what a step costs -------------------------------------------------------------------------------------------------

STEPS = 2
"""The last one is counted: the first also makes the optimizer's state."""
MICRO_STEPS = 3
"""The first finds no gradients, the last is followed by the optimizer; the one between stands for all others."""
UNITS = 2
"""Periods of blocks in the smaller of the two models that give the line: the first block may be unlike the others."""

Ops = Mapping["OpCost", int]
"""How often each cost occurs. Where a line was drawn a number may be negative: an op over a list of all weights grows
with the number of blocks, and is taken away at one size and added at another."""


class OpCounts:
    """What ops take in all."""

    ops: Ops

    @property
    def flops(self) -> int:
        return sum(times * op.flops for op, times in self.ops.items())

    @property
    def bytes_moved(self) -> int:
        """Read from and written to GPU memory."""
        return sum(times * op.moved for op, times in self.ops.items())

    @property
    def host_bytes(self) -> int:
        """Between GPU and host, both ways."""
        return sum(times * op.over_link for op, times in self.ops.items())

    def figures(self) -> dict[str, int]:
        return {"flops": self.flops, "bytes_moved": self.bytes_moved, "host_bytes": self.host_bytes}


@dataclass(frozen=True)
class PhaseCost(OpCounts):
    phase: str
    ops: Ops


@dataclass(frozen=True)
class StepCost(OpCounts):
    """Of one optimizer step on one GPU with all its micro-steps; of one forward pass, generation or pruning."""

    phases: tuple[PhaseCost, ...]

    @cached_property
    def ops(self) -> Ops:  # type: ignore[override]
        return combine((phase.ops, 1) for phase in self.phases)

    @property
    def kernels(self) -> int:
        """Calls of ops, each of which the host has to launch."""
        return sum(self.ops.values())

    def to_json(self) -> dict[str, Any]:
        phases = [{"name": phase.phase, **phase.figures()} for phase in self.phases]
        return {**self.figures(), "kernels": self.kernels, "phases": phases}


def step_cost(workload: Workload) -> StepCost:
    """Traced once for each job in a process: settings of the allocator do not count. Of compiled code, what it would
    cost as it is written."""
    return _step_cost(dataclasses.replace(workload, alloc_conf="", compile=False, compile_blocks=False))


def seconds(cost: StepCost, gpu: Gpu) -> float | None:
    """At the least; None where the card's figures are unknown."""
    if gpu.bandwidth is None or gpu.flops_16bit is None or gpu.flops_fp32 is None:
        return None
    if cost.host_bytes and gpu.link_bandwidth is None:
        return None
    return sum(_phase_seconds(phase, gpu) for phase in cost.phases)


def _phase_seconds(phase: PhaseCost, gpu: Gpu) -> float:
    assert gpu.bandwidth is not None and gpu.flops_16bit is not None and gpu.flops_fp32 is not None
    on_gpu = 0.0
    for op, times in phase.ops.items():
        peak = gpu.flops_fp32 if op.wide else gpu.flops_16bit
        on_gpu += times * max(op.flops / peak, op.moved / gpu.bandwidth)
    return max(on_gpu, phase.host_bytes / gpu.link_bandwidth if gpu.link_bandwidth else 0.0)


@lru_cache(maxsize=256)
def _step_cost(work: Workload) -> StepCost:
    """Counted once on a machine: beside the traces, under the same key and what stands in this file."""
    from memfit.planning.cache import load, store

    key = _key(work)
    found = None if key is None else load(key, lambda _, facts: _from_facts(facts))
    if found is not None:
        return found
    made = _counted_cost(work)
    if key is not None:
        kept = [[phase.phase, [[*op, times] for op, times in phase.ops.items()]] for phase in made.phases]
        store(key, Trace(), {"phases": kept})
    return made


def _key(work: Workload) -> str | None:
    from memfit.planning.cache import key_of
    from memfit.platform import platform_of

    key = key_of(work, platform_of(None))
    return None if key is None else f"step cost {sha256(Path(__file__).read_bytes()).hexdigest()} {key}"


def _from_facts(facts: Mapping[str, Any]) -> StepCost:
    phases = (
        PhaseCost(name, {OpCost(flops, wide, moved, link): times for flops, wide, moved, link, times in ops})
        for name, ops in facts["phases"]
    )
    return StepCost(tuple(phases))


def _counted_cost(work: Workload) -> StepCost:
    blocks = _blocks(work)
    if blocks is None:
        return _costed(_counted(work, None))
    few = blocks.traced
    return _costed(on_line(_counted(work, few), _counted(work, few + blocks.period), blocks.units - UNITS))


def _costed(counted: Mapping[str, Ops]) -> StepCost:
    return StepCost(tuple(PhaseCost(phase, ops) for phase, ops in counted.items()))


def _blocks(work: Workload) -> Blocks | None:
    """Those that repeat, if there are more of them than two models of few blocks have, and nothing else grows with
    their number."""
    if ":" in work.model:
        return None
    import torch

    from memfit.models.registry import build_model, parameter_count
    from memfit.planning.few import blocks_of

    blocks, parameters = blocks_of(work.source, work.attention)
    if blocks is None or blocks.units <= 2 * UNITS:
        return None
    try:
        with torch.device("meta"):
            small = build_model(work.source, dtype=torch.bfloat16, attention=work.attention, layers=blocks.traced)
    except MemfitError:
        return None
    grown = parameter_count(small) + (blocks.units - UNITS) * blocks.unit_parameters
    return blocks if grown == parameters else None


def on_line(less: Mapping[str, Ops], more: Mapping[str, Ops], units: int) -> dict[str, Ops]:
    """Phase by phase, what was counted with so many `units` more, where `more` has one more than `less`."""
    return {phase: combine([(less[phase], 1 - units), (more[phase], units)]) for phase in less}


def combine(parts: Iterable[tuple[Ops, int]]) -> Ops:
    """Each so many times, together."""
    total: Counter[OpCost] = Counter()
    for ops, times in parts:
        for op, count in ops.items():
            total[op] += times * count
    return {op: count for op, count in total.items() if count}


# -- counting ----------------------------------------------------------------------------------------------------------


def _counted(work: Workload, layers: int | None) -> dict[str, Ops]:
    """By phase."""
    if work.kind == "generate":
        return generation_cost(work, layers)
    if work.kind == "prune":
        return pruning_cost(work, layers)
    few = dataclasses.replace(work, grad_accum=min(work.grad_accum, MICRO_STEPS)) if work.trains else work
    marks = last_step(count_marks(few, layers))
    return sum_by_phase(_with_all_micro_steps(marks, work.grad_accum) if work.trains else marks)


@dataclass(frozen=True)
class MarkCount:
    """What was counted from one mark of a phase to the next."""

    phase: str
    step: int
    ops: Ops


def _by_mark(made: Trace, counter: OpCosts) -> list[MarkCount]:
    return [MarkCount(mark.phase, mark.step, counter.by_mark.get(at, {})) for at, mark in enumerate(made.marks)]


def _counting(counters: list[OpCosts], tracer: Tracer) -> OpCosts:
    from memfit.tracing.costs import OpCosts

    counters.append(OpCosts(tracer))
    return counters[-1]


def count_marks(work: Workload, layers: int | None, *, tokens: int | None = None) -> list[MarkCount]:
    from memfit.jobs.build import prepare_without_memory
    from memfit.planning.on_trace import trace_job

    counters: list[OpCosts] = []
    job = prepare_without_memory(work, layers=layers)
    made = trace_job(job, steps=STEPS, tokens=tokens, beside=partial(_counting, counters))
    return _by_mark(made, counters[-1])


def last_step(marks: list[MarkCount]) -> list[MarkCount]:
    last = max(mark.step for mark in marks if mark.phase == "forward")
    return [mark for mark in marks if mark.step == last]


def _with_all_micro_steps(marks: list[MarkCount], micro_steps: int) -> Iterator[MarkCount]:
    forwards = [number for number, mark in enumerate(marks) if mark.phase == "forward"]
    yield from marks
    if micro_steps > MICRO_STEPS:
        middle = marks[forwards[1] : forwards[2]]
        for mark in middle:
            yield dataclasses.replace(mark, ops=combine([(mark.ops, micro_steps - MICRO_STEPS)]))


def sum_by_phase(marks: Iterable[MarkCount]) -> dict[str, Ops]:
    by_phase: dict[str, list[tuple[Ops, int]]] = {}
    for mark in marks:
        by_phase.setdefault(mark.phase, []).append((mark.ops, 1))
    return {phase: combine(parts) for phase, parts in by_phase.items()}


@dataclass(frozen=True)
class StepTime:
    figures: Mapping[str, int]
    """FLOPs, bytes moved and bytes between GPU and host."""
    seconds: float | None
    """At the least; None where the card's figures are unknown."""

    def times(self, number: int) -> StepTime:
        """Of so many passes, one after the other."""
        figures = {name: number * figure for name, figure in self.figures.items()}
        return StepTime(figures, None if self.seconds is None else number * self.seconds)

    def to_json(self) -> dict[str, Any]:
        return {**self.figures, "seconds": None if self.seconds is None else round(self.seconds, 6)}


def step_time(work: Workload, gpu: Gpu) -> StepTime | None:
    """None where the job's ops cannot be counted."""
    cost = step_cost_of(work)
    return None if cost is None else StepTime(cost.figures(), seconds(cost, gpu))


def step_cost_of(work: Workload) -> StepCost | None:
    """None where the job's ops cannot be counted."""
    try:
        with warnings.catch_warnings():  # of the job's own code: a plan tells them
            warnings.simplefilter("ignore")
            return step_cost(work)
    except MemfitError:
        return None


# -- generations and prunings ------------------------------------------------------------------------------------------

FEW_TOKENS = 4
PHASE = "generate"


def generation_cost(work: Workload, layers: int | None) -> dict[str, Ops]:
    if work.new_tokens > 2 * FEW_TOKENS:
        near = [_after(work, layers, tokens) for tokens in (FEW_TOKENS - 2, FEW_TOKENS - 1, FEW_TOKENS)]
        late = dataclasses.replace(work, seq_len=work.seq_len + work.new_tokens - FEW_TOKENS, new_tokens=FEW_TOKENS)
        far = [_after(late, layers, tokens) for tokens in (FEW_TOKENS - 1, FEW_TOKENS)]
        third, fourth, last = (combine([(b, 1), (a, -1)]) for a, b in ((near[0], near[1]), (near[1], near[2]), far))
        steps = work.new_tokens - FEW_TOKENS
        told = combine([(fourth, 1 + steps), (third, -steps)])
        if PhaseCost(PHASE, told).figures() == PhaseCost(PHASE, last).figures():
            more = steps * (steps + 1) // 2
            return {PHASE: combine([(near[2], 1), (fourth, steps + more), (third, -more)])}
    return {PHASE: _after(work, layers, None)}


def _after(work: Workload, layers: int | None, tokens: int | None) -> Ops:
    return sum_by_phase(count_marks(work, layers, tokens=tokens))[PHASE]


MOVES_THE_BLOCK = ("load", "store")
FEW_MICRO_BATCHES = 2
"""Micro-batches of the full size in the smaller of two counts: the first one may do more than the others."""


def pruning_cost(work: Workload, layers: int | None) -> dict[str, Ops]:
    counted, windows = _count_pruning(work, layers, FEW_MICRO_BATCHES)
    if -(-work.nsamples // windows) <= FEW_MICRO_BATCHES + 1:  # all were counted
        return counted
    more, _ = _count_pruning(work, layers, FEW_MICRO_BATCHES + 1)
    return on_line(counted, more, work.nsamples // windows - FEW_MICRO_BATCHES)


def _count_pruning(work: Workload, layers: int | None, few: int) -> tuple[dict[str, Ops], int]:
    """And the windows of a micro-batch."""
    from memfit.planning.few import blocks_of
    from memfit.planning.pruning import traced_with
    from memfit.platform import H200

    counters: list[OpCosts] = []
    blocks, _ = blocks_of(work.source, work.attention) if layers else (None, 0)
    beside = partial(_counting, counters)
    made, windows, block_bytes = traced_with(work, H200, blocks, layers=layers, few=few, beside=beside)
    moved = {OpCost(0, False, block_bytes, block_bytes): 1}

    def with_weights(mark: MarkCount) -> MarkCount:
        if mark.phase not in MOVES_THE_BLOCK:
            return mark
        return dataclasses.replace(mark, ops=combine([(mark.ops, 1), (moved, 1)]))

    return sum_by_phase(with_weights(mark) for mark in _by_mark(made, counters[-1])), windows


# -- how long it takes -------------------------------------------------------------------------------------------------

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
