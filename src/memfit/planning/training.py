"""A training job, predicted before it starts: its budget as a table, whether it fits, and `memory: auto`.

    plan = plan_training(prepare_job(load_config("qwen2.5-7b-lora-24gb"), to_run=False))
    print("\n".join(plan.in_lines()))
    plan.job, plan.verdict          # the job to run, at the micro-batch that `memory: auto` chose

What is predicted is `memfit train` itself, on the longest rows of the data (`jobs/training/loops.py`).
`memory: auto` takes the largest micro-batch that fits with the margin asked for, at the same global batch.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memfit.analysis.verdict import Verdict, judge
from memfit.environment import CUDA_VARIABLE
from memfit.errors import MemfitError
from memfit.gpus import Gpu
from memfit.jobs.training.batch import BatchSizes
from memfit.jobs.training.config import ModelConfig, TrainConfig
from memfit.jobs.training.job import TrainJob
from memfit.jobs.training.result import PHASES
from memfit.jobs.training.shapes import basics_config, gsa_config, model_config
from memfit.jobs.workload import Workload
from memfit.models.presets import BASICS, is_basics, is_gsa
from memfit.planning.cache import shape_folder
from memfit.planning.card_here import card_for, fit_command
from memfit.planning.predict import Plan, predict, refuse_unfit_card
from memfit.render.shown import stands_in_front
from memfit.units import gib, in_mib

MICRO_STEPS = 3
"""Every later micro-step does what the third does: it finds gradients to add to, and the sum of losses before."""


def workload_of(job: TrainJob) -> Workload:
    """Of the longest rows, at the job's own micro-batch. Raises UsageError for what cannot be planned."""
    model = job.config.model
    name = model.name if job.source is None else str(job.source.folder)
    return workload_of_config(job.config, job.batch, name, int(job.data.lengths.max()), packed=job.data.packed)


def workload_of_config(
    config: TrainConfig, batch: BatchSizes, model_name: str, longest: int, *, packed: bool | None = None
) -> Workload:
    """Where the data have not been read. `model_name` is one that the registry knows; rows are as long as `longest`."""
    rows = batch.micro_batch_size
    if packed is None:
        packed = config.data.format != "instruction" if config.data.packing is None else config.data.packing
    return config.workload.changed(
        model=str(shape_folder(_settings(config.model))) if config.model.settings else model_name,
        batch_size=rows,
        seq_len=longest,
        padding=not packed and rows > 1,
        grad_accum=min(MICRO_STEPS, batch.gradient_accumulation_steps),
        world_size=batch.world_size,
        alloc_conf=os.environ.get(CUDA_VARIABLE) or config.workload.alloc_conf,
        weight_decay=config.workload.weight_decay if config.workload.optimizer == "sgd" else 0.0,
    ).without_unused()


def _settings(model: ModelConfig) -> dict[str, Any]:
    """As a config.json has them, with the changes that the job makes: by these the same architecture is found again."""
    if is_basics(model.name):
        return {"model_type": BASICS, **dataclasses.asdict(basics_config(model))}
    made: dict[str, Any] = json.loads(model_config(model).to_json_string())
    return made


Rung = tuple[int, Plan]
"""A micro-batch, and the job with it."""


def largest_that_fits(job: TrainJob, card: Gpu | None) -> tuple[TrainJob, tuple[Rung, ...], tuple[str, ...]]:
    """The job to run, what was looked at, and why. From the smallest up: the first that does not fit ends it."""
    if card is None:
        return job, (), ("memory: auto: no GPU is used and memory.gpu names none: micro_batch_size stays as it is",)
    margin = job.config.memory.margin
    tried: list[Rung] = []
    best: int | None = None
    for rows in job.batch.rungs:
        plan = predict(workload_of(job.with_micro_batch(rows)), gpu=card)
        tried.append((rows, plan))
        if verdict_of(plan, margin) != "safe":
            break
        best = rows
    return job.with_micro_batch(best or tried[0][0]), tuple(tried), (_why(best, tried, job, card),)


