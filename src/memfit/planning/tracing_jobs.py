"""A prepared job as a Trace: its own code, on the traced device, with its phases marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from memfit.core.events import Trace
from memfit.core.holes import Call
from memfit.core.steps import last_step
from memfit.jobs.preparing import Prepared, prepare
from memfit.jobs.running import run_job
from memfit.jobs.training.parallel import is_replicated, is_sharded
from memfit.jobs.workload import Workload
from memfit.planning.failures import failures_of_the_job
from memfit.planning.kinds_in_order import kinds_in_order
from memfit.planning.noted import note
from memfit.planning.phases_by_what_runs import phases_by_what_runs
from memfit.planning.planned_host import levers_counted
from memfit.tracing.answers import Answer, Answers, Site
from memfit.tracing.fully_sharded import fully_shard_traced
from memfit.tracing.platform import H200, Platform
from memfit.tracing.replicated import ddp_traced
from memfit.tracing.tracer import Tracer, trace

STEPS = 3
"""The optimizer's state is there from the second step on, and the pools have settled by the third."""


def steps_of(loop: str) -> int:
    """Of the optimizer, those of the probe included."""
    from memfit.jobs.training.trainer_engine import PROBE_STEPS

    return STEPS + PROBE_STEPS if loop == "memfit" else STEPS


def prepare_without_memory(workload: Workload, *, layers: int | None = None) -> Prepared:
    with torch.device("meta"):
        return prepare(workload, layers=layers)


def trace_steps(job: Prepared, platform: Platform = H200) -> Trace:
    """As `trace_job`, but the last step of a training is told by the one before it. Raises NotRepeating where it is
    not; the job has then run, and must be prepared anew."""
    if not job.workload.trains or is_replicated(job.workload):  # DDP makes its buckets anew in the second step
        return trace_job(job, platform)
    traced = trace_job(job, platform, steps=STEPS - 1)
    missing = last_step(traced, steps_of(job.workload.loop))
    return missing.of(traced) if missing else traced


def trace_job(
    job: Prepared, platform: Platform = H200, *, steps: int = STEPS, tokens: int | None = None,
    beside: Callable[[Tracer], AbstractContextManager[object]] = nullcontext,
) -> Trace:  # fmt: skip
    """`tokens` ends a generation early; the events at which tokens were done are in `facts`. What `beside` makes is
    entered inside the trace, around the job."""
    ends, here = 0, Trace()
    done: list[int] = []
    calls: list[Call] = []

    def run(tracer: Tracer) -> None:
        nonlocal ends, here, calls
        here, calls = tracer.trace, tracer.rule_calls.made
        phases = MarkedPhases(tracer, job)
        with beside(tracer), _in_parallel(tracer, job.workload), levers_counted(tracer):
            run_job(job, tracer.device, phases, steps=steps)
        ends = phases.ends

    work = job.workload
    table = padding_answers(_is_padded(work)) | rope_answers(job)
    if work.kind == "generate":
        from memfit.planning.generate_on_trace import generate_answers

        table |= generate_answers(tokens or work.new_tokens, lambda: done.append(len(here)), padded=_is_padded(work))
    around: AbstractContextManager[None] = nullcontext()
    if work.trains and work.loop != "plain":
        from memfit.planning.trainer_on_trace import TRAINER_ANSWERS, trainer_on_cuda

        table |= TRAINER_ANSWERS
        around = trainer_on_cuda()
    with around, kinds_in_order(job.model), failures_of_the_job():
        made = trace(run, platform=platform, answers=Answers(table))
    made.truncate(ends)  # what dies with the job's own variables dies after it
    if done:
        made.facts["tokens"] = done
    note(made, calls, job.model, tokens, work.seq_len)
    return made


def _in_parallel(tracer: Tracer, work: Workload) -> AbstractContextManager[None]:
    from memfit.planning.trainer_on_trace import fully_shard_by_accelerate

    if is_sharded(work):
        return fully_shard_traced(tracer) if work.loop == "plain" else fully_shard_by_accelerate(tracer)
    return ddp_traced(tracer) if is_replicated(work) else nullcontext()


def _is_padded(work: Workload) -> bool:
    if not work.trains or work.loop != "memfit":
        return work.padding
    from memfit.jobs.training.memfit_loop import pads

    return pads(work)


def padding_answers(padded: bool) -> dict[Site, Answer]:
    """Is the attention mask all ones? If so, transformers drops it, and the kernels without a mask run."""
    masks = "transformers/masking_utils.py"
    asking = (
        "_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa", "sdpa_mask", "flash_attention_mask",
        "create_recurrent_attention_mask",
    )  # fmt: skip
    return {Site(masks, function): not padded for function in asking}


def rope_answers(job: Prepared) -> dict[Site, Answer]:
    """Is the sequence longer than the positions that the model was first trained on?"""
    config = getattr(job.model, "config", None)
    longest = getattr(config, "max_position_embeddings", None) or 0
    original = getattr(config, "original_max_position_embeddings", None) or longest
    rope, length = "transformers/modeling_rope_utils.py", job.workload.seq_len
    return {
        Site(rope, "longrope_frequency_update"): length > original,
        Site(rope, "dynamic_frequency_update"): length > longest,
    }


class MarkedPhases:
    """Phases of a traced job become marks; what is moved while loading are the weights, under their own names."""

    def __init__(self, tracer: Tracer, job: Prepared) -> None:
        self.tracer = tracer
        self.model = job.model
        tracer.modules.know(job.model, "")  # whatever else will hold it
        self.ends = 0

    @contextmanager
    def __call__(self, name: str, step: int = 0) -> Iterator[None]:
        tracer = self.tracer
        tracer.trace.mark(name, step)
        before, tracer.default_category = tracer.default_category, "weights" if name == "load" else ""
        try:
            with self._inside(name):
                yield
        finally:
            tracer.default_category = before
        if name == "load":
            for path, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
                    tracer.name(tensor, path)  # room that many share, in turns, is nobody's
        self.ends = len(tracer.trace)

    def _inside(self, name: str) -> AbstractContextManager[None]:
        if name == "trainer":
            return phases_by_what_runs(self.tracer)
        if name == "generate":
            from memfit.planning.generate_on_trace import cache_labelled

            return cache_labelled(self.tracer)
        return nullcontext()
