"""`memfit.trace`: the memory of a person's own code, on their own module, without a GPU.

    def step():
        model = MyModel().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            loss = model(torch.randn(8, 128, device="cuda")).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    print(memfit.trace(step, gpu="RTX 4090"))

The code runs as it is, but for the device: "cuda" there is a device without memory. Phases are told from what runs:
forward until `backward()`, the optimizer's `step()`, and so on.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock
from weakref import WeakKeyDictionary

from memfit.analysis.advice import advise
from memfit.analysis.stacks import is_own
from memfit.analysis.verdict import RANGE
from memfit.errors import TraceError, UsageError
from memfit.events import Action, Trace
from memfit.extrapolation.reused import COMPILED, SAID
from memfit.gpus import Gpu, find_gpu
from memfit.planning.failures import failures_of_the_job
from memfit.planning.on_trace import phases_by_what_runs
from memfit.planning.predict import Plan, assess, context_on, judged_anew, not_modelled
from memfit.planning.traced import Provenance, label
from memfit.replay.alloc_config import AllocatorConfig

if TYPE_CHECKING:
    from memfit.tracing.own_code import OwnCodeTracer

LineAnswer = bool | int | float | Literal["even"]


def trace_own_code(
    fn: Callable[[], object],
    *,
    gpu: str | Gpu | None = None,
    alloc_conf: str = "",
    name: str | None = None,
    answers: Mapping[tuple[str, str], LineAnswer] | None = None,
) -> Plan:
    """Trace `fn` and report as `memfit plan` does. `answers` gives the values of tensors that the code asks for, by
    the end of the file's path and the function that asks; "even" where it chooses, as a router chooses experts."""
    _check_function(fn)

    def plan() -> Plan:
        return trace_code(
            lambda _: fn(),
            gpu=gpu,
            alloc_conf=alloc_conf,
            name=name or str(getattr(fn, "__name__", "function")),
            answers=_checked(answers),
            workload={"kind": "own-code", "function": getattr(fn, "__qualname__", repr(fn)), "alloc_conf": alloc_conf},
        )

    return larger_of_both(plan)


def larger_of_both(plan: Callable[[], Plan]) -> Plan:
    """Where the card would decide whether products are padded, both are planned."""
    first = plan()
    from memfit.planning.padded import larger_of_two  # torch is there by now
    from memfit.tracing.compiled.padding import PADS

    if PADS not in first.notes:
        return first
    larger, ends, said = larger_of_two(first, plan, lambda made: made.trace)
    if ends is not None:
        larger.trace.facts[RANGE] = ends
        larger = judged_anew(larger)
    return dataclasses.replace(larger, notes=(said, *larger.notes))


def trace_code(
    code: Callable[[Any], object],
    *,
    gpu: str | Gpu | None,
    alloc_conf: str,
    name: str,
    workload: dict[str, Any],
    answers: Mapping[tuple[str, str], LineAnswer] | None = None,
    more_notes: Callable[[], tuple[str, ...]] = tuple,
    drops_gradients: bool = False,
) -> Plan:
    """`code` gets the tracer; `more_notes` is asked when it has run. `drops_gradients`: as if the code never kept
    gradients that it zeroes."""
    import torch

    from memfit.planning.on_trace import TRAINER_KNOWN
    from memfit.platform import platform_of
    from memfit.tracing.answers import ALL_HAVE_ROWS, NO_OVERFLOW, Answer, Answers, Site
    from memfit.tracing.own_code import OwnCodeTracer
    from memfit.tracing.python_stacks import keeping_stacks
    from memfit.tracing.repeated.passes import CallDiffers
    from memfit.tracing.tracer import check_not_nested

    started = time.perf_counter()
    card = None if gpu is None else find_gpu(gpu)
    config = AllocatorConfig.parse(alloc_conf)
    check_not_nested()
    for skips in (True, False):
        given: dict[Site, Answer] = {Site(*place): value for place, value in (answers or {}).items()}
        table = Answers(given | ALL_HAVE_ROWS, known=NO_OVERFLOW | TRAINER_KNOWN)
        with keeping_stacks():
            tracer = OwnCodeTracer(torch.device("meta"), platform_of(card), table)
        parameters: dict[str, int] = {"all": 0, "trainable": 0}
        try:
            made = _run_traced(code, tracer, card or find_gpu("H200"), config, parameters,
                               drops_gradients=drops_gradients, skips=skips)  # fmt: skip
            break
        except CallDiffers:
            continue
    if tracer.alloc_conf is not None:
        config, workload = AllocatorConfig.parse(tracer.alloc_conf), {**workload, "alloc_conf": tracer.alloc_conf}
    how = Provenance()
    notes = (
        *not_modelled(tracer.unmodelled),
        *made.facts.pop(SAID, ()),
        *more_notes(),
        f"predicted, not measured: traced with torch {torch.__version__}, kernels of 2.11",
        how.in_words(),
        *(card.notes if card else ()),
        *{**table.told, **tracer.assumed},
    )
    trains = any(mark.phase == "backward" for mark in made.marks)
    plan = assess(
        made,
        config,
        card,
        context_on(card, training=trains, flash=tracer.loads_fused_attention),
        started=started,
        how=how,
        notes=notes,
        model=name,
        parameters=parameters["all"],
        trainable_parameters=parameters["trainable"],
        workload=workload,
    )
    return dataclasses.replace(plan, advice=advise(plan.timeline, plan.report.labels, config))


