"""A prepared job as a Trace: its own code, on the traced device, with its phases marked.

The Trainer and accelerate are made to believe in the traced device, and what they and `generate` ask of tensors is
answered for a run that does exactly what was asked for. Host memory is counted, and not taken.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn

from memfit.events import Trace
from memfit.extrapolation.streams import RuleCall
from memfit.gpus import find_gpu
from memfit.jobs.build import Prepared
from memfit.jobs.host import HostMemory
from memfit.jobs.run import run_job
from memfit.jobs.training.offload import host_memory_by
from memfit.jobs.workload import Workload
from memfit.planning.failures import failures_of_the_job
from memfit.planning.traced import HOST, UNMODELLED, record_trace
from memfit.platform import H200, Platform
from memfit.replay.alloc_config import AllocatorConfig
from memfit.tracing.answers import Answer, Answers, Site, Value
from memfit.tracing.distributed import OnHost, ddp_traced, fully_shard_traced
from memfit.tracing.own_code import OwnCodeNames, OwnCodeTracer
from memfit.tracing.pretended_card import card_pretended
from memfit.tracing.tracer import ONE_AT_A_TIME, Tracer, run_traced, trace

TRAINER_KNOWN: dict[Site, tuple[Value, str]] = {
    Site("transformers/trainer.py", "_run_epoch"): (False, "the loss is a finite number"),
    Site("transformers/trainer.py", "_maybe_log_save_evaluate"): (
        1.0,
        "the loss and the gradients' norm are logged as 1",
    ),
    Site("transformers/trainer.py", "_finalize_training"): (1.0, "the mean loss is returned as 1"),
    Site("transformers/trainer.py", "store_flos"): (1.0, "the work of all processes is logged as 1"),
}
"""What the Trainer asks of its tensors, whoever runs it, and what the answers mean."""
TRAINER_ANSWERS: dict[Site, Value] = {
    **{site: value for site, (value, _) in TRAINER_KNOWN.items()},
    Site("memfit/jobs/training/parallel.py", "all_well"): 0,  # the number of processes that ran out of memory
    Site("memfit/jobs/training/engine.py", "_probe"): True,  # is the gradients' norm finite?
    Site("memfit/jobs/training/engine.py", "drain_losses"): 1.0,  # the losses of steps, to be reported
    Site("memfit/jobs/training/engine.py", "<dictcomp>"): 1.0,  # the same, as Python before 3.12 calls it
}


TORCH_DEVICE = "ACCELERATE_TORCH_DEVICE"


@contextmanager
def trainer_on_cuda() -> Iterator[None]:
    """accelerate is told that there is a CUDA device: in traced code that is the traced device."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
    from transformers import training_args

    states = (AcceleratorState, GradientState, PartialState)
    cuda = torch.device("cuda")
    initialise, prepare_backend = Accelerator.__init__, PartialState._prepare_backend

    def initialise_for_cuda(self: Any, *args: Any, **kwargs: Any) -> None:
        """It refuses fp16 on devices that it does not know."""
        with mock.patch.object(Accelerator, "device", property(lambda _: cuda)):
            initialise(self, *args, **kwargs)

    def backend_for_cuda(self: Any, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
        """It looks for a card before it takes several processes for what they are."""
        many = torch.distributed.is_initialized()
        return ("nccl", DistributedType.MULTI_GPU) if many else prepare_backend(self, *args, **kwargs)

    def forget() -> None:
        for state in states:
            state._reset_state()

    forget()
    with ExitStack() as stack:
        stack.callback(forget)
        stack.enter_context(mock.patch.dict(os.environ, {TORCH_DEVICE: "cuda"}))
        for name in [name for name in os.environ if name.startswith("ACCELERATE_") and name != TORCH_DEVICE]:
            del os.environ[name]  # the plan is of its own settings, whatever the shell says
        stack.enter_context(mock.patch.object(training_args, "is_torch_bf16_gpu_available", lambda: True))
        stack.enter_context(mock.patch.object(Accelerator, "__init__", initialise_for_cuda))
        stack.enter_context(mock.patch.object(PartialState, "_prepare_backend", backend_for_cuda))
        for name in ("get_rng_state", "set_rng_state"):  # kept on the host, and nothing here is random
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, **__: torch.empty(0)))
        yield


