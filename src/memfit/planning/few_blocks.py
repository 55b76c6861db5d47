"""Trace as few blocks of a model as tell the rest; all of them where they are not alike."""

from __future__ import annotations

import dataclasses

from memfit.core.events import Trace
from memfit.core.repeat import BEFORE, UNITS, NotRepeating
from memfit.errors import InputError, UsageError
from memfit.jobs.preparing import Prepared
from memfit.jobs.training.parallel import is_replicated
from memfit.jobs.workload import Workload
from memfit.models.registry import load_config, resolve
from memfit.planning import categories
from memfit.planning.blocks import Blocks, blocks_of
from memfit.planning.few_tokens import trace_generation
from memfit.planning.host_facts import scaled
from memfit.planning.recipe import Recipe, settings_found
from memfit.planning.tracing_jobs import prepare_without_memory, trace_job, trace_steps
from memfit.tracing.platform import Platform


def trace_few_blocks(work: Workload, platform: Platform) -> tuple[Recipe, Trace]:
    """What was traced, and the whole of the job made from it."""
    if work.kind == "prune":
        from memfit.planning.pruning import trace_pruning

        return trace_pruning(work, platform)
    notes: tuple[str, ...] = ()
    if is_replicated(work):
        notes = ("all blocks were traced one by one: DDP's buckets run across them",)
    elif ":" not in work.model:  # a factory's model is as large as its own code makes it
        blocks, parameters = blocks_of(work.model, work.attention)
        if blocks is not None and blocks.worthwhile:
            try:
                recipe = _of_few(work, platform, blocks, parameters)
                return recipe, recipe.whole()
            except NotRepeating as why:
                notes = (f"all {blocks.count} blocks were traced one by one: {why}",)
        elif blocks is None and getattr(load_config(resolve(work.model)), "num_hidden_layers", 0) > UNITS:
            notes = ("all blocks were traced one by one: they are not alike",)
    recipe = _of_all(work, platform, notes)
    return recipe, recipe.trace


def _of_few(work: Workload, platform: Platform, blocks: Blocks, parameters: int) -> Recipe:
    try:
        job = prepare_without_memory(work, layers=blocks.traced)
    except (InputError, UsageError) as why:  # if it is not about the number of blocks, all of them will say so too
        raise NotRepeating(f"the model cannot be built with {blocks.traced} of them: {why}") from why
    if job.parameters + (blocks.units - UNITS) * blocks.unit_parameters != parameters:
        raise NotRepeating("they are not all that grows with the number of layers")
    inside = _inside_wrapper(job, blocks)
    trace = _labelled(job, platform, blocks.traced)
    trainable = _trainable(job, inside) if work.trains else 0
    more, of_all = blocks.count / blocks.traced, trainable / max(1, sum(p.numel() for p in job.trainable))
    trace.facts = scaled(trace.facts, weights=more, activations=more, optimizer=of_all)
    return Recipe(
        trace=trace, blocks=inside.path, period=blocks.period, units=blocks.units, parameters=parameters,
        trainable_parameters=trainable,
        settings=settings_found(job.workload), notes=job.notes,
    )  # fmt: skip


def _of_all(work: Workload, platform: Platform, notes: tuple[str, ...]) -> Recipe:
    job = prepare_without_memory(work)
    return Recipe(
        trace=_labelled(job, platform), parameters=job.parameters,
        trainable_parameters=sum(p.numel() for p in job.trainable) if work.trains else 0,
        settings=settings_found(job.workload), notes=(*notes, *job.notes),
    )  # fmt: skip


def _labelled(job: Prepared, platform: Platform, layers: int | None = None) -> Trace:
    trace = trace_generation(job, platform) if job.workload.kind == "generate" else _all_steps(job, platform, layers)
    categories.label(trace, categories.loss_modules_of(job.model))
    return trace


def _all_steps(job: Prepared, platform: Platform, layers: int | None) -> Trace:
    try:
        return trace_steps(job, platform)
    except NotRepeating:
        return trace_job(prepare_without_memory(job.workload, layers=layers), platform)


def _inside_wrapper(job: Prepared, blocks: Blocks) -> Blocks:
    """peft puts the model inside another, so its blocks have a longer path."""
    path = next(
        name for name, _ in job.model.named_modules() if name == blocks.path or name.endswith(f".{blocks.path}")
    )
    return dataclasses.replace(blocks, path=path)


def _trainable(job: Prepared, blocks: Blocks) -> int:
    inner = tuple(f"{blocks.path}.{BEFORE * blocks.period + i}." for i in range(blocks.period))
    counts = {name: p.numel() for name, p in job.model.named_parameters() if p.requires_grad}
    in_unit = sum(count for name, count in counts.items() if name.startswith(inner))
    return sum(counts.values()) + (blocks.units - UNITS) * in_unit
