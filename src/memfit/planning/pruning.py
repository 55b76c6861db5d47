"""`plan prune`: the pruning engine itself, traced; and beside it what the public Wanda code would take.

Blocks are pruned one after the other in the same memory, and micro-batches run one after the other, so few of each tell
all: four units of blocks (a unit is one block, or one period of a pattern) and a handful of micro-batches are traced.
That the others repeat them is proved on the trace: the two inner units have the same events, and so have two inner
micro-batches of every pass, with nothing that outlives them. What is done again and again from the same state takes the
same memory again and again. Where the proof fails, all is traced.

The public Wanda code holds all weights and two buffers of all hidden states; one window at a time goes through a block,
and a matrix's scores are sorted at once. What that code keeps alive is written down here, to be traced beside memfit's
own way, which streams blocks. Blocks come one after the other and leave nothing behind but what their last matrix left,
so two of them tell the peak; so do two windows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memfit.errors import UsageError
from memfit.events import Action, Trace
from memfit.extrapolation.blocks import AFTER, BEFORE, LAST, NotRepeating
from memfit.gpus import Gpu
from memfit.jobs.host import HostMemory
from memfit.jobs.pruning.decoder import Call, Decoder, check_decoder
from memfit.jobs.pruning.engine import Engine
from memfit.jobs.pruning.placement import MicroBatch
from memfit.jobs.pruning.result import PruningOutcome
from memfit.jobs.pruning.settings import PruneSettings
from memfit.jobs.pruning.streaming import Parts
from memfit.jobs.quantised import DTYPES
from memfit.jobs.run import Phases
from memfit.jobs.workload import Workload
from memfit.models.registry import build_model, load_config, parameter_count, source_notes
from memfit.planning.failures import failures_of_the_job
from memfit.planning.few import Blocks, blocks_of
from memfit.planning.on_trace import PlannedHost, made_as
from memfit.planning.predict import Plan, assess, context_on
from memfit.planning.traced import Provenance, Recipe, TracedShare, settings_found, unlabelled
from memfit.platform import Platform, platform_of
from memfit.replay.alloc_config import AllocatorConfig
from memfit.tracing.answers import Answer, Answers, Site
from memfit.tracing.tracer import Tracer, trace
from memfit.units import format_bytes

FEW = 4
ROOM = "memfit/jobs/pruning"
ANSWERS: dict[Site, Answer] = {
    Site(f"{ROOM}/selection.py", "_all_true"): True,  # no weight and no input is NaN or infinite
    Site(f"{ROOM}/sparsegpt.py", "_succeeded"): 0,  # X^T X is positive definite
}
PASSES = ("embed", "statistics", "propagate", "outliers")


def trace_pruning(work: Workload, platform: Platform) -> tuple[Recipe, Trace]:
    source = work.source
    if source.kind == "factory":
        raise UsageError(f"{work.model}: a factory's model is not pruned", hint="give a preset, a folder or a hub id")
    if work.autocast_type:
        raise UsageError(f"--precision {work.precision}: pruning has no autocast", hint="fp32, bf16 or fp16")
    check_decoder(source, load_config(source))
    blocks, parameters = blocks_of(source, work.attention)
    notes: tuple[str, ...] = ()
    share: TracedShare | None = None
    work, shortened = within_positions(work)
    if blocks is not None and blocks.worthwhile:
        try:
            made = _traced(work, platform, blocks)
            _check_units(made.trace, blocks)
        except NotRepeating as why:
            notes = (f"all {blocks.count} blocks were traced one by one: {why}",)
            made = _traced(work, platform, None)
        else:
            share = TracedShare(blocks.traced, blocks.count)
    else:
        made = _traced(work, platform, None)
    recipe = Recipe(
        trace=made.trace,
        parameters=parameters,
        trainable_parameters=0,
        settings=settings_found(work),
        how=Provenance(blocks=share, micro_batches=made.share),
        notes=(*shortened, *made.notes(), *notes, *source_notes(source)),
    )
    return recipe, made.trace


def within_positions(work: Workload) -> tuple[Workload, tuple[str, ...]]:
    """As a run does: windows are never longer than what the model can take."""
    longest = getattr(load_config(work.source), "max_position_embeddings", None)
    if not isinstance(longest, int) or work.seq_len <= longest:
        return work, ()
    note = f"--seqlen {work.seq_len} is more than the model's {longest} positions: {longest} is taken"
    return work.with_found(seq_len=longest), (note,)


@dataclass
class _TracedPruning:
    trace: Trace
    outcome: PruningOutcome
    where: str
    micro_batches: int
    looked_at: int
    block_bytes: int

    @property
    def share(self) -> TracedShare | None:
        """Of the micro-batches."""
        return TracedShare(self.looked_at, self.micro_batches) if self.looked_at < self.micro_batches else None

    def notes(self) -> tuple[str, ...]:
        host: dict[str, int] = self.trace.facts["host"]
        lies = "on the device" if self.where == "device" else "in pinned host memory"
        return (
            f"{self.micro_batches} micro-batches of {self.outcome.micro_batch} windows; hidden states {lies}",
            f"host memory for buffers: {format_bytes(host['peak_bytes'])}",
        )


class _Nowhere:
    """Blocks leave the device and need not arrive."""

    def write(self, block: int, parts: Parts, facts: Mapping[str, Any]) -> None:
        return


@dataclass
class _Batches:
    """A few micro-batches of many, and the events at which each began, pass by pass."""

    trace: Trace
    few: int | None
    passes: list[list[int]] = field(default_factory=list)

    def some(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        chosen = batches
        if self.few is not None and len(batches) > self.few + 1:
            odd = [batches[-1]] if batches[-1].count != batches[0].count else []
            chosen = [*batches[: self.few], *odd]
        return _Watched(chosen, self)


class _Watched(list[MicroBatch]):
    def __init__(self, batches: list[MicroBatch], watch: _Batches) -> None:
        super().__init__(batches)
        self._watch = watch

    def __iter__(self) -> Iterator[MicroBatch]:
        starts: list[int] = []
        self._watch.passes.append(starts)
        for batch in super().__iter__():
            starts.append(len(self._watch.trace))
            yield batch


def _traced(work: Workload, platform: Platform, blocks: Blocks | None) -> _TracedPruning:
    few = FEW
    made, watch = _run(work, platform, blocks, few)
    try:
        _check_passes(made.trace, watch.passes)
    except NotRepeating:
        made, _ = _run(work, platform, blocks, None)
    return made


def _run(
    work: Workload,
    platform: Platform,
    blocks: Blocks | None,
    few: int | None,
    *,
    layers: int | None = None,
    beside: Callable[[Tracer], AbstractContextManager[object]] = nullcontext,
) -> tuple[_TracedPruning, _Batches]:
    """With so many `layers`, the few that tell the rest by default. What `beside` makes is entered around the job."""
    with torch.device("meta"):
        model = build_model(
            work.source,
            dtype=DTYPES[work.precision],
            attention=work.attention,
            layers=layers or (None if blocks is None else blocks.traced),
        )
    decoder = Decoder(model, None)
    ids = torch.zeros(work.nsamples, work.seq_len, dtype=torch.int64)
    done: list[tuple[PruningOutcome, HostMemory, _Batches]] = []

    def job(tracer: Tracer) -> None:
        _name_modules(tracer, decoder)
        host, watch = PlannedHost(tracer), _Batches(tracer.trace, few)
        with (
            beside(tracer),
            Engine(
                decoder,
                device=tracer.device,
                budget=work.gpu_budget_bytes,
                phases=PruningPhases(tracer),
                host=host,
                whole=None if blocks is None else blocks.count,
                some=watch.some,
            ) as engine,
        ):
            done.append((engine.prune(PruneSettings(workload=work), ids, sink=_Nowhere()), host, watch))

    with failures_of_the_job():
        made = trace(job, platform=platform, answers=Answers(ANSWERS))
    ((outcome, host, watch),) = done
    label(made)
    hidden = 0
    if outcome.hidden_on == "host":
        hidden = work.nsamples * work.seq_len * decoder.hidden_size * decoder.dtype.itemsize
    made.facts["host"] = {
        "peak_bytes": host.peak_bytes, "hidden_states_bytes": hidden, "buffers_bytes": host.peak_bytes - hidden,
    }  # fmt: skip
    made.facts["hidden_size"] = decoder.hidden_size
    made.facts["placement"] = {"micro_batch": outcome.micro_batch, "hidden_states_on": outcome.hidden_on}
    every = -(-work.nsamples // outcome.micro_batch)
    looked = max((len(starts) for starts in watch.passes), default=0)
    return _TracedPruning(made, outcome, outcome.hidden_on, every, looked, decoder.block_bytes), watch


def traced_with(
    work: Workload,
    platform: Platform,
    blocks: Blocks | None,
    *,
    layers: int | None,
    few: int | None,
    beside: Callable[[Tracer], AbstractContextManager[object]],
) -> tuple[Trace, int, int]:
    """Of so many layers and `few` micro-batches (and a last one that is smaller): the trace, the windows of a
    micro-batch, and the bytes of a block."""
    work, _ = within_positions(work)
    made, _ = _run(work, platform, blocks, few, layers=layers, beside=beside)
    return made.trace, made.outcome.micro_batch, made.block_bytes


def _name_modules(tracer: Tracer, decoder: Decoder) -> None:
    tracer.modules.know(decoder.model, "")
    for index, block in enumerate(decoder.blocks):
        tracer.modules.know(block, f"{decoder.path}.{index}")


class PruningPhases:
    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    def __call__(self, name: str, step: int = 0) -> AbstractContextManager[None]:
        self.tracer.trace.mark(name, step)
        return made_as(self.tracer, name if name in ("weights", "calibration") else "")


def label(made: Trace) -> None:
    """What survives its pass are statistics; what modules make in a pass are activations, but for the weights that a
    module outside the blocks is given when it is first called; the rest is gone at once."""
    for block, phase, survives in unlabelled(made):
        module = made.module(block)
        if phase == "embed" and module and made.op(block).startswith("aten.empty."):
            category = "weights"
        elif survives:
            category = "calibration" if phase in (*PASSES, "select") else "other"
        else:
            category = "activations" if module and phase in PASSES else "temporaries"
        made.set_category(block, category)


# -- proofs ------------------------------------------------------------------------------------------------------------


def _check_passes(made: Trace, passes: list[list[int]]) -> None:
    """In every pass over the micro-batches the second and the third do the same, and leave nothing behind."""
    for starts in passes:
        if len(starts) >= FEW:
            _check_alike(made, (starts[1], starts[2]), (starts[2], starts[3]))


def _check_units(made: Trace, blocks: Blocks) -> None:
    """The inner units do the same, and leave nothing behind."""
    starts = _starts(made)
    bounds = [starts[unit * blocks.period] for unit in (BEFORE, AFTER, LAST)]
    _check_alike(made, (bounds[0], bounds[1]), (bounds[1], bounds[2]))


def _starts(made: Trace) -> dict[int, int]:
    """The events at which the blocks' last loads begin: an allocation of shares goes over all blocks before."""
    found: dict[int, int] = {}
    for event, (action, subject) in enumerate(made.events()):
        if action == Action.MARK and made.marks[subject].phase == "load":
            found[made.marks[subject].step] = event
    return found


