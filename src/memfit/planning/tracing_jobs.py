"""A prepared job as a Trace: its own code, on the traced device, with its phases marked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memfit.core.events import Trace
from memfit.jobs.preparing import Prepared, prepare
from memfit.jobs.running import run_job
from memfit.jobs.workload import Workload
from memfit.tracing.platform import H200, Platform
from memfit.tracing.tracer import Tracer, trace

STEPS = 3
"""The optimizer's state is there from the second step on, and the pools have settled by the third."""


def prepare_without_memory(workload: Workload) -> Prepared:
    with torch.device("meta"):
        return prepare(workload)


def trace_job(job: Prepared, platform: Platform = H200, *, steps: int = STEPS) -> Trace:
    def run(tracer: Tracer) -> None:
        run_job(job, tracer.device, marking(tracer), steps=steps)

    return trace(run, platform=platform)


class marking:
    """Phases of a traced job become marks; what is moved while loading are the weights."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    @contextmanager
    def __call__(self, name: str, step: int = 0) -> Iterator[None]:
        self.tracer.trace.mark(name, step)
        before, self.tracer.default_category = self.tracer.default_category, "weights" if name == "load" else ""
        try:
            yield
        finally:
            self.tracer.default_category = before
