"""A workload in, a plan out: trace the job, replay it, ask whether it fits.

>>> plan = predict(kind="lora", model="qwen2.5-7b", batch_size=1, seq_len=1536, rank=128,
...                grad_checkpointing=True, gpu="24GiB")           # doctest: +SKIP
>>> plan.peak.device_bytes, plan.verdict                           # doctest: +SKIP
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from memfit.analysis.advice import WORTH, Advice
from memfit.analysis.stacks import lines_alive
from memfit.analysis.summary import Summary, summarise_plan
from memfit.analysis.verdict import (
    RANGE,
    Fit,
    Verdict,
    card_document,
    fit_card,
    limit_note,
    needed_with_room,
    smallest_card,
)
from memfit.errors import UsageError
from memfit.events import Trace
from memfit.extrapolation.reused import FLUSH, SAID, WORKSPACE_BY_RULE
from memfit.files import no_collector
from memfit.gpus import Context, Gpu, find_gpu, l2_note
from memfit.guides.claims import pruning_formulas
from memfit.jobs.together import check_inputs, without_effect
from memfit.jobs.workload import Workload
from memfit.planning.traced import HOST, MANAGED, UNMODELLED, Provenance, Traced, trace_workload, tracing_more
from memfit.platform import platform_of
from memfit.render.shown import NO_BF16, NOT_MODELLED, Shown
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.replay import Replay, Replays
from memfit.replay.timeline import Timeline
from memfit.units import format_bytes, gib
from memfit.versions import outside_tested, versions

SCHEMA = "memfit.plan/1"
OUTPUTS = {
    "kept": "the loop's variable keeps the model's outputs, logits too, until the next forward pass has ended",
    "dropped": "the model's outputs are dropped once there is a loss",
}
HOST_WORDS = {
    "weights": "frozen weights", "optimizer": "weights and gradients for the optimizer", "activations": "activations",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Peak:
    """allocated = live blocks; reserved = held from the driver; device = what must fit: reserved + context, and what
    the card may yet decide to take."""

    allocated_bytes: int
    reserved_bytes: int
    context_bytes: int
    """The upper end, where it is not measured on this card."""
    device_bytes: int


COLLECTED = (
    f"{NOT_MODELLED} garbage_collection_threshold under per_process_memory_fraction: torch gives old idle segments back"
    " early, so less may be reserved than told"
)


@dataclass(frozen=True, kw_only=True)
class Plan(Shown):
    """What is predicted of a job. `print(plan)` shows all of it, `to_json()` is the same for programs."""

    workload: dict[str, Any]
    model: str
    parameters: int
    trainable_parameters: int
    gpu: Gpu | None
    peak: Peak
    context: Context
    report: Summary
    fit: Fit | None
    smallest_gpu_bytes: int
    how: Provenance
    notes: tuple[str, ...]
    seconds: float
    trace: Trace
    timeline: Replay
    id: object = None
    duration: dict[str, Any] | None = None
    """How long it takes, where somebody has estimated it (`fitting/durations.py`): predicting memory does not."""
    stored: dict[str, Any] | None = None
    """How the checkpoint itself is quantised, if it is."""
    job_file: dict[str, Any] | None = None
    """Of a job that was read from another tool's file: what became of each key (`jobfiles/file.py`)."""
    advice: tuple[Advice, ...] | None = None
    """What a person's own code could do to take less; None for memfit's own jobs, which have `memfit fit`."""

    @property
    def verdict(self) -> Verdict | None:
        return self.fit.verdict if self.fit else None

    @property
    def needed_bytes(self) -> int:
        """What a card must have for this job; where torch must give back what is idle to fit, that is the smallest card
        that runs it: a cache fills whatever there is."""
        if self.fit is None:
            return self.peak.device_bytes
        if self.fit.verdict == "fails":
            return self.smallest_gpu_bytes
        return min(self.smallest_gpu_bytes, self.fit.device_bytes) if self.fit.retries else self.fit.device_bytes

    @property
    def headroom_bytes(self) -> int | None:
        """What the job leaves of the card."""
        return None if self.fit is None else self.fit.capacity_bytes - self.needed_bytes

    def __repr__(self) -> str:
        on = f" on {self.gpu.name}: {self.verdict}" if self.gpu else ""
        return f"<Plan: {self.workload['kind']} of {self.model}, {gib(self.peak.device_bytes)}{on}>"

    def to_json(self) -> dict[str, Any]:
        """The contract that other tools read (memfit.plan/1)."""
        at = self.report.at_peak
        beside = self._beside()
        if self.advice is not None:
            lines = lines_alive(self.timeline, self.report.labels, self.report.alive)
            beside |= {"lines": [asdict(each) for each in lines], "advice": [asdict(each) for each in self.advice]}
        return {
            "schema": SCHEMA,
            "id": self.id,
            **({} if self.job_file is None else {"from": self.job_file}),
            "workload": self.workload,
            "model": {
                "name": self.model, "parameters": self.parameters, "trainable_parameters": self.trainable_parameters,
                **({} if self.stored is None else {"stored": self.stored}),
            },
            "gpu": None if self.gpu is None else card_document(self.gpu.name, self.gpu.capacity_bytes, self.fit),
            "peak": asdict(self.peak),
            **({"range": self.trace.facts[RANGE]} if RANGE in self.trace.facts else {}),
            "context": asdict(self.context),
            "at_peak": {"phase": at.phase, "step": at.step, "module": at.module, "op": at.op},
            "breakdown": self.report.breakdown,
            "phases": [phase.to_json() for phase in self.report.phases],
            "verdict": self.verdict,
            "headroom_bytes": self.headroom_bytes,
            "retries": self.fit.retries if self.fit else None,
            "failed_at": self.fit.failed_at if self.fit else None,
            "smallest_gpu_bytes": self.smallest_gpu_bytes,
            "largest": [asdict(group) for group in self.report.largest],
            **beside,
            "duration": self.duration,
            "how": self.how.to_json(),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }  # fmt: skip

    def _beside(self) -> dict[str, Any]:
        """What is in host memory; of pruning also what rules of thumb would have said of the device."""
        facts = self.trace.facts
        if self.workload.get("kind") != "prune":
            return {"host": facts["host"]} if facts.get("host") else {}
        formulas = pruning_formulas(self.workload, self.parameters, facts.get("hidden_size", 0))
        return {"host": facts.get("host"), "placement": facts.get("placement"), "guides": formulas}


