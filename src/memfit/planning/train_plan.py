"""A training job, predicted before it starts: the guide's budget table, whether it fits, and `memory: auto`.

    plan = plan_training(prepare_job(load_config("qwen2.5-7b-lora-24gb")))
    print("\\n".join(plan.in_lines()))
    plan.job, plan.verdict          # the job to run, at the micro-batch that `memory: auto` chose

What is predicted is `memfit train` itself, on the longest rows of the data (`jobs/training/memfit_loop.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memfit.errors import MemfitError
from memfit.gpus import Gpu
from memfit.jobs.training.phase_peaks import PHASES
from memfit.jobs.training.preparation import TrainJob
from memfit.jobs.training.shapes import gsa_config
from memfit.jobs.workload import Workload
from memfit.models.gsa_names import is_gsa
from memfit.planning.budget import budget_of, table
from memfit.planning.card_here import card_for
from memfit.planning.fit_command import fit_command
from memfit.planning.micro_batch import Rung, has_margin, largest_that_fits
from memfit.planning.predict import Plan, Verdict, predict
from memfit.planning.train_workload import workload_of, workload_of_config
from memfit.units import gib, in_mib

__all__ = ["TrainPlan", "decides", "plan_training", "workload_of", "workload_of_config"]

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
        if self.plan is None or self.plan.fit is None or self.gpu is None:
            return None
        if self.plan.fit.verdict == "fails":
            return "fails"
        return "safe" if has_margin(self.plan, self.job.config.memory.margin) else "tight"

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
                made[each.name] = max(allocated, each.allocated_bytes), max(reserved, each.reserved_bytes)
        return made

    def to_json(self) -> dict[str, Any]:
        def budget(plan: Plan | None) -> dict[str, int] | None:
            if plan is None:
                return None
            made = budget_of(plan)
            return {**dataclasses.asdict(made), "total_bytes": made.total_bytes}

        return {
            "schema": SCHEMA,
            "gpu": None if self.gpu is None else {"name": self.gpu.name, "capacity_bytes": self.gpu.capacity_bytes},
            "verdict": self.verdict, "margin": self.job.config.memory.margin, "batch": self.job.batch.to_json(),
            "peak_bytes": self.peak_bytes, "reserved_bytes": self.reserved_bytes, "levers": list(self.levers),
            "budget": {"before": budget(self.before), "after": budget(self.plan)},
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
        return [*self._heading(), *table(self._columns()), *self._on_host(), *self.said, self._judgement()]

    def _heading(self) -> Iterator[str]:
        if self.gpu is not None:
            yield from (f"note: {note}" for note in self.gpu.notes)
            yield f"plan: predicted for {_named(self.gpu)}"
        else:
            yield "plan: predicted with the H200's kernels; no GPU is used and memory.gpu names none, so no verdict"
        if self.before is not None:
            *first, last = self.levers
            yield f"before: the same job without {', '.join(first)}{' and ' if first else ''}{last}"

    def _on_host(self) -> Iterator[str]:
        for note in self.plan.notes if self.plan else ():
            if note.startswith("host memory"):
                yield f"plan: {note}"

    def _columns(self) -> dict[str, Plan]:
        assert self.plan is not None
        if self.before is None:
            return {"predicted": self.plan}
        return {"before": self.before, "after": self.plan}

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
    try:
        chosen, rungs, said = largest_that_fits(job, card) if memory.auto else (job, (), ())
        work = workload_of(chosen)
        plan = dict(rungs).get(work.batch_size) or predict(work, gpu=card)
        plain, levers = _without_levers(chosen)
        return TrainPlan(
            job=chosen, gpu=card, plan=plan, plain=plain, levers=levers, rungs=rungs,
            said=(*said, *_what_to_try(work, chosen, plan)),
        )  # fmt: skip
    except MemfitError as error:
        return TrainPlan(job=job, gpu=card, said=(f"plan: none, for this job cannot be predicted: {error.message}",))


def _card(job: TrainJob) -> Gpu | None:
    asked = job.config.memory.gpu
    return None if asked is None and job.config.device == "cpu" else card_for(asked)


def _named(card: Gpu) -> str:
    size = gib(card.capacity_bytes)
    return f"a card of {size}" if card.name == size else f"{card.name}, {size}"


# -- the levers of a job -----------------------------------------------------------------------------------------------


def _without_levers(job: TrainJob) -> tuple[Workload, tuple[str, ...]]:
    """The same job as most people would start it, and what of memfit's it then lacks."""
    gathering = _as_published(job)
    work = workload_of(gathering or job)
    on: dict[str, tuple[bool, dict[str, Any]]] = {
        "gradient checkpointing": (work.grad_checkpointing, {"grad_checkpointing": False}),
        "selective checkpointing": (work.selective_checkpointing, {"selective_checkpointing": False}),
        "chunked loss": (work.loss == "chunked", {"loss": "full"}),
        "offload": (bool(work.offload), {"offload": ()}),
    }
    names = tuple(name for name, (is_on, _) in on.items() if is_on)
    off = {key: value for is_on, change in on.values() if is_on for key, value in change.items()}
    plain = dataclasses.replace(work, **off).without_unused()
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