def verdict_of(plan: Plan, margin: float) -> Verdict | None:
    """Safe only where torch need not give back what it keeps, which is a pause each time."""
    fit, gpu = plan.fit, plan.gpu
    if fit is None or gpu is None:
        return None
    found = judge(None if fit.verdict == "fails" else fit.device_bytes, gpu.capacity_bytes, margin)
    return "tight" if fit.retries and found == "safe" else found


def _why(best: int | None, tried: list[Rung], job: TrainJob, card: Gpu) -> str:
    margin, capacity = job.config.memory.margin, gib(card.capacity_bytes)
    last_rows, last = tried[-1]
    takes = gib(last.peak.device_bytes)
    if best is None:
        return f"memory: auto: not even a single row fits with a margin of {margin:.0%}: {takes} of {capacity}"
    used = gib(dict(tried)[best].peak.device_bytes)
    said = f"memory: auto: {job.batch.with_micro_batch(best).in_words()}, {used} of {capacity}"
    if last_rows == best:
        return f"{said}: all rows of a step at once"
    return f"{said}; the next rung, {last_rows} rows, takes {takes}, more than a margin of {margin:.0%} leaves"


SCHEMA = "memfit.train-plan/1"


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    job: TrainJob
    """The job to run."""
    gpu: Gpu | None = None
    plan: Plan | None = None
    """None where the job cannot be predicted; `said` tells why."""
    plain: Workload | None = None
    """The same job without its memory levers."""
    levers: tuple[str, ...] = ()
    rungs: tuple[Rung, ...] = ()
    """Micro-batches that `memory: auto` has looked at, the smallest first."""
    said: tuple[str, ...] = ()

    @cached_property
    def before(self) -> Plan | None:
        """Of the job without its levers, predicted when somebody wants to see it; None where it has none."""
        if self.plain is None or not self.levers:
            return None
        try:
            return predict(self.plain, gpu=self.gpu)
        except MemfitError:
            return None

    @property
    def verdict(self) -> Verdict | None:
        return None if self.plan is None else verdict_of(self.plan, self.job.config.memory.margin)

    @property
    def peak_bytes(self) -> int | None:
        return None if self.plan is None else self.plan.peak.allocated_bytes

    @property
    def reserved_bytes(self) -> int | None:
        return None if self.plan is None else self.plan.peak.reserved_bytes

    @property
    def phases(self) -> dict[str, tuple[int, int]]:
        """The most that is allocated and reserved in each, over all steps."""
        made: dict[str, tuple[int, int]] = {}
        for each in self.plan.report.phases if self.plan else ():
            if each.name in PHASES:
                allocated, reserved = made.get(each.name, (0, 0))
                made[each.name] = max(allocated, each.allocated_bytes), max(reserved, each.reserved_bytes or 0)
        return made

    def to_json(self) -> dict[str, Any]:
        before, after = (None if each is None else budget_of(each) for each in (self.before, self.plan))
        return {
            "schema": SCHEMA,
            "gpu": None if self.gpu is None else {"name": self.gpu.name, "capacity_bytes": self.gpu.capacity_bytes},
            "verdict": self.verdict, "margin": self.job.config.memory.margin, "batch": self.job.batch.to_json(),
            "peak_bytes": self.peak_bytes, "reserved_bytes": self.reserved_bytes, "levers": list(self.levers),
            "budget": {"before": before, "after": after},
            "phases": {
                name: {"allocated_bytes": allocated, "reserved_bytes": reserved}
                for name, (allocated, reserved) in self.phases.items()
            },
            "rungs": [
                {"micro_batch_size": rows, "device_bytes": plan.peak.device_bytes, "verdict": plan.verdict}
                for rows, plan in self.rungs
            ],
            "plan": None if self.plan is None else self.plan.to_json(),
            "notes": [*self.said, *(self.plan.notes if self.plan else ())],
        }  # fmt: skip

    def in_lines(self) -> list[str]:
        if self.plan is None:
            return list(self.said)
        columns = {"predicted": self.plan} if self.before is None else {"before": self.before, "after": self.plan}
        on_host = (each for each in self.plan.notes if each.startswith("host memory") or "managed memory" in each)
        told = (f"plan: {note}" for note in on_host)
        return [*self._heading(), *table(columns), *told, *self.said, self._judgement()]

    def _heading(self) -> Iterator[str]:
        if self.gpu is not None:
            in_front = [note for note in self.plan.notes if stands_in_front(note)] if self.plan else []
            yield from (f"note: {note}" for note in (*in_front, *self.gpu.notes))
            yield f"plan: predicted for {_named(self.gpu)}"
        else:
            yield "plan: predicted with the H200's kernels; no GPU is used and memory.gpu names none, so no verdict"
        if self.before is not None:
            *first, last = self.levers
            yield f"before: the same job without {', '.join(first)}{' and ' if first else ''}{last}"

    def _judgement(self) -> str:
        assert self.plan is not None
        if self.gpu is None or self.plan.fit is None:
            return f"plan: takes {gib(self.plan.peak.device_bytes)} of a GPU; {self._smallest()}"
        needed, capacity, margin = self.plan.needed_bytes, self.plan.fit.capacity_bytes, self.job.config.memory.margin
        if self.verdict == "fails":
            return f"plan: does not fit into {gib(capacity)}; {self._smallest()}"
        free = f"{gib(needed)} of {gib(capacity)}, {gib(capacity - needed)} ({1 - needed / capacity:.0%}) stay free"
        if self.verdict == "safe":
            return f"plan: fits, {free}"
        if self.plan.fit.retries:
            spare = f"{gib(capacity - needed)} ({1 - needed / capacity:.0%}) to spare"
            return f"plan: fits, but only just: needs {gib(needed)} of {gib(capacity)}, {spare}; {self._gives_back()}"
        return f"plan: fits, but tightly: {free}, less than the margin of {margin:.0%}"

    def _gives_back(self) -> str:
        assert self.plan is not None and self.plan.fit is not None
        often = "once" if self.plan.fit.retries == 1 else f"{self.plan.fit.retries} times"
        held = gib(self.plan.peak.device_bytes)
        return f"with room torch would hold {held}, and here it stops {often} to give back what is idle"

    def _smallest(self) -> str:
        assert self.plan is not None
        return f"the smallest card that takes it has {gib(self.plan.smallest_gpu_bytes)}"