@contextmanager
def fully_shard_by_accelerate(tracer: Tracer) -> Iterator[None]:
    """accelerate takes a model in host memory."""
    from accelerate import Accelerator

    prepare = Accelerator._prepare_fsdp2

    def prepare_from_host(self: Any, *args: Any) -> Any:
        with OnHost(tracer):
            return prepare(self, *args)

    with fully_shard_traced(tracer), mock.patch.object(Accelerator, "_prepare_fsdp2", prepare_from_host):
        yield


UTILS = "transformers/generation/utils.py"
LOGITS = "transformers/generation/logits_process.py"
CACHE = "transformers/cache_utils.py"


def generate_answers(tokens: int, on_token: Callable[[], None], *, padded: bool) -> dict[Site, Answer]:
    """`on_token` is called after each of them, when it is asked whether to go on."""
    return {
        Site(UTILS, "_prepare_special_tokens"): False,  # the padding token is no end token; end tokens are not negative
        Site(UTILS, "_get_logits_processor"): False,  # tokens are not negative
        Site(UTILS, "generate", "== 1).all()"): not padded,  # is the mask all ones? If so, 5.22 drops it
        Site(UTILS, "generate"): False,  # is there padding on the right?
        Site(UTILS, "__call__"): true_at(tokens, on_token),  # StopCheck: has every row ended?
        Site(UTILS, "_has_unfinished_sequences"): true_at(tokens, on_token),  # the same, before there was a StopCheck
        Site(UTILS, "_beam_search"): beam_search(tokens, on_token),
        Site(LOGITS, "__init__"): False,  # end tokens are not negative
        Site(CACHE, "reorder_cache"): True,  # there is something in a static cache when beams change places
    }


@contextmanager
def made_as(tracer: Tracer, category: str) -> Iterator[None]:
    """What is made inside is of this category, unless something else says what it is."""
    before, tracer.default_category = tracer.default_category, category
    try:
        yield
    finally:
        tracer.default_category = before


@contextmanager
def cache_labelled(tracer: Any) -> Iterator[None]:
    """What a layer of the key-value cache makes while it is updated is the cache."""
    from transformers import cache_utils

    def labelled(update: Callable[..., Any]) -> Callable[..., Any]:
        def update_labelled(*args: Any, **kwargs: Any) -> Any:
            with made_as(tracer, "kv_cache"):
                return update(*args, **kwargs)

        return update_labelled

    layers = [
        c for c in vars(cache_utils).values() if isinstance(c, type) and issubclass(c, cache_utils.CacheLayerMixin)
    ]
    with ExitStack() as stack:
        for layer in layers:
            for name in ("update", "lazy_initialization"):
                if name in vars(layer):
                    stack.enter_context(mock.patch.object(layer, name, labelled(vars(layer)[name])))
        yield