def predict(
    workload: Workload | None = None,
    *,
    gpu: str | Gpu | None = None,
    id: object = None,
    trace_cache: bool = True,
    stacks: bool = False,
    few: bool = False,
    **settings: Any,
) -> Plan:
    """Predict a job's memory without a GPU.

    Settings are those of `memfit plan`, with underscores: `kind` and `model` at least, `gpu` for a verdict. Those given
    beside a workload replace its own. `trace_cache=False` neither reads nor keeps a trace (`planning/cache.py`).
    `stacks=True` keeps the lines of code in `plan.trace`, which is then traced anew. `few=True` traces this batch size
    and length alone, where one of many would have others traced to be told by."""
    started = time.perf_counter()
    work = Workload.asked(workload, settings)
    card = None if gpu is None else find_gpu(gpu)
    if work.alloc_conf:
        AllocatorConfig.parse(work.alloc_conf)  # what is wrong with it is told before torch is loaded
    refuse_unfit_card(work, card)
    if not work.padding:  # which is common, and would have to ask transformers
        check_inputs(work)
    traced = trace_workload(_within(work, card), platform_of(card), cached=trace_cache, few=few, stacks=stacks)
    asked, work = work, traced.workload
    if work.max_gpu_memory != asked.max_gpu_memory:
        work = work.with_found(max_gpu_memory=asked.max_gpu_memory)
    return plan_of(
        traced,
        work,
        card,
        workload=work.document() | {"gpu": gpu if isinstance(gpu, str) else None},
        notes=(*_assumptions(work, card, traced.how), *_learned(traced)),
        started=started,
        id=id,
        stored=None if work.stored is None else work.stored.to_json(),
    )


