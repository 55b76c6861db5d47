"""A prepared job as a Trace: its own code, on the traced device, with its phases marked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from memfit.core.events import Trace
from memfit.gpus import Gpu
from memfit.jobs.preparing import Prepared, prepare
from memfit.jobs.running import run_job
from memfit.jobs.workload import Workload
from memfit.planning.phases_by_what_runs import phases_by_what_runs
from memfit.tracing.answers import Answers
from memfit.tracing.platform import H200, Platform
from memfit.tracing.tracer import Tracer, trace

STEPS = 3
"""The optimizer's state is there from the second step on, and the pools have settled by the third."""


def platform_of(gpu: Gpu | None) -> Platform:
    """The card's own kernels; without a card, those of the reference machine."""
    if gpu is None:
        return H200
    return Platform(arch=gpu.arch, sm_count=gpu.sm_count, max_threads_per_sm=gpu.max_threads_per_sm)


def prepare_without_memory(workload: Workload) -> Prepared:
    with torch.device("meta"):
        return prepare(workload)


def trace_job(job: Prepared, platform: Platform = H200, *, steps: int = STEPS) -> Trace:
    def run(tracer: Tracer) -> None:
        run_job(job, tracer.device, MarkedPhases(tracer, job), steps=steps)

    work = job.workload
    if work.kind == "generate":
        from memfit.planning.generate_on_trace import generate_answers

        return trace(run, platform=platform, answers=Answers(generate_answers(work)))
    if work.trains and work.loop == "trainer":
        from memfit.planning.trainer_on_trace import TRAINER_ANSWERS, trainer_on

        with trainer_on("meta"):
            return trace(run, platform=platform, answers=Answers(TRAINER_ANSWERS))
    return trace(run, platform=platform)


class MarkedPhases:
    """Phases of a traced job become marks; what is moved while loading are the weights, under their own names."""

    def __init__(self, tracer: Tracer, job: Prepared) -> None:
        self.tracer = tracer
        self.model = job.model

    @contextmanager
    def __call__(self, name: str, step: int = 0) -> Iterator[None]:
        tracer = self.tracer
        tracer.trace.mark(name, step)
        before, tracer.default_category = tracer.default_category, "weights" if name == "load" else ""
        try:
            with phases_by_what_runs(tracer) if name == "trainer" else nullcontext():
                yield
        finally:
            tracer.default_category = before
        if name == "load":
            for path, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                tracer.name(tensor, path)