def _run_traced(
    code: Callable[[Any], object],
    tracer: OwnCodeTracer,
    card: Gpu,
    config: AllocatorConfig,
    parameters: dict[str, int],
    *,
    drops_gradients: bool,
    skips: bool,
) -> Trace:
    """Labelled. Weights are counted as they are met."""
    from memfit.tracing.held import noting_what_is_held
    from memfit.tracing.outside import nothing_saved, put_back
    from memfit.tracing.own_code import OwnCodeNames
    from memfit.tracing.packages.bitsandbytes import bitsandbytes_traced
    from memfit.tracing.packages.cuda_extensions import kernels_not_compiled
    from memfit.tracing.packages.matching import matching_of_unknown_costs
    from memfit.tracing.packages.torchscript import torchscript_traced
    from memfit.tracing.pretended_card import card_pretended
    from memfit.tracing.processes import processes_pretended
    from memfit.tracing.repeated.passes import repeated_calls_skipped
    from memfit.tracing.stored import SavedThings, files_read_as_shapes, large_weights_without_memory
    from memfit.tracing.tracer import ONE_AT_A_TIME, run_traced
    from memfit.tracing.unknown import mathematics_of_unknown_numbers

    names, saved = OwnCodeNames(tracer), SavedThings(tracer)

    def run(_: OwnCodeTracer) -> None:
        with (
            card_pretended(names, card, config, is_own),
            processes_pretended(tracer),
            phases_by_what_runs(tracer),
            noting_what_is_held(tracer, is_own, drops_gradients=drops_gradients),
            _parameters_named(tracer, parameters),
            nothing_saved(tracer.assume, tracer.after_import, saved.keep),
            files_read_as_shapes(tracer, saved),
            large_weights_without_memory(tracer),
            _generation_goes_on(tracer),
            mathematics_of_unknown_numbers(tracer.assume),
            repeated_calls_skipped(names, is_own) if skips else nullcontext(),
            bitsandbytes_traced(tracer),
            matching_of_unknown_costs(tracer),
            torchscript_traced(tracer, is_own),
            kernels_not_compiled(tracer),
        ):
            code(tracer)

    with ONE_AT_A_TIME, put_back(tracer.owns), _saved_is_missed(tracer), failures_of_the_job():
        made = run_traced(run, tracer, names)
    made.facts.pop(COMPILED, None)
    if Action.ALLOC not in made.actions:
        raise TraceError(
            "the traced code put nothing on the GPU",
            hint='move the model and its inputs to "cuda" inside it: model.cuda(), torch.randn(8, 128, device="cuda")',
        )
    label(made)
    return made


@contextmanager
def _saved_is_missed(tracer: Any) -> Iterator[None]:
    """A file that the code wanted to read back may be one that was left out here: then that is no fault of the code."""
    from memfit.tracing.outside import LEFT_OUT

    try:
        yield
    except TraceError as error:
        if isinstance(error.__cause__, (FileNotFoundError, EOFError)) and LEFT_OUT in tracer.assumed:
            raise TraceError(
                f"memfit does not cover code that reads back what it has saved: {error.message}",
                hint=f"{error.hint}: in a trace no checkpoint is written",
            ) from error.__cause__
        raise


def _check_function(fn: object) -> None:
    if not callable(fn):
        raise UsageError(f"memfit.trace takes a function, not {fn!r}", hint="memfit.trace(step), without brackets")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        raise UsageError(
            f"calling {getattr(fn, '__name__', fn)} runs none of its code: it is a coroutine or a generator",
            hint="trace a function that runs it to its end",
        )
    try:
        inspect.signature(fn).bind()
    except TypeError as error:
        raise UsageError(
            f"memfit.trace calls the function without arguments: {error}", hint="lambda: step(model)"
        ) from None
    except ValueError:  # not every callable has a signature
        pass