def _check_alike(made: Trace, one: tuple[int, int], other: tuple[int, int]) -> None:
    if _shape(made, *one) != _shape(made, *other):
        raise NotRepeating("they do not take the same memory")


def _shape(made: Trace, start: int, end: int) -> list[tuple[Any, ...]]:
    """Events by what they do: sizes and ops of what is made, and which of these goes when."""
    shape: list[tuple[Any, ...]] = []
    mine: dict[int, int] = {}
    for event in range(start, end):
        action, subject = made.actions[event], made.subjects[event]
        if action == Action.ALLOC:
            mine[subject] = len(mine)
            shape.append((action, made.requested[subject], made.op_of[subject]))
        elif action == Action.MARK:
            shape.append((action, made.marks[subject].phase))
        elif subject in mine:
            shape.append((action, mine[subject]))
        else:
            raise NotRepeating("what one makes another frees")
    freed = sum(1 for entry in shape if entry[0] == Action.FREE)
    if freed != len(mine):
        raise NotRepeating("they leave something behind")
    return shape


# -- the whole model on the GPU, as the public Wanda code has it -------------------------------------------------------

BLOCKS, WINDOWS = 2, 2
WHAT = "the public Wanda code: all weights and two buffers of hidden states on the card"


def predict_whole_model_pruning(work: Workload, gpu: Gpu | None) -> Plan:
    """As `predict` for the same workload, but with all weights on the card."""
    started = time.perf_counter()
    work, shortened = within_positions(work)
    with torch.device("meta"):
        model = build_model(work.source, dtype=DTYPES[work.precision], attention=work.attention)
    parameters, decoder = parameter_count(model), Decoder(model, None)

    def job(tracer: Tracer) -> None:
        _name_modules(tracer, decoder)
        with torch.no_grad():
            prune_whole(decoder, work, tracer.device, PruningPhases(tracer))

    with failures_of_the_job():
        made = trace(job, platform=platform_of(gpu), answers=Answers(ANSWERS))
    label(made)
    blocks, windows = len(decoder.blocks), work.nsamples
    how = Provenance(
        blocks=TracedShare(BLOCKS, blocks) if blocks > BLOCKS else None,
        micro_batches=TracedShare(WINDOWS, windows) if windows > WINDOWS else None,
    )
    context = context_on(gpu, training=False, flash=work.precision != "fp32")
    return assess(
        made,
        AllocatorConfig.parse(work.alloc_conf),
        gpu,
        context,
        workload=work.settings() | {"gpu": None},
        model=work.source.name,
        parameters=parameters,
        trainable_parameters=0,
        how=how,
        notes=(WHAT, how.in_words(), *shortened),
        started=started,
    )


