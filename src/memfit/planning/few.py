"""A job told from as few blocks, steps and new tokens as tell the rest; from all of them where they are not alike.

Which part of a model repeats is proved on the model itself, built without memory: every block has the same modules,
with the same settings and weights, as the block one period before it. A setting that differs and is not the block's own
number breaks the pattern, whether or not it would change memory.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from memfit.analysis.verdict import RANGE
from memfit.errors import InputError, UsageError
from memfit.events import Action, Trace
from memfit.extrapolation.blocks import BEFORE, UNITS, NotRepeating
from memfit.extrapolation.reused import COMPILED, SAID, let_the_last_go_first, sort_frees
from memfit.extrapolation.steps import PAIR, GenerationExtension, last_step, traced_tokens
from memfit.extrapolation.streams import NotSeparable, TracedStream, answered, filled, stream_of
from memfit.jobs.build import Prepared, prepare_without_memory
from memfit.jobs.loading import loaded_bytes
from memfit.jobs.settings import BEYOND_BLOCKS
from memfit.jobs.stored import as_stored
from memfit.jobs.training.optimizers import managed_bytes
from memfit.jobs.workload import Workload
from memfit.models.heads import HEAD_NAMES
from memfit.models.registry import ModelSource, block_list, build_model, load_config, parameter_count
from memfit.planning.on_trace import STEPS, steps_of, trace_job
from memfit.planning.padded import larger_of_two
from memfit.planning.traced import (
    HOST,
    MANAGED,
    Provenance,
    Recipe,
    TracedShare,
    label,
    loss_modules_of,
    recording_traces,
    scaled,
    settings_found,
)
from memfit.platform import H200, Platform
from memfit.tracing.compiled.padding import PADS
from memfit.tracing.outside import settings_of_a_new_process, what_is_around
from memfit.tracing.rule_answers import answers_on

MAX_PERIOD = 8
IN_ORDER = (
    "blocks of compiled code are alike but for which of two like buffers is let go first: what is reserved may be some"
    " percent more or less"
)
PLAIN = (bool, int, float, str, type(None))
OWN_NUMBER = ("layer_idx", "layer_id", "block_idx")


@dataclass(frozen=True)
class Blocks:
    path: str
    count: int
    period: int
    unit_parameters: int = field(default=0, compare=False)
    """Parameters of one period of blocks."""
    edge: int = 0
    """Periods that belong to the first and to the last unit beside their own: compiled code differs next to an end."""
    as_they_are: bool = False
    """Like buffers of compiled code are not taken for each other."""

    @property
    def units(self) -> int:
        """Periods; the last of them may be cut short."""
        return -(-self.count // self.period) - 2 * self.edge

    @property
    def traced(self) -> int:
        """How many blocks to trace: three units, and the last one as it is."""
        return self.count - (self.units - UNITS) * self.period

    @property
    def worthwhile(self) -> bool:
        return self.units > UNITS

    def in_pairs(self) -> Blocks:
        return dataclasses.replace(self, period=2 * self.period, unit_parameters=2 * self.unit_parameters)


def find_blocks(model: nn.Module) -> Blocks | None:
    """The list of blocks, if it has a period."""
    found = block_list(model)
    if found is None:
        return None
    path, blocks = found
    kinds = [tuple(_facts(name, module) for name, module in block.named_modules()) for block in blocks]
    period = next((p for p in range(1, MAX_PERIOD + 1) if kinds[1 + p :] == kinds[1:-p]), None)
    if period is None:
        return None
    unit = sum(p.numel() for block in list(blocks)[period : 2 * period] for p in block.parameters())
    return Blocks(path, len(blocks), period, unit)


def _facts(name: str, module: nn.Module) -> tuple[Any, ...]:
    settings = tuple((k, v) for k, v in vars(module).items() if isinstance(v, PLAIN) and k not in OWN_NUMBER)
    weights = tuple((k, tuple(p.shape), p.dtype) for k, p in module._parameters.items() if p is not None)
    buffers = tuple((k, tuple(b.shape), b.dtype) for k, b in module._buffers.items() if b is not None)
    return name, type(module), settings, weights, buffers


def blocks_of(source: ModelSource, attention: str, head: str | None = None) -> tuple[Blocks | None, int]:
    """The blocks and the number of parameters of a model, from its full size built without memory."""
    changed = os.stat(source.target).st_mtime_ns if os.path.exists(source.target) else 0
    return _blocks_of(source, attention, head, changed)


@lru_cache(maxsize=128)
def _blocks_of(source: ModelSource, attention: Any, head: str | None, changed: int) -> tuple[Blocks | None, int]:
    with torch.device("meta"):
        built = build_model(source, dtype=torch.bfloat16, attention=attention, head=HEAD_NAMES[head] if head else None)
    if getattr(getattr(built, "config", None), "rescale_every", None):
        return None, parameter_count(built)  # RWKV: what a block does depends on its number, which no module shows
    return find_blocks(built), parameter_count(built)


def _are_stored_alike(work: Workload, blocks: Blocks) -> bool:
    """A checkpoint that is quantised may leave layers in 16 bits by their names, in some blocks and not in others."""
    stored = work.stored
    if stored is None or not any(rule.startswith("re:") or re.search(r"\d", rule) for rule in stored.kept or ()):
        return True
    with torch.device("meta"):
        head = HEAD_NAMES[work.head] if work.head else None
        model = build_model(work.source, dtype=torch.bfloat16, attention=work.attention, head=head)
        as_stored(model, work, stored)
    found = find_blocks(model)
    return found is not None and found.period == blocks.period


def trace_few_blocks(work: Workload, platform: Platform) -> tuple[Recipe, Trace]:
    """What was traced, and the whole of the job made from it. Where the card would decide whether products are padded,
    both are traced, and the larger is told."""
    if (around := what_is_around()) is not None:
        raise UsageError(
            f"memfit.predict is called inside {around}, through which all code of torch runs",
            hint="call it outside; memfit.trace plans your own code with what is around it",
        )
    with settings_of_a_new_process():
        return _trace_in_a_new_process(work, platform)


def _trace_in_a_new_process(work: Workload, platform: Platform) -> tuple[Recipe, Trace]:
    first = recipe, whole = _trace_few_blocks(work, platform)
    if PADS not in whole.facts.get(SAID, ()):
        return first

    def again() -> tuple[Recipe, Trace]:
        padded, whole_padded = _trace_few_blocks(work, platform, alike=recipe.blocks is not None)
        notes = tuple(dict.fromkeys((*recipe.notes, *padded.notes)))
        return dataclasses.replace(padded, notes=notes), whole_padded

    (told, whole), ends, said = larger_of_two(first, again, lambda made: made[1])
    if ends is not None:
        whole.facts[RANGE] = told.trace.facts[RANGE] = ends
    return dataclasses.replace(told, notes=(said, *told.notes)), whole


def _trace_few_blocks(work: Workload, platform: Platform, *, alike: bool = True) -> tuple[Recipe, Trace]:
    """`alike`: unless blocks of this very job were found to differ."""
    source = work.source
    if work.kind == "prune":
        from memfit.planning.pruning import trace_pruning

        return trace_pruning(work, platform)
    notes: tuple[str, ...] = ()
    if work.is_replicated:
        notes = ("all blocks were traced one by one: DDP's buckets run across them",)
    elif work.kind == "lora" and work.adapter in BEYOND_BLOCKS:
        notes = (f"all blocks were traced one by one: --adapter {work.adapter} has parts that belong to none of them",)
    elif (head := work.other_head) is not None and head.reads != "text":
        notes = (f"all blocks were traced one by one: a model that reads {head.reads} has more than one kind of them",)
    elif alike and source.kind != "factory":  # a factory's model is as large as its own code makes it
        blocks, parameters = blocks_of(source, work.attention, work.head)
        if blocks is not None and not _are_stored_alike(work, blocks):
            blocks = None
        for tried in _tried(blocks, work):
            try:
                return _of_few(work, platform, tried, parameters)
            except NotRepeating as why:
                notes = (f"all {tried.count} blocks were traced one by one: {why}",)
        if _is_woven(work):
            notes = ("all blocks were traced one by one: compiled for inference, one makes and keeps what others use",)
        elif blocks is None and getattr(load_config(source), "num_hidden_layers", 0) > UNITS:
            notes = ("all blocks were traced one by one: they are not alike",)
    recipe = _of_all(work, platform, notes)
    return recipe, recipe.whole()


def _tried(blocks: Blocks | None, work: Workload) -> Iterator[Blocks]:
    """With LoRA, compiled code may let go what was made two blocks away: then two of them are a unit."""
    if blocks is None or _is_woven(work):
        return
    tried = dataclasses.replace(blocks, edge=int(work.is_compiled))
    twice = work.kind == "lora" and work.compile
    for each in (dataclasses.replace(tried, as_they_are=True), tried.in_pairs()) if twice else (tried,):
        if each.worthwhile:
            yield each


def _is_woven(work: Workload) -> bool:
    """Compiled as one and without gradients, four blocks share kernels, and buffers are handed on over as many."""
    return work.is_compiled and work.compile and not work.trains


def _of_few(work: Workload, platform: Platform, blocks: Blocks, parameters: int) -> tuple[Recipe, Trace]:
    try:
        job = prepare_without_memory(work, layers=blocks.traced)
    except (InputError, UsageError) as why:  # if it is not about the number of blocks, all of them will say so too
        raise NotRepeating(f"the model cannot be built with {blocks.traced} of them: {why}") from why
    if job.parameters + (blocks.units - UNITS) * blocks.unit_parameters != parameters:
        raise NotRepeating("they are not all that grows with the number of layers")
    inside = _inside_wrapper(job, blocks)
    if work.is_quantised:
        unit = loaded_bytes(job.model, tuple(f"{blocks.path}.{blocks.period + i}." for i in range(blocks.period)))
        job = dataclasses.replace(job, loaded_bytes=loaded_bytes(job.model) + (blocks.units - UNITS) * unit)
    trace, how = trace_labelled(job, platform, blocks.traced)
    trainable = _trainable(job, inside) if work.trains else 0
    more, of_all = blocks.count / blocks.traced, trainable / max(1, sum(p.numel() for p in job.trainable))
    trace.facts = scaled(trace.facts, weights=more, activations=more, optimizer=of_all)
    if work.is_paged:
        _note_managed(trace, _trainable(job, inside, partial(managed_bytes, job.workload.optimizer)))
    compiled = trace.facts.pop(COMPILED, [])
    if work.is_compiled and not _says_whose(trace, inside, compiled):
        raise NotRepeating("compiled code does not say which of them it runs for")
    if compiled:
        sort_frees(trace, compiled)
    recipe = Recipe(
        trace=trace,
        blocks=inside.path,
        period=blocks.period,
        units=blocks.units,
        edge=blocks.edge,
        parameters=parameters,
        trainable_parameters=trainable,
        settings=settings_found(job.workload),
        how=dataclasses.replace(how, blocks=TracedShare(blocks.traced, blocks.count)),
        notes=job.notes,
    )
    try:
        return recipe, recipe.whole()
    except NotRepeating:
        if not compiled or blocks.as_they_are:
            raise
    let_the_last_go_first(trace, compiled)
    return dataclasses.replace(recipe, notes=(IN_ORDER, *recipe.notes)), recipe.whole()


def _says_whose(trace: Trace, blocks: Blocks, compiled: Sequence[Sequence[int]]) -> bool:
    """Whether what compiled code makes has the names of inner blocks."""
    inner = f"{blocks.path}.{(BEFORE + blocks.edge) * blocks.period}."
    return any(
        action == Action.ALLOC and trace.module(block).startswith(inner)
        for start, end in compiled
        for action, block in zip(trace.actions[start:end], trace.subjects[start:end], strict=True)
    )


def _of_all(work: Workload, platform: Platform, notes: tuple[str, ...]) -> Recipe:
    job = prepare_without_memory(work)
    trace, how = trace_labelled(job, platform)
    trace.facts.pop(COMPILED, None)
    if work.is_paged:
        _note_managed(trace, sum(managed_bytes(job.workload.optimizer, p.numel()) for p in job.trainable))
    return Recipe(
        trace=trace,
        parameters=job.parameters,
        trainable_parameters=sum(p.numel() for p in job.trainable) if work.trains else 0,
        settings=settings_found(job.workload),
        how=how,
        notes=(*notes, *job.notes),
    )


def _inside_wrapper(job: Prepared, blocks: Blocks) -> Blocks:
    """peft puts the model inside another, so its blocks have a longer path."""
    names = (name for name, _ in job.model.named_modules())
    path = next(name for name in names if f".{name}".endswith(f".{blocks.path}"))
    return dataclasses.replace(blocks, path=path)


def _note_managed(trace: Trace, count: int) -> None:
    if count:
        trace.facts[HOST] = {**trace.facts.get(HOST, {}), MANAGED: count}


def _trainable(job: Prepared, blocks: Blocks, count: Callable[[int], int] = int) -> int:
    """Entries of trained weights in all blocks, or what is counted of a weight's entries."""
    inner = tuple(f"{blocks.path}.{BEFORE * blocks.period + i}." for i in range(blocks.period))
    counts = {name: count(p.numel()) for name, p in job.model.named_parameters() if p.requires_grad}
    in_unit = sum(count for name, count in counts.items() if name.startswith(inner))
    return sum(counts.values()) + (blocks.units - UNITS) * in_unit