def plan_of(traced: Traced, work: Workload, card: Gpu | None, **rest: Any) -> Plan:
    """`work`: as it was asked for, with what the tracing found."""
    return assess(
        traced.trace,
        AllocatorConfig.parse(work.alloc_conf),
        card,
        context_of(work, card),
        model=traced.model,
        parameters=traced.parameters,
        trainable_parameters=traced.trainable_parameters,
        how=traced.how,
        **rest,
    )


def tracing_more_for(work: Workload, gpu: str | None) -> Iterator[None]:
    """After a plan of `few`, while nobody waits: each step is a trace by which like plans will be told."""
    card = None if gpu is None else find_gpu(gpu)
    return tracing_more(_within(work, card), platform_of(card))


LEAST_ARCH = {"fp8": (8, 9), "mxfp4": (7, 5), "torchao-int4": (8, 0), "int8": (7, 5)}
"""The oldest cards whose kernels take such weights: transformers 5, torchao and bitsandbytes say so themselves."""


def refuse_unfit_card(work: Workload, card: Gpu | None) -> None:
    """Weights for which the card has no kernels, or that `memfit train` refuses on it."""
    if card is None or not work.is_quantised or work.quant == "dequantize":
        return
    if work.trains and work.loop == "memfit" and work.has_bf16 and card.arch < (8, 0):
        raise work.refusal_without_bf16(card.name)
    what: str = work.quant
    if work.stored is not None and what == "none":
        what = work.stored.kind if work.stored.method == "bitsandbytes" else work.stored.method
    least = LEAST_ARCH.get(what)
    if least is not None and card.arch < least:
        raise UsageError(
            f"{what} weights need a card of compute capability {least[0]}.{least[1]}, and {card.name} has "
            f"{card.arch[0]}.{card.arch[1]}",
            hint="--quant dequantize: transformers makes them 16-bit there"
            if work.stored is not None and what != "int8"
            else "--quant nf4",
        )


def _learned(traced: Traced) -> Iterator[str]:
    """What the tracing found out, and beside it what people's formulas would have said."""
    work, facts = traced.workload, traced.trace.facts
    yield from not_modelled(facts.get(UNMODELLED, ()))
    yield from facts.get(SAID, ())
    yield from _host_notes(work, facts)
    yield from traced.notes
    if work.kind == "prune":
        for each in pruning_formulas(work.settings(), traced.parameters, facts.get("hidden_size", 0)):
            yield f"the {each['guide']}'s formula says {each['gib']:.2f} GiB: {each['off']}"


def not_modelled(ops: Iterable[str]) -> Iterator[str]:
    if names := ", ".join(name.lstrip("_") for name in ops):
        yield f"{NOT_MODELLED} what the kernels of {names} take beside their results: the peak may be higher"


def _host_notes(work: Workload, facts: Mapping[str, Any]) -> Iterator[str]:
    host: dict[str, int] = dict(facts.get(HOST, {})) if work.trains else {}
    if managed := host.pop(MANAGED, 0):
        yield (
            f"{format_bytes(managed)} of paged states lie in managed memory, which moves between host and GPU as there"
            " is room: neither allocated nor reserved"
        )
    elif work.is_paged:
        yield "no trained weight has 100,000 entries: the paged optimizer has all states on the GPU, no managed memory"
    if "activations" in work.offload and work.trains and not host.get("activations"):
        yield "--offload activations moves nothing: none that is kept has 1 MiB or more"
        return
    if not host:
        return
    parts = ", ".join(f"{HOST_WORDS[lever]} {format_bytes(count)}" for lever, count in host.items())
    yield f"host memory: {format_bytes(sum(host.values()))} pinned ({parts})"
    if "optimizer" in host:  # two moments, as many bytes as a weight and its gradient
        yield f"host memory for AdamW's moments: {format_bytes(host['optimizer'])}, not pinned"
    if "weights" in host:
        yield "of the frozen weights, those of two blocks, the embedding and the head are on the GPU"


def context_of(work: Workload, card: Gpu | None) -> Context:
    """What CUDA itself takes once the job has run."""
    fused = work.attention == "sdpa" and work.precision != "fp32"
    return context_on(card, training=work.trains, flash=fused)


