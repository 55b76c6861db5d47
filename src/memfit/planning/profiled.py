"""A profile without a GPU: the very steps of `jobs/profile.py`, traced, and put by a replay into torch's own format."""

from __future__ import annotations

from memfit.core.alloc_config import AllocatorConfig
from memfit.core.placed_snapshot import placed_snapshot
from memfit.core.repeat import NotRepeating
from memfit.core.replay import replay
from memfit.core.report import make_report
from memfit.core.steps import with_steps
from memfit.core.window import step_begins
from memfit.errors import InputError
from memfit.gpus import Gpu, find_gpu
from memfit.jobs.profile import Profiled, ProfileSettings
from memfit.planning.platforms import platform_of
from memfit.planning.traced import trace_workload


def predict_profile(settings: ProfileSettings, gpu: str | Gpu | None = None) -> Profiled:
    card = find_gpu(gpu) if isinstance(gpu, str) else gpu
    config = AllocatorConfig.parse(settings.alloc_conf)
    traced = trace_workload(settings.workload(), platform_of(card))
    try:
        trace = with_steps(traced.trace, settings.steps)
    except NotRepeating as why:
        known = max(mark.step for mark in traced.trace.marks)
        raise InputError(
            f"{known} steps do not tell the next ones of this job: {why}",
            hint=f"--warmup-steps and --measure-steps may come to {known}, or profile it on a GPU",
        ) from why
    begin = step_begins(trace, settings.warmup_steps + 1) or 0
    timeline = replay(trace, config)
    before = max(begin - 1, 0)
    phases: dict[str, int] = {}
    for phase in make_report(trace, timeline).phases:
        if phase.step > settings.warmup_steps:
            phases[phase.name] = max(phases.get(phase.name, 0), phase.allocated_bytes)
    return Profiled(
        origin="predicted", gpu=card.name if card else "H200",
        snapshot=placed_snapshot(trace, config, begin=begin, alloc_conf=settings.alloc_conf),
        peak_allocated_bytes=max(timeline.allocated[before:]), peak_reserved_bytes=max(timeline.reserved[before:]),
        phases=phases, notes=("predicted, not measured: torch 2.11, CUDA 13.0", *traced.notes),
    )  # fmt: skip