@contextmanager
def cache_labelled_by_calls(tracer: Any) -> Iterator[None]:
    """The same where the model is compiled: what its layers of the cache hold after each call of it."""
    from transformers import GenerationMixin

    follow = GenerationMixin._update_model_kwargs_for_generation

    def followed(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        layers = getattr(getattr(outputs, "past_key_values", None), "layers", ())
        for held in (each for layer in layers for each in vars(layer).values() if isinstance(each, torch.Tensor)):
            if (block := tracer.block_of(held)) is not None:
                tracer.trace.set_category(block, "kv_cache")
        return follow(self, outputs, *args, **kwargs)

    with mock.patch.object(GenerationMixin, "_update_model_kwargs_for_generation", followed):
        yield


def beam_search(count: int, on_token: Callable[[], None]) -> Callable[[torch.Tensor], Value]:
    """It asks for the padding token, a number, and whether some beam goes on, yes or no."""
    ended = true_at(count, on_token)
    return lambda tensor: not ended(tensor) if tensor.dtype == torch.bool else 0


def true_at(count: int, on_token: Callable[[], None]) -> Callable[[torch.Tensor], bool]:
    asked = 0

    def answer(_: torch.Tensor) -> bool:
        nonlocal asked
        asked += 1
        on_token()
        return asked >= count

    return answer


@contextmanager
def phases_by_what_runs(tracer: Any) -> Iterator[None]:
    """Of code that does not say its phases: forward, but inside `backward()` and an optimizer's `step()`, which ends a
    step."""
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    mark, step, depth = tracer.trace.mark, 1, 0

    def stepping(*_: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:  # an optimizer may have another one inside
            mark("step", step)

    def stepped(*_: Any) -> None:
        nonlocal step, depth
        depth -= 1
        if depth == 0:
            mark("zero", step)
            step += 1

    def around_backward(begins: bool) -> None:
        if not tracer.in_backward:  # reentrant checkpoints have passes of their own inside
            mark("backward" if begins else "step" if depth else "data", step)

    def entering(*_: Any) -> None:
        if tracer.modules.depth <= 1 and tracer.trace.marks[-1].phase not in ("forward", "backward"):
            mark("forward", step)

    mark("data", step)
    tracer.on_backward, tracer.on_call = around_backward, entering
    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(stepping).remove)
        stack.callback(register_optimizer_step_post_hook(stepped).remove)
        stack.callback(register_module_forward_pre_hook(entering).remove)
        yield
    tracer.on_backward, tracer.on_call = lambda begins: None, lambda: None


class OrderedSet(set[Any]):
    """A set that gives its members in the order in which they first came."""

    def __init__(self, members: Iterable[Any] = ()) -> None:
        self._came = tuple(dict.fromkeys(members))
        super().__init__(self._came)

    def __iter__(self) -> Iterator[Any]:
        return (each for each in self._came if each in self)


@contextmanager
def kinds_in_order(model: nn.Module) -> Iterator[None]:
    """In the code of transformers that `model` runs: it makes masks and rotary tables for each kind of layer in the
    order of a Python set of their names, which changes from process to process. A plan is the same in all of them; of
    two runs on a GPU one may peak a little higher than the other."""
    base = getattr(model, "get_base_model", lambda: model)()
    names = {"transformers.masking_utils", type(base).__module__}
    with ExitStack() as stack:
        for name in names & set(sys.modules):
            if name.startswith("transformers."):
                stack.enter_context(mock.patch.object(sys.modules[name], "set", OrderedSet, create=True))
        yield


class PlannedHost(HostMemory):
    def __init__(self, tracer: Tracer, *, pinned: bool = True, category: str = "") -> None:
        """Pinned memory is rounded up as torch does it. `category`: of what has its place here, while it is on the
        device."""
        super().__init__(tracer.device)
        self.pinned = pinned
        self._tracer, self._category = tracer, category

    def copied(self, on_device: torch.Tensor, name: str = "") -> None:
        if name:
            self._tracer.name(on_device, name)
        block = self._tracer.block_of(on_device)
        if block is not None and self._category:
            self._tracer.trace.set_category(block, self._category)

    def computing(self) -> AbstractContextManager[None]:
        return self._tracer.host_computes()

    def _made(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return self._tracer.host_empty(shape, dtype)


@contextmanager
def _levers_counted(tracer: Tracer, work: Workload) -> Iterator[None]:
    """What the levers of a training take of the host is written down, lever by lever."""
    if not work.offload:
        yield
        return
    hosts: dict[str, PlannedHost] = {}

    def make(device: torch.device, lever: str) -> HostMemory:
        return hosts.setdefault(lever, PlannedHost(tracer, pinned=False, category=lever))

    with host_memory_by(make):
        yield
    if hosts:
        tracer.trace.facts[HOST] = {lever: host.peak_bytes for lever, host in hosts.items()}


ADAPTER_ANSWERS: dict[Site, Answer] = {
    Site("peft/tuners/vblora/layer.py", "_get_lora_matrices"): False,  # are these adapters that were saved to be used?
}
LOADING = ("load", "decompress", "prepare", "adapt")
STEPS = 3
"""The optimizer's state is there from the second step on, and the pools have settled by the third."""


def steps_of(loop: str) -> int:
    """Of the optimizer, those of the probe included."""
    if loop != "memfit":
        return STEPS  # without the Trainer, which takes a second to import
    from memfit.jobs.training.engine import PROBE_STEPS

    return STEPS + PROBE_STEPS


def trace_job(
    job: Prepared,
    platform: Platform = H200,
    *,
    steps: int = STEPS,
    tokens: int | None = None,
    beside: Callable[[Tracer], AbstractContextManager[object]] = nullcontext,
) -> Trace:
    """`tokens` ends a generation early; the events at which tokens were done are in `facts`. What `beside` makes is
    entered inside the trace, around the job."""
    ends, here = 0, Trace()
    done: list[int] = []
    calls: list[RuleCall] = []

    def run(tracer: Tracer) -> None:
        nonlocal ends, here, calls
        here, calls = tracer.trace, tracer.rule_calls.made
        phases = MarkedPhases(tracer, job)
        with beside(tracer), _in_parallel(tracer, job.workload), _levers_counted(tracer, job.workload):
            run_job(job, "cuda" if by_values else tracer.device, phases, steps=steps)
        ends = phases.ends

    work = job.workload
    by_values = job.reads == "pictures and text"  # which tokens are pictures decides what runs
    table = padding_answers(work.is_padded) | rope_answers(job) | ADAPTER_ANSWERS
    if work.kind == "generate":
        table |= generate_answers(tokens or work.new_tokens, lambda: done.append(len(here)), padded=work.is_padded)
    around: AbstractContextManager[None] = nullcontext()
    if work.trains and work.loop != "plain":
        table |= TRAINER_ANSWERS
        around = trainer_on_cuda()
    with ONE_AT_A_TIME, around, kinds_in_order(job.model), failures_of_the_job():
        made = (_trace_by_values if by_values else trace)(run, platform=platform, answers=Answers(table))
    made.truncate(ends)  # what dies with the job's own variables dies after it
    if done:
        made.facts["tokens"] = done
    record_trace(made, calls, job.model, tokens, work.seq_len)
    return made


def _trace_by_values(run: Callable[[Any], None], *, platform: Platform, answers: Answers) -> Trace:
    """As a person's own code is traced: numbers that come from the host are known on the device too."""
    tracer = OwnCodeTracer(torch.device("meta"), platform, answers)
    names = OwnCodeNames(tracer)

    def run_on_card(_: OwnCodeTracer) -> None:
        with card_pretended(names, find_gpu("H200"), AllocatorConfig.parse("")):
            run(tracer)

    made = run_traced(run_on_card, tracer, names)
    made.facts[UNMODELLED] = list(tracer.unmodelled)
    return made


def _in_parallel(tracer: Tracer, work: Workload) -> AbstractContextManager[None]:
    if work.is_sharded:
        return fully_shard_traced(tracer) if work.loop == "plain" else fully_shard_by_accelerate(tracer)
    return ddp_traced(tracer) if work.is_replicated else nullcontext()


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
        self.model, self.use_cache, self.compiled = job.model, job.workload.use_cache, job.workload.is_compiled
        if isinstance(tracer, OwnCodeTracer):
            tracer.put_on_host([*job.model.parameters(), *job.model.buffers()], "cpu")
        self.weights = "" if job.workload.is_quantised else "weights"  # of what loading makes some is soon gone
        tracer.modules.know(job.model, "")  # whatever else will hold it
        self.ends = 0

    @contextmanager
    def __call__(self, name: str, step: int = 0) -> Iterator[None]:
        tracer = self.tracer
        tracer.trace.mark(name, step)
        with made_as(tracer, self.weights if name == "load" else ""), self._inside(name):
            yield
        if name in LOADING:
            for path, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
                    tracer.name(tensor, path)  # room that many share, in turns, is nobody's
        self.ends = len(tracer.trace)

    def _inside(self, name: str) -> AbstractContextManager[None]:
        if name == "trainer":
            return phases_by_what_runs(self.tracer)
        if name == "generate" or (name == "forward" and self.use_cache):
            return (cache_labelled_by_calls if self.compiled else cache_labelled)(self.tracer)
        return nullcontext()
