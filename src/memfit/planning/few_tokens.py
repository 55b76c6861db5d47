"""Trace as few new tokens of a generation as tell the rest.

Each decoding step does what the one before did; only the cache, the masks and the ids are longer. Some tensors live for
two steps, so steps are taken in pairs. A dozen tokens are traced from the prompt, and as many from a prompt that ends
where the generation does: what the first ones foretell for the last steps is held against those. A cache that stops
growing at its window shows there, and all tokens are traced.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from memfit.core.events import Trace
from memfit.core.repeat import UNITS, Extension, Ints, NotRepeating, births, extension_in_time, sizes_of
from memfit.jobs.preparing import Prepared
from memfit.planning.tracing_jobs import trace_job
from memfit.tracing.platform import Platform
from memfit.units import MiB

PAIR = 2
TOLERATED_BYTES = 1 * MiB
"""Workspaces of attention over one query grow by steps; they are far smaller than this."""


def trace_generation(job: Prepared, platform: Platform) -> Trace:
    new = job.workload.new_tokens
    if not told_by_few(new):
        return trace_job(job, platform)
    try:
        return _from_few(job, platform, new)
    except NotRepeating:
        return trace_job(job, platform)


def told_by_few(new: int) -> bool:
    return new > 3 * PAIR * UNITS


def _from_few(job: Prepared, platform: Platform, new: int) -> Trace:
    traced = 1 + _skipped(new) + PAIR * UNITS
    near = trace_job(job, platform, tokens=traced)
    extension = Foretold.extension_of(near, new)
    later = dataclasses.replace(job.workload, seq_len=job.workload.seq_len + new - traced, new_tokens=traced)
    far = trace_job(dataclasses.replace(job, workload=later), platform)
    return Foretold.by(extension, far, new).of(near, far)


def _skipped(new: int) -> int:
    """The first steps still free what the prefill left."""
    return 3 + (new - 1 - 3) % PAIR


def _pairs(trace: Trace, skipped: int) -> list[int]:
    """The events at which pairs of steps begin; a step begins when the token before it is done."""
    done: list[int] = trace.facts["tokens"]
    return done[skipped:-1:PAIR]


@dataclass(frozen=True)
class Foretold:
    """A generation from its first tokens, held against its last ones."""

    extension: Extension
    last: Ints
    """What is made in the last steps, as the first ones foretell it, and as it was traced."""
    traced: Ints

    @classmethod
    def from_few(cls, near: Trace, far: Trace, new: int) -> Foretold:
        """For all traces that differ from these in sizes alone."""
        return cls.by(cls.extension_of(near, new), far, new)

    @staticmethod
    def extension_of(near: Trace, new: int) -> Extension:
        skipped = _skipped(new)
        made = extension_in_time(near, _pairs(near, skipped), units=(new - 1 - skipped) // PAIR)
        made.frame.facts.pop("tokens", None)
        return made

    @classmethod
    def by(cls, extension: Extension, far: Trace, new: int) -> Foretold:
        traced = births(far, _pairs(far, _skipped(new))[0])
        last = births(extension.frame)[-len(traced) :]
        if len(last) != len(traced):
            raise NotRepeating("the last tokens are not as the first ones foretell")
        return cls(extension, last, traced)

    def of(self, near: Trace, far: Trace) -> Trace:
        made = self.extension.of(near)
        self.check(sizes_of(made), sizes_of(far))
        return made

    def sizes(self, near: Ints, far: Ints) -> Ints:
        made = self.extension.sizes(near)
        self.check(made, far)
        return made

    def check(self, made: Ints, far: Ints) -> None:
        if (abs(made[self.last] - far[self.traced]) > TOLERATED_BYTES).any():
            raise NotRepeating("the last tokens are not as the first ones foretell")