def decides(job: TrainJob) -> bool:
    """Whether a plan could change the job, or stop it: every process of a run must then make it."""
    return _card(job) is not None


def plan_training(job: TrainJob) -> TrainPlan:
    """For `memory.gpu`, or the GPU that is there, or none. A job that cannot be predicted is no reason not to train."""
    memory, card = job.config.memory, _card(job)
    refuse_unfit_card(job.config.workload, card)
    try:
        chosen, rungs, said = largest_that_fits(job, card) if memory.auto else (job, (), ())
        work = workload_of(chosen)
        plan = dict(rungs).get(work.batch_size) or predict(work, gpu=card)
        plain, levers = _without_levers(chosen, work)
        return TrainPlan(
            job=chosen,
            gpu=card,
            plan=plan,
            plain=plain,
            levers=levers,
            rungs=rungs,
            said=(*said, *_what_to_try(work, chosen, plan)),
        )
    except MemfitError as error:
        return TrainPlan(job=job, gpu=card, said=(f"plan: none, for this job cannot be predicted: {error.message}",))


def _card(job: TrainJob) -> Gpu | None:
    asked = job.config.memory.gpu
    return None if asked is None and job.config.device == "cpu" else card_for(asked)


def _named(card: Gpu) -> str:
    size = gib(card.capacity_bytes)
    return f"a card of {size}" if card.name == size else f"{card.name}, {size}"


# -- the levers of a job -----------------------------------------------------------------------------------------------


def _without_levers(job: TrainJob, work: Workload) -> tuple[Workload, tuple[str, ...]]:
    """The same job as most people would start it, and what of memfit's it then lacks."""
    gathering = _as_published(job)
    if gathering is not None:
        work = workload_of(gathering)
    on: dict[str, tuple[bool, dict[str, Any]]] = {
        "gradient checkpointing": (work.grad_checkpointing, {"grad_checkpointing": False}),
        "selective checkpointing": (work.selective_checkpointing, {"selective_checkpointing": False}),
        "chunked loss": (work.loss == "chunked", {"loss": "full"}),
        "offload": (bool(work.offload), {"offload": ()}),
    }
    names = tuple(name for name, (is_on, _) in on.items() if is_on)
    off = {key: value for is_on, change in on.values() if is_on for key, value in change.items()}
    plain = work.with_found(**off).without_unused()
    return plain, names if gathering is None else (*names, "masked attention")