def context_on(card: Gpu | None, *, training: bool, flash: bool) -> Context:
    """As on the H200 where no card is named."""
    found = (card or find_gpu("H200")).context_after(training=training, flash=flash)
    return found if card is not None else dataclasses.replace(found, basis="assumed", source="as on the H200")


def _within(work: Workload, card: Gpu | None) -> Workload:
    """Pruning goes by what is free, which on an idle card is all but the context."""
    if work.kind != "prune" or card is None or work.max_gpu_memory is not None:
        return work
    context = card.context_after(training=False, flash=work.precision != "fp32")
    return work.with_found(max_gpu_memory=f"{max(card.capacity_bytes - context.high_bytes, 1)}B")


def assess(
    trace: Trace,
    config: AllocatorConfig,
    gpu: Gpu | None,
    context: Context,
    *,
    started: float,
    how: Provenance,
    notes: tuple[str, ...],
    **rest: Any,
) -> Plan:
    """Replay a labelled trace, with room and with the card's capacity."""
    replays = Replays(trace, config)
    with no_collector():  # thousands of blocks that refer to each other, all of which go at once
        timeline = replays.ample
        peak = peak_of(replays, context)
        smallest = smallest_card(replays, context.high_bytes)
        fit = None if gpu is None else fit_card(replays, gpu.capacity_bytes, context.high_bytes)
    if fit and fit.retries and fit.verdict != "fails":
        times = "once" if fit.retries == 1 else f"{fit.retries} times"
        notes = (f"fits only because torch gives cached memory back {times}: each is a pause", *notes)
    if fit and gpu and fit.capacity_bytes < gpu.capacity_bytes:
        notes = (limit_note(fit.capacity_bytes), *notes)
        if config.garbage_collection_threshold:
            notes = (COLLECTED, *notes)
    notes = (*_told_by_rule(timeline), *notes)
    if FLUSH in trace.names:
        notes = (*notes, l2_note(gpu))
    if strange := ", ".join(outside_tested(versions())):
        notes = (f"traced with versions that memfit was not tested with: {strange}", *notes)
    return Plan(
        gpu=gpu,
        context=context,
        how=how,
        peak=peak,
        report=summarise_plan(timeline),
        fit=fit,
        smallest_gpu_bytes=smallest,
        notes=notes,
        seconds=time.perf_counter() - started,
        trace=trace,
        timeline=timeline,
        **rest,
    )


def _told_by_rule(timeline: Timeline) -> Iterator[str]:
    trace = timeline.trace
    if WORKSPACE_BY_RULE not in trace.names:
        return
    op = trace.name_id(WORKSPACE_BY_RULE)
    there = timeline.lives.alive_at(timeline.peak_event).tolist()
    held = sum(trace.requested[block] for block in there if trace.op_of[block] == op)
    if held > timeline.peak_allocated * WORTH:
        yield (
            f"{NOT_MODELLED} the kernel that cuDNN takes for a convolution at the peak: {format_bytes(held)} of it are"
            " its workspace as a rule tells it, and on the card it may be nothing or several times that"
        )


def judged_anew(plan: Plan) -> Plan:
    """With what has become known of its trace since."""
    replays = Replays(plan.trace, AllocatorConfig.parse(plan.workload["alloc_conf"]))
    beside = plan.context.high_bytes
    fit = None if plan.gpu is None else fit_card(replays, plan.gpu.capacity_bytes, beside)
    smallest = smallest_card(replays, beside)
    return dataclasses.replace(plan, peak=peak_of(replays, plan.context), fit=fit, smallest_gpu_bytes=smallest)


def peak_of(replays: Replays, context: Context) -> Peak:
    return Peak(
        allocated_bytes=replays.ample.peak_allocated,
        reserved_bytes=replays.ample.peak_reserved,
        context_bytes=context.high_bytes,
        device_bytes=needed_with_room(replays, context.high_bytes),
    )