def prune_whole(decoder: Decoder, work: Workload, device: torch.device, phases: Phases) -> None:
    """A few windows through the first blocks; what is removed is nobody's to keep."""
    with phases("weights"):
        for module in (decoder.model, *decoder.blocks):
            module.to(device)
    with phases("calibration"):
        inputs = torch.zeros(
            work.nsamples, work.seq_len, decoder.hidden_size, dtype=decoder.dtype, device=device
        )  # all windows, before a block and after it
        outputs = torch.zeros_like(inputs)
    with phases("embed"):
        for window in range(min(WINDOWS, work.nsamples)):
            inputs[window] = decoder.front(torch.zeros(1, work.seq_len, dtype=torch.int64, device=device))[0]
            calls = decoder.take_calls()
    kept = _LoopVariables()
    for index, block in enumerate(decoder.blocks[:BLOCKS]):
        matrices = [module for module in block.modules() if isinstance(module, nn.Linear)]
        with phases("statistics", index):
            squares = {matrix: torch.zeros(matrix.in_features, device=device) for matrix in matrices}
            hooks = [matrix.register_forward_hook(_observing(squares)) for matrix in matrices]
            _through(decoder, index, inputs, outputs, calls)
            for hook in hooks:
                hook.remove()
        with phases("select", index):
            for matrix in matrices:
                kept.select(matrix, squares[matrix], float(work.sparsity or 0.5))
        with phases("propagate", index):
            _through(decoder, index, inputs, outputs, calls)
        inputs, outputs = outputs, inputs


