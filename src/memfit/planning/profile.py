"""A profile without a GPU: the very steps of `jobs/profile.py`, traced, and put by a replay into torch's own format."""

from __future__ import annotations

from memfit.analysis.summary import summarise_plan
from memfit.errors import InputError
from memfit.events import step_begins
from memfit.extrapolation.blocks import NotRepeating
from memfit.extrapolation.steps import with_steps
from memfit.gpus import Gpu, find_gpu
from memfit.jobs.profile import OnCard, Profiled, ProfileSettings
from memfit.planning.predict import plan_of
from memfit.planning.traced import Traced, trace_workload
from memfit.platform import platform_of
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.replay import replay
from memfit.snapshots.write import placed_snapshot


def predict_profile(settings: ProfileSettings, gpu: str | Gpu | None = None) -> Profiled:
    card = find_gpu(gpu) if isinstance(gpu, str) else gpu
    config = AllocatorConfig.parse("")
    traced = trace_workload(settings.workload, platform_of(card), stacks=True)
    on_card, why = (None, ()) if card is None else _on_card(traced, card)
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
    for phase in summarise_plan(timeline).phases:
        if phase.step > settings.warmup_steps:
            phases[phase.name] = max(phases.get(phase.name, 0), phase.allocated_bytes)
    return Profiled(
        origin="predicted",
        gpu=card.name if card else "H200",
        snapshot=placed_snapshot(trace, config, begin=begin),
        peak_allocated_bytes=int(timeline.allocated[before:].max()),
        peak_reserved_bytes=int(timeline.reserved[before:].max()),
        phases=phases,
        notes=(*why, "predicted, not measured: torch 2.11, CUDA 13.0", *traced.notes),
        on_card=on_card,
    )


def _on_card(traced: Traced, card: Gpu) -> tuple[OnCard, tuple[str, ...]]:
    """As `memfit plan` has it, of the same job on the same card; and what the verdict's reader should know."""
    work = traced.workload
    plan = plan_of(traced, work, card, workload=work.document(), notes=(), started=0.0)
    assert plan.fit is not None and plan.headroom_bytes is not None
    told = OnCard(
        verdict=plan.fit.verdict,
        capacity_bytes=plan.fit.capacity_bytes,
        headroom_bytes=plan.headroom_bytes,
        smallest_gpu_bytes=plan.smallest_gpu_bytes,
    )
    room = ("the snapshot shows the job with room enough: on this card it would end before",)
    return told, (*(room if told.verdict == "fails" else ()), *plan.notes, *card.notes)
