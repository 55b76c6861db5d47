"""Trace as few new tokens of a generation as tell the rest.

A dozen tokens are traced from the prompt, and as many from a prompt that ends where the generation does: what the first
ones foretell for the last steps is held against those (`core/in_time.py`). A cache that stops growing at its window
shows there, and all tokens are traced.
"""

from __future__ import annotations

import dataclasses

from memfit.core.events import Trace
from memfit.core.holes import Holed, NotHoled, answered, filled, stream_of
from memfit.core.in_time import PAIR, InTime, traced_tokens
from memfit.core.repeat import UNITS, NotRepeating
from memfit.jobs.preparing import Prepared
from memfit.planning.noted import noting
from memfit.planning.tracing_jobs import trace_job
from memfit.tracing.platform import Platform
from memfit.tracing.rule_answers import answers_on


def trace_generation(job: Prepared, platform: Platform) -> Trace:
    new = job.workload.new_tokens
    if new <= 3 * PAIR * UNITS:
        return trace_job(job, platform)
    try:
        return _from_few(job, platform, new)
    except (NotRepeating, NotHoled):
        return trace_job(job, platform)


def _from_few(job: Prepared, platform: Platform, new: int) -> Trace:
    traced = traced_tokens(new)
    near = _noted(job, platform, traced)
    later = dataclasses.replace(job.workload, seq_len=job.workload.seq_len + new - traced, new_tokens=traced)
    far = _noted(dataclasses.replace(job, workload=later), platform, None)
    ask = answers_on(platform)
    told = InTime(near.stream, far.stream, new).of(near.sized, far.sized, ask)
    outlines, pool = answered(told, ask)
    return filled(told.stream, outlines, told.which).trace(pool)


def _noted(job: Prepared, platform: Platform, tokens: int | None) -> Holed:
    with noting() as heard:
        trace_job(job, platform, tokens=tokens)
    return stream_of(heard[0].trace, heard[0].calls)
