"""A prepared job, traced and labelled, from as few of its steps or new tokens as tell the rest.

The last step of a training is told by the one before it. Of a generation a dozen tokens are traced from the prompt, and
as many from a prompt that ends where the generation does: what the first ones foretell for the last steps is held
against those (`extrapolation/tokens.py`). A cache that stops growing at its window shows there, and all tokens are
traced.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress

from memfit.events import Trace
from memfit.extrapolation.blocks import UNITS, NotRepeating
from memfit.extrapolation.steps import last_step
from memfit.extrapolation.streams import NotSeparable, TracedStream, answered, filled, stream_of
from memfit.extrapolation.tokens import PAIR, GenerationExtension, traced_tokens
from memfit.jobs.build import Prepared, prepare_without_memory
from memfit.planning import categories
from memfit.planning.on_trace import STEPS, steps_of, trace_job
from memfit.planning.traced import Provenance, TracedShare
from memfit.platform import H200, Platform
from memfit.tracing.rule_answers import answers_on

COMPILED_TOKENS = 128
"""Of as many, a compiled model makes one after the other sooner than its last ones are compiled by themselves."""


def trace_labelled(job: Prepared, platform: Platform, layers: int | None = None) -> tuple[Trace, Provenance]:
    if job.workload.kind == "generate":
        trace, tokens = trace_generation(job, platform)
        how = Provenance(tokens=tokens)
    else:
        trace, steps = _all_steps(job, platform, layers)
        how = Provenance(steps=steps)
    categories.label(trace, categories.loss_modules_of(job.model))
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
    with categories.recording_traces() as heard:
        trace_job(job, platform, tokens=tokens)
    return stream_of(heard[0].trace, heard[0].calls)
