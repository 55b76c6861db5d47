"""A workload as a labelled trace: of a few blocks, extended to all of them where they are proven alike."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.events import Trace
from memfit.core.repeat import BEFORE, UNITS, NotRepeating, extend
from memfit.jobs.preparing import Prepared
from memfit.jobs.workload import Workload
from memfit.planning import categories
from memfit.planning.blocks import Blocks, blocks_of
from memfit.planning.tracing_jobs import prepare_without_memory, trace_job
from memfit.tracing.platform import Platform


@dataclass(frozen=True, kw_only=True)
class Traced:
    trace: Trace
    workload: Workload
    model: str
    parameters: int
    trainable_parameters: int
    notes: tuple[str, ...]


def trace_workload(work: Workload, platform: Platform) -> Traced:
    notes: tuple[str, ...] = ()
    if ":" not in work.model:  # a factory's model is as large as its own code makes it
        blocks, parameters = blocks_of(work.model, work.attention)
        if blocks is not None and blocks.worthwhile:
            job = prepare_without_memory(work, layers=blocks.traced)
            inside = _inside_wrapper(job, blocks)
            trace = _labelled(job, platform)
            try:
                extended = extend(trace, inside.path, period=blocks.period, units=blocks.units)
                return _result(job, extended, parameters, _trainable(job, inside), ())
            except NotRepeating as why:
                notes = (f"all {blocks.count} blocks were traced one by one: {why}",)
    job = prepare_without_memory(work)
    return _result(job, _labelled(job, platform), job.parameters, sum(p.numel() for p in job.trainable), notes)


def _labelled(job: Prepared, platform: Platform) -> Trace:
    trace = trace_job(job, platform)
    categories.label(trace, categories.loss_modules_of(job.model))
    return trace


def _inside_wrapper(job: Prepared, blocks: Blocks) -> Blocks:
    """peft puts the model inside another, so its blocks have a longer path."""
    path = next(name for name, _ in job.model.named_modules() if name == blocks.path or name.endswith(f".{blocks.path}"))
    return Blocks(path, blocks.count, blocks.period)


def _trainable(job: Prepared, blocks: Blocks) -> int:
    inner = tuple(f"{blocks.path}.{BEFORE * blocks.period + i}." for i in range(blocks.period))
    counts = {name: p.numel() for name, p in job.model.named_parameters() if p.requires_grad}
    in_unit = sum(count for name, count in counts.items() if name.startswith(inner))
    return sum(counts.values()) + (blocks.units - UNITS) * in_unit


def _result(job: Prepared, trace: Trace, parameters: int, trainable: int, notes: tuple[str, ...]) -> Traced:
    return Traced(
        trace=trace, workload=job.workload, model=job.name, parameters=parameters,
        trainable_parameters=trainable if job.workload.trains else 0, notes=(*notes, *job.notes),
    )  # fmt: skip