def _as_published(job: TrainJob) -> TrainJob | None:
    """GSA on the path of its published code, which copies keys and values out for every query; None where nothing
    changes."""
    model = job.config.model
    if not is_gsa(model.name) or gsa_config(model).path != "masked":
        return None
    gathering = dataclasses.replace(model, settings={**model.settings, "path": "gather"})
    return dataclasses.replace(job, config=dataclasses.replace(job.config, model=gathering))


def _what_to_try(work: Workload, job: TrainJob, plan: Plan) -> tuple[str, ...]:
    if plan.verdict != "fails" or plan.gpu is None:
        return ()
    gpu = job.config.memory.gpu or in_mib(plan.gpu.capacity_bytes)
    return (f"to try: {fit_command(work, gpu, global_batch=job.batch.global_batch_size)}",)


# -- the budget: what is alive when most is allocated, and what the card must have beside it ---------------------------
# What the allocator holds beyond what is alive, and what CUDA itself takes, are the last row, so that the total is what
# the card must have. Where the job fits only because torch gives back what is idle, or not at all, that is the smallest
# card that takes it.


OF_ADAPTERS = "lora_"
"""In the names of the weights that peft adds."""
ACTIVATIONS, LOSS = ("activations", "temporaries"), ("loss",)


def budget_of(plan: Plan) -> dict[str, int]:
    """The overhead is workspaces of the libraries, what the allocator holds beyond the peak, and CUDA's context."""
    parts = plan.report.breakdown
    adapters = _adapter_bytes(plan)
    named = {
        "base_bytes": parts["weights"] - adapters, "adapter_bytes": adapters,
        "activation_bytes": sum(parts[name] for name in ACTIVATIONS), "loss_bytes": sum(parts[name] for name in LOSS),
        "gradient_bytes": parts["gradients"], "optimizer_bytes": parts["optimizer"],
    }  # fmt: skip
    needed = plan.needed_bytes
    return {**named, "overhead_bytes": needed - sum(named.values()), "total_bytes": needed}


def _adapter_bytes(plan: Plan) -> int:
    trace, sizes = plan.trace, plan.timeline.size
    return sum(
        int(sizes[block])
        for block in plan.report.alive.tolist()
        if trace.category(block) == "weights" and OF_ADAPTERS in trace.module(block)
    )


def table(columns: dict[str, Plan]) -> Iterator[str]:
    """As lines of text, a column for each plan."""
    budgets = [budget_of(plan) for plan in columns.values()]
    last = list(columns.values())[-1]
    rows = [(label, [each[f"{name}_bytes"] for each in budgets]) for name, label in _labels(last)]
    width = max(len(label) for label, _ in rows)
    wide = [max(len(title), 11) for title in columns]
    yield "  " + " " * width + "".join(f"  {title:>{each}}" for title, each in zip(columns, wide, strict=True))
    for label, values in rows:
        yield f"  {label:<{width}}" + "".join(f"  {gib(v):>{each}}" for v, each in zip(values, wide, strict=True))


def _labels(plan: Plan) -> list[tuple[str, str]]:
    work = plan.workload
    of_base = work["precision"].replace("amp-bf16", "fp32").replace("amp-fp16", "fp32")
    rows = [("base", f"Base model ({of_base if work.get('quant', 'none') == 'none' else work['quant']})")]
    if work["kind"] == "lora":
        dtype = "fp32" if work["adapter_dtype"] == "fp32" else work["precision"]
        rows.append(("adapter", f"LoRA adapters (rank {work['rank']}, {dtype})"))
    return [
        *rows,
        ("activation", f"Activations ({work['batch_size']} x {work['seq_len']:,} tokens)"),
        ("loss", "Logits and loss"),
        ("gradient", "Gradients"),
        ("optimizer", f"Optimizer states ({work['optimizer']})"),
        ("overhead", "Buffer/overhead (allocator, workspaces, CUDA)"),
        ("total", "Total"),
    ]