# -- few of its steps or new tokens, which tell the rest ---------------------------------------------------------------
# The last step of a training is told by the one before it. Of a generation a dozen tokens are traced from the prompt,
# and as many from a prompt that ends where the generation does: what the first ones foretell for the last steps is held
# against those (`extrapolation/steps.py`). A cache that stops growing at its window shows there, and all tokens are
# traced.


COMPILED_TOKENS = 128
"""Of as many, a compiled model makes one after the other sooner than its last ones are compiled by themselves."""


def trace_labelled(job: Prepared, platform: Platform, layers: int | None = None) -> tuple[Trace, Provenance]:
    if job.workload.kind == "generate":
        trace, tokens = trace_generation(job, platform)
        how = Provenance(tokens=tokens)
    else:
        trace, steps = _all_steps(job, platform, layers)
        how = Provenance(steps=steps)
    label(trace, loss_modules_of(job.model))
    return trace, how


def _all_steps(job: Prepared, platform: Platform, layers: int | None) -> tuple[Trace, TracedShare | None]:
    try:
        return trace_steps(job, platform)
    except NotRepeating:
        anew = prepare_without_memory(job.workload, layers=layers)
        return trace_job(dataclasses.replace(anew, loaded_bytes=job.loaded_bytes), platform), None


def trace_steps(job: Prepared, platform: Platform = H200) -> tuple[Trace, TracedShare | None]:
    """As `trace_job`, but the last step of a training is told by the one before it; with the share of the steps that
    was traced. Raises NotRepeating where it is not; the job has then run, and must be prepared anew."""
    work = job.workload
    if not work.trains or work.is_replicated:  # DDP makes its buckets anew in the second step
        return trace_job(job, platform), None
    if work.is_compiled:  # what was compiled runs once more sooner than a step is proved to repeat
        return trace_job(job, platform), None
    traced, steps = trace_job(job, platform, steps=STEPS - 1), steps_of(work.loop)
    missing = last_step(traced, steps)
    return (missing.apply(traced), TracedShare(steps - 1, steps)) if missing else (traced, None)


def trace_generation(job: Prepared, platform: Platform) -> tuple[Trace, TracedShare | None]:
    """With the share of the new tokens that was traced."""
    new = job.workload.new_tokens
    if new > (COMPILED_TOKENS if job.workload.is_compiled else 3 * PAIR * UNITS):
        traced = traced_tokens(new)
        with suppress(NotRepeating, NotSeparable):
            return _from_few(job, platform, new, traced), TracedShare(traced, new)
    return trace_job(job, platform), None


def _from_few(job: Prepared, platform: Platform, new: int, traced: int) -> Trace:
    near = _noted(job, platform, traced)
    later = dataclasses.replace(job.workload, seq_len=job.workload.seq_len + new - traced, new_tokens=traced)
    far = _noted(dataclasses.replace(job, workload=later), platform, None)
    ask = answers_on(platform)
    told = GenerationExtension(near.stream, far.stream, new).apply(near.sized, far.sized, ask)
    outlines, pool = answered(told, ask)
    return filled(told.stream, outlines, told.which).trace(pool)


def _noted(job: Prepared, platform: Platform, tokens: int | None) -> TracedStream:
    with recording_traces() as heard:
        trace_job(job, platform, tokens=tokens)
    return stream_of(heard[0].trace, heard[0].calls)