class _LoopVariables:
    """Variables of a loop live on until the next round assigns them: one matrix is sorted while the last one's result
    is there."""

    def __init__(self) -> None:
        self.scores: Any = None
        self.mask: Any = None
        self.sorted: Any = None
        self.chosen: Any = None

    def select(self, matrix: nn.Linear, squares: Tensor, share: float) -> None:
        weight = matrix.weight.data
        self.scores = torch.abs(weight) * torch.sqrt(squares.reshape(1, -1))
        self.mask = torch.zeros_like(self.scores) == 1
        self.sorted = torch.sort(self.scores, dim=-1, stable=True)
        self.chosen = self.sorted[1][:, : int(self.scores.shape[1] * share)]
        self.mask.scatter_(1, self.chosen, True)
        weight[self.mask] = 0


def _observing(squares: dict[nn.Linear, Tensor]) -> Any:
    def observe(matrix: nn.Linear, given: tuple[Tensor, ...], _: Tensor) -> None:
        columns = given[0].reshape(-1, given[0].shape[-1]).t().type(torch.float32)
        squares[matrix] += torch.norm(columns, p=2, dim=1) ** 2

    return observe


def _through(decoder: Decoder, index: int, inputs: Tensor, outputs: Tensor, calls: list[Call]) -> None:
    for window in range(min(WINDOWS, len(inputs))):
        outputs[window] = decoder.run(index, inputs[window].unsqueeze(0), calls[index])[0]