def _checked(answers: Mapping[tuple[str, str], LineAnswer] | None) -> Mapping[tuple[str, str], Any]:
    places = {} if answers is None else answers
    fine = isinstance(places, Mapping) and all(
        isinstance(place, tuple)
        and len(place) == 2
        and (value == "even" or (isinstance(value, (bool, int, float)) and not math.isnan(value)))
        for place, value in places.items()
    )
    if not fine:
        raise UsageError(f"answers {answers!r} has another form", hint='answers={("train.py", "function"): value}')
    return places


FUSED_NOTE = (
    "nn.TransformerEncoderLayer and nn.MultiheadAttention in eval mode are planned by their plain path; the fused one"
    " that a GPU takes without gradients was measured to differ by 1 %"
)


@contextmanager
def _generation_goes_on(tracer: Any) -> Iterator[None]:
    """Which token comes next is not known, so none is taken for the end, and some beam may yet become the best."""
    import sys

    import torch

    def never_ending(ends: Callable[..., Any]) -> Callable[..., Any]:
        def goes_on(*args: Any, **kwargs: Any) -> Any:
            found = ends(*args, **kwargs)
            if tracer.values.read(found) is None:
                tracer.assume("generate: no end token comes before the longest length that the code allows")
                tracer.values.put(found, torch.zeros((), dtype=torch.bool))
            return found

        return goes_on

    def until_the_longest(unfinished: Callable[..., Any]) -> Any:
        def goes_on(may_improve: Any, finished: Any, at_the_end: Any, *more: Any) -> Any:
            found = unfinished(may_improve, finished, at_the_end, *more)
            ended = tracer.values.read(at_the_end)
            if tracer.values.read(found) is None and ended is not None:
                tracer.assume("beam search: beams are compared up to the longest length that the code allows")
                tracer.values.put(found, torch.tensor(not bool(ended.all()), device="cpu"))
            return found

        return staticmethod(goes_on)

    def of_the_longest(flatten: Callable[..., Any]) -> Any:
        def flattened(tensor: Any) -> Any:
            flat = flatten(tensor)
            each_tokens_beam = tensor.ndim == 3 and tensor.dtype == torch.int32
            if each_tokens_beam and tracer.owns(flat) and tracer.values.read(flat) is None:
                tracer.values.put(flat, torch.zeros(flat.shape, dtype=flat.dtype, device="cpu"))  # -1: no such token
            return flat

        return staticmethod(flattened)

    places = {
        ("stopping_criteria", "EosTokenCriteria", "__call__"): never_ending,
        ("utils", "GenerationMixin", "_beam_search_has_unfinished_sequences"): until_the_longest,
        ("utils", "GenerationMixin", "_flatten_beam_dim"): of_the_longest,
    }
    with ExitStack() as stack:

        def patch() -> None:
            for place, changed in tuple(places.items()):
                module, kind, name = place
                there = getattr(sys.modules.get(f"transformers.generation.{module}"), kind, None)
                if (function := getattr(there, name, None)) is not None:
                    del places[place]
                    stack.enter_context(mock.patch.object(there, name, changed(function)))
            if not places and patch in tracer.after_import:
                tracer.after_import.remove(patch)

        tracer.after_import.append(patch)
        patch()
        yield


@contextmanager
def _parameters_named(tracer: Any, counts: dict[str, int]) -> Iterator[None]:
    """Weights are known when their module first runs."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    seen: set[int] = set()
    counted: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
    """By module: an optimizer may give a weight other memory with each step."""

    def note(module: Any, _: Any) -> None:
        if (
            isinstance(module, (torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention))
            and not module.training
            and not torch.is_grad_enabled()
        ):
            tracer.assume(FUSED_NOTE)
        compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for each in module.modules() if compiled else (module,):  # those inside compiled code are never called
            name_weights(each)

    def name_weights(module: Any) -> None:
        path, names = tracer.modules.name_of(module), counted.setdefault(module, set())
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if name_weight(tensor, f"{path}.{name}" if path else name, is_new=name not in names):
                names.add(name)

    def name_weight(tensor: Any, path: str, *, is_new: bool = True) -> bool:
        block = tracer.block_of(tensor)
        if block is None or block in seen:
            return False
        seen.add(block)
        tracer.trace.set_category(block, "weights")
        tracer.name(tensor, path)
        if is_new and isinstance(tensor, torch.nn.Parameter):
            stands_for = _numbers_of(tensor)
            counts["all"] += stands_for
            counts["trainable"] += stands_for * tensor.requires_grad
        return True

    handle, tracer.on_weight = register_module_forward_pre_hook(note), name_weight
    try:
        yield
    finally:
        handle.remove()


def _numbers_of(weight: Any) -> int:
    """Weights of 4 bits lie packed, and bitsandbytes keeps the shape of what they stand for beside them."""
    shape = getattr(getattr(weight, "quant_state", None), "shape", None)
    return math.prod(shape or weight.shape)