def _of_processes(work: Workload) -> Iterator[str]:
    if work.world_size == 1:
        return
    yield f"one process of {work.world_size}, the first; what NCCL keeps for itself is not counted"
    if work.parallel == "ddp":
        reduced = "before the last micro-step no gradients are reduced (no_sync); " if work.grad_accum > 1 else ""
        yield f"{reduced}DDP makes its buckets anew before the second step"
        return
    policy = "; fp32 shards, bf16 weights gathered, gradients reduced in fp32" if work.autocast_type == "bf16" else ""
    own = f"each block and then the whole are sharded{policy}"
    how = own if work.loop == "plain" else "as accelerate shards a model"
    yield f"FSDP2: {how}; gathered weights go after each forward, gradients are reduced in every micro-step"


RULES_OF = {"bitsandbytes": "0.50", "torchao": "0.18"}
"""Whose layers, kernels and optimizers the rules were read from."""


def _of_quantised(work: Workload) -> Iterator[str]:
    """What a plan takes for granted of quantised weights and of small or paged states."""
    optimizer, quant = str(work.optimizer) if work.trains else "", work.quant if work.is_quantised else "none"
    paged = optimizer.startswith("paged")
    used = {
        "bitsandbytes": quant in ("nf4", "fp4", "int8") or paged or optimizer.endswith("8bit"),
        "torchao": quant.startswith("torchao-") or optimizer.endswith("torchao"),
    }
    for package in (name for name, here in used.items() if here):
        here, seen = versions().get(package), RULES_OF[package]
        of = f"; {here} is installed here" if here and not here.startswith(seen) else ""
        yield f"{package} {seen} by its shapes and rules, its own code does not run{of}"
    if quant not in ("none", "dequantize") and work.stored is None:
        yield "from_pretrained quantises weight after weight on the GPU; embedding, head and norms are not quantised"
    if optimizer.endswith("torchao"):
        yield "its compiled step with kernels that were tuned before: tuning takes the card's L2 cache more, once"
    if quant == "torchao-int4":
        yield "Int4WeightOnlyConfig packs tiles (tile_packed_to_4d), in groups of 128; other formats need mslk"
    if work.kind == "lora" and work.is_quantised and (quant != "dequantize" or work.is_kbit_prepared):
        done = "makes every 16-bit weight fp32 (--no-kbit-prepare)" if work.casts_when_prepared else "casts no weight"
        yield f"prepare_model_for_kbit_training {done if work.is_kbit_prepared else 'is not called'}"
    if quant == "int8":
        yield "no column of the activations stands out (beyond 6): those that do take some more"


def _assumptions(work: Workload, gpu: Gpu | None, how: Provenance) -> tuple[str, ...]:
    kernels = "kernels of " if work.is_compiled else ""
    measured = f"predicted, not measured: {kernels}torch 2.11, CUDA 13.0, no other process on the card"
    notes = [*without_effect(work), measured, how.in_words()]
    if work.precision == "fp16":
        notes.append("fp16 has two bytes, as bf16 has")
    if gpu is None:
        notes.append("no --gpu given: kernels and context as on the H200")
    else:
        notes.extend(gpu.notes)
        if gpu.arch < (8, 0) and work.has_bf16:
            emulated = "torch emulates it, slowly, and some libraries refuse"
            notes.insert(0, f"{NO_BF16} {gpu.name}: {emulated}; {work.without_bf16}")
    if work.trains:
        rows = "rows of unequal length" if work.padding else "no padding"
        probe = "the probe and " if work.loop == "memfit" else ""
        notes.append(f"{probe}three optimizer steps of full batches, {rows}; data loading and checkpoints are left out")
        if work.loop == "plain":
            notes.append(OUTPUTS[str(work.outputs)])
        notes.extend(_of_processes(work))
    by_itself = work.loop != "plain" or work.checkpointing != "none"  # it is off then, whatever the config says
    if not work.use_cache and (work.kind == "forward" or (work.trains and not by_itself)):
        notes.append("config.use_cache is off: keys and values are not kept beside the logits (--use-cache)")
    if work.kind == "lora":
        notes.append("adapters as peft makes them; the base model is frozen")
    notes.extend(_of_quantised(work))
    if work.kind == "prune":
        notes.append("pruning alone: evaluation and zero-shot tasks are left out")
    return tuple(notes)
