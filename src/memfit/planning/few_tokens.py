"""Trace as few new tokens of a generation as tell the rest.

Each decoding step does what the one before did; only the cache, the masks and the ids are longer. Some tensors live for
two steps, so steps are taken in pairs. A dozen tokens are traced from the prompt, and as many from a prompt that ends
where the generation does: what the first ones foretell for the last steps is held against those. A cache that stops
growing at its window shows there, and all tokens are traced.
"""

from __future__ import annotations

import dataclasses

from memfit.core.events import Action, Trace
from memfit.core.repeat import UNITS, NotRepeating, extend_in_time
from memfit.jobs.preparing import Prepared
from memfit.planning.tracing_jobs import trace_job
from memfit.tracing.platform import Platform
from memfit.units import MiB

PAIR = 2
TOLERATED_BYTES = 1 * MiB
"""Workspaces of attention over one query grow by steps; they are far smaller than this."""


def trace_generation(job: Prepared, platform: Platform) -> Trace:
    new = job.workload.new_tokens
    if new <= 3 * PAIR * UNITS:
        return trace_job(job, platform)
    try:
        return _from_few(job, platform, new)
    except NotRepeating:
        return trace_job(job, platform)


def _from_few(job: Prepared, platform: Platform, new: int) -> Trace:
    skipped = 3 + (new - 1 - 3) % PAIR  # the first steps still free what the prefill left
    traced = 1 + skipped + PAIR * UNITS
    near = trace_job(job, platform, tokens=traced)
    extended = extend_in_time(near, _pairs(near, skipped), units=(new - 1 - skipped) // PAIR)
    later = dataclasses.replace(job.workload, seq_len=job.workload.seq_len + new - traced, new_tokens=traced)
    far = trace_job(dataclasses.replace(job, workload=later), platform)
    _compare_ends(extended, far, _pairs(far, skipped)[0])
    extended.facts.pop("tokens", None)
    return extended


def _pairs(trace: Trace, skipped: int) -> list[int]:
    """The events at which pairs of steps begin; a step begins when the token before it is done."""
    done: list[int] = trace.facts["tokens"]
    return done[skipped:-1:PAIR]


def _compare_ends(extended: Trace, far: Trace, start: int) -> None:
    """The last steps of both, counted from the end, make tensors of the same sizes."""
    wanted = [far.requested[s] for a, s in list(far.events())[start:] if a == Action.ALLOC]
    made = [extended.requested[s] for a, s in extended.events() if a == Action.ALLOC][-len(wanted) :]
    if len(made) != len(wanted) or any(abs(a - b) > TOLERATED_BYTES for a, b in zip(made, wanted, strict=True)):
        raise NotRepeating("the last tokens are not as the first ones foretell")
