"""Whether the job fits: its plan on the card that it is meant for, and on what is free of the one that is here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memfit.advice.preflight.finding import Finding, Line
from memfit.advice.preflight.planned import Planned
from memfit.advice.preflight.situation import NO_CARD, Situation
from memfit.planning.fit_command import fit_command
from memfit.units import gib, in_mib

if TYPE_CHECKING:
    from memfit.planning.predict import Plan

FITS = Line("plan", "fits")


def fits(situation: Situation) -> Iterator[Finding]:
    for each in situation.plans.get():
        yield of_plan(each.plan, each.where, _search(each, situation))


def _search(planned: Planned, situation: Situation) -> str | None:
    if planned.plan.gpu is None:
        return None
    named, trains = situation.named_as, situation.asked.trains
    rows = situation.batch.needed().global_batch_size if trains else None
    gpu = named if named and planned.plan.gpu == situation.named else in_mib(planned.plan.gpu.capacity_bytes)
    return fit_command(planned.workload, gpu, global_batch=rows)


def _steps(workload: dict[str, Any]) -> str:
    """The first step of the optimizer makes its state, the later ones run beside it."""
    if "grad_accum" not in workload:
        return ""
    several = ", gradients accumulated" if workload["grad_accum"] > 1 else ""
    return f" through three optimizer steps{several}"


def of_plan(plan: Plan, where: str | None, search: str | None) -> Finding:
    """`search` is the command that looks for what fits."""
    peak, work = plan.peak, plan.workload
    rows = f"{work.get('batch_size', 1)} x {work['seq_len']:,} tokens"
    sizes = f"{gib(peak.allocated_bytes)} allocated, {gib(peak.reserved_bytes)} reserved, {gib(peak.device_bytes)}"
    found = f"predicted for {rows}{_steps(work)}: {sizes} on the device"
    details: dict[str, Any] = {
        "verdict": plan.verdict, "peak": plan.to_json()["peak"], "workload": work,
        "smallest_gpu_bytes": plan.smallest_gpu_bytes,
        "card": None if plan.gpu is None else {"name": plan.gpu.name, "capacity_bytes": plan.gpu.capacity_bytes},
    }  # fmt: skip
    if plan.fit is None or plan.gpu is None:
        return FITS.skipped(f"{found}; {NO_CARD}", **details)
    limited = plan.fit.capacity_bytes < plan.gpu.capacity_bytes
    room = f"{'what per_process_memory_fraction allows of ' if limited else ''}{where}, {gib(plan.fit.capacity_bytes)}"
    if plan.verdict == "fails":
        short = gib(-plan.fit.headroom_bytes)
        return FITS.failed(
            f"{found}: {short} more than {room}; stops at {plan.fit.failed_at}",
            f"the smallest change that fits: {search}",
            **details,
        )
    if plan.fit.retries:
        found += f", of which torch gives back what is idle: it runs with {gib(plan.needed_bytes)}"
    left = f"{found}: {plan.verdict} on {room}, {gib(plan.fit.headroom_bytes)} left"
    if plan.verdict == "tight":
        return FITS.warning(left, f"what leaves more: {search}", **details)
    return FITS.ok(left, **details)
