"""Prune a model, block by block.

    embed           the calibration windows: the hidden states are the only thing carried from block to block
    for each block:
        load        its weights, read ahead and copied in by a thread
        statistics  pass 1: the dense block over all micro-batches, up to the input of its last matrix
        select      scores, masks, updates: in place
        store       copied out and written by a thread while pass 2 runs
        propagate   pass 2: the pruned block over all micro-batches, each written over its input

The last block's pass 2 is for nobody and left out. Windows to evaluate go along, through each pruned block. Blocks that
an earlier run has finished are only run forward.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import chain

import torch
from torch import Tensor

from memfit.errors import UsageError
from memfit.jobs.host import finished, numbers
from memfit.jobs.pruning import kernels
from memfit.jobs.pruning.engine import Engine
from memfit.jobs.pruning.kernels import attention_kernels
from memfit.jobs.pruning.methods import ByNorms, Method, method_of, outlier_percentage, owl, owl_groups, reconstruct_
from memfit.jobs.pruning.observation import SharedInput, Statistic
from memfit.jobs.pruning.output import OutputFolder
from memfit.jobs.pruning.placement import HiddenStates, Placement
from memfit.jobs.pruning.result import BlockReport, MatrixReport, PruningOutcome
from memfit.jobs.pruning.selection import Wanda, check_finite, check_groups
from memfit.jobs.pruning.settings import PruneSettings
from memfit.jobs.pruning.streaming import BlockReader, BlockWriter, Downloads, Load, Sink
from memfit.jobs.settings import Sparsity
from memfit.units import MiB

COUNTED_AT_ONCE = 2 * MiB
FEW_TOKENS = 1 / 16
"""An expert that saw less than this part of its even share of the tokens is named."""
NAMED = 8


class Sweep:
    def __init__(
        self,
        engine: Engine,
        settings: PruneSettings,
        windows: Tensor | None,
        output: OutputFolder | None,
        sink: Sink | None,
        evaluated: Tensor | None,
    ) -> None:
        self.engine, self.settings, self.output = engine, settings, output
        self.sink = (sink or output) if engine.team.leads else None
        self.method = method_of(settings)
        self.blocks = len(engine.decoder.blocks)
        if windows is None and settings.needs_data:
            raise UsageError(f"--prune-method {settings.workload.method} needs calibration windows")
        if settings.reconstruct and engine.team.size > 1:
            raise UsageError("--reconstruct works in one process only", hint="leave it out under torchrun")
        self.ids = windows if settings.needs_data else None
        self.evaluated = evaluated
        if settings.sparsity.group is not None:
            for matrix in chain.from_iterable(engine.matrices):
                check_groups(matrix.columns, settings.sparsity.group)
        self.notes: tuple[str, ...] = ()
        self.states: HiddenStates | None = None
        self.along: HiddenStates | None = None
        """Those of the windows to evaluate."""
        self.placement = self._settled_placement()

    def run(self, on_block: Callable[[BlockReport], None]) -> PruningOutcome:
        engine, reports = self.engine, list[BlockReport]()
        sparsities = self._sparsities()
        self.states = None if self.ids is None else engine.embed(self.ids, self.placement)
        self.along = None if self.evaluated is None else engine.embed(self.evaluated, self.placement)
        done = engine.team.tell(self.output.finished_blocks if self.output is not None else 0)
        with ExitStack() as stack:
            notes = stack.enter_context(self._kernels())
            loads = [*map(self._finished, range(done if self._carried else 0)), *map(Load, range(done, self.blocks))]
            reader = stack.enter_context(engine.reading(loads, self.output))
            writer = stack.enter_context(self._writing())
            for index in range(self.blocks):
                started = time.perf_counter()
                if index < done:
                    report = self._replay(index, reader)
                else:
                    report = self._prune(index, reader, writer, sparsities[index])
                reports.append(dataclasses.replace(report, seconds=time.perf_counter() - started))
                on_block(reports[-1])
        for each in self._carried:
            each.settle()
        if self.states is not None:
            self.states.release()
        return PruningOutcome(
            blocks=tuple(reports),
            ratios=tuple(s.ratio for s in sparsities),
            micro_batch=self.placement.micro_batch,
            hidden_on=self.placement.where,
            host_peak_bytes=engine.host.peak_bytes,
            notes=(*self.notes, *notes, *dict.fromkeys(note for report in reports for note in report.notes)),
            pruned_states=self.along,
        )

    @property
    def _carried(self) -> list[HiddenStates]:
        return [each for each in (self.states, self.along) if each is not None]

    # -- what is settled beforehand --------------------------------------------------------------------------------

    def _settled_placement(self) -> Placement:
        """On --resume the micro-batches are those of the first run, whatever memory is free now."""
        windows = [ids for ids in (self.ids, self.evaluated) if ids is not None]
        if not windows:
            return Placement(micro_batch=1, where="device")
        made = self.engine.placement(windows[0], self.settings, sum(len(ids) for ids in windows[1:]))
        before = self.output.recall("micro_batch") if self.output is not None else None
        size: int = self.engine.team.tell(before or made.micro_batch)
        if self.ids is not None:
            size = self._enough_for_all(size, len(self.ids))
        if self.output is not None and self.engine.team.leads and before is None:
            self.output.remember("micro_batch", size)
        return dataclasses.replace(made, micro_batch=size)

    def _enough_for_all(self, size: int, windows: int) -> int:
        """Windows in a micro-batch, so that every process has one: it learns from it what a block's inputs are."""
        processes = self.engine.team.size
        if windows < processes:
            raise UsageError(
                f"{processes} processes cannot share {windows} windows of text",
                hint=f"--nsamples {processes}, or --nproc-per-node {windows}",
            )
        if -(-windows // size) >= processes:
            return size
        smaller = windows // processes
        self.notes = (
            f"micro-batches of {smaller} windows instead of {size}, so that each of {processes} processes has its "
            f"share of {windows}",
        )
        return smaller

    def _sparsities(self) -> list[Sparsity]:
        """How much of each block goes."""
        asked = self.settings.sparsity
        if self.settings.allocation == "uniform":
            return [asked] * self.blocks
        before = self.output.recall("outliers") if self.output is not None else None
        outliers: list[float] = self.engine.team.tell(before) or self._outliers()
        if self.output is not None and self.engine.team.leads and before is None:
            self.output.remember("outliers", outliers)
        if asked.groups is not None:
            return [asked.with_removed(removed) for removed in owl_groups(outliers, *asked.groups)]
        return [dataclasses.replace(asked, ratio=ratio) for ratio in owl(outliers, asked.ratio)]

    def _outliers(self) -> list[float]:
        """The dense model's percentage of outliers, block by block: one forward through it."""
        assert self.ids is not None
        engine, wanda = self.engine, ByNorms("wanda")
        states, found = engine.embed(self.ids, self.placement), []
        loads = [Load(index) for index in range(self.blocks)]
        with engine.reading(loads) as reader:
            for load in loads:
                with engine.phases("load", load.block):
                    engine.load(reader, load)
                with engine.phases("outliers", load.block):
                    make = self._statistic(wanda)
                    groups = engine.observe(load.block, states, make, into=states).groups
                    slots = engine.weights(load.block)
                    scored = [
                        (matrix.weight(slots), Wanda(group.statistic.summary()))
                        for group in groups
                        if group.statistic is not None
                        for matrix in group.matrices
                    ]
                    found.append(outlier_percentage(scored))
                    del groups, scored
                engine.leave(reader)
        states.release()
        shares = torch.stack(found)
        return [0.0] * self.blocks if shares.is_meta else shares.tolist()

    def _finished(self, index: int) -> Load:
        """Only the first process has the folder; the others put what it sends over the source's weights."""
        return Load(index, "output" if self.engine.team.leads else "source")

    # -- one block -------------------------------------------------------------------------------------------------

    def _prune(self, index: int, reader: BlockReader, writer: BlockWriter | None, sparsity: Sparsity) -> BlockReport:
        engine, phases = self.engine, self.engine.phases
        started = time.perf_counter()
        with phases("load", index):
            engine.load(reader, Load(index))
        groups, targets, notes = self._groups(index)
        with phases("select", index):
            notes += self._select(index, groups, sparsity)
        if targets is not None and self.states is not None:
            with phases("reconstruct", index):
                self._reconstruct(index, self.states, targets)
            targets.release()
        with phases("store", index):
            counted = self._count(index, groups)
            written = None
            if writer is not None:
                facts = lambda: dataclasses.asdict(self._report(index, counted(), notes, started))  # noqa: E731
                written = writer.put(index, engine.flat, engine.lanes[0].now(), facts)
        del groups
        self._propagate(index)
        engine.leave(reader, written)
        return self._report(index, counted(), notes, started)

    def _propagate(self, index: int) -> None:
        with self.engine.phases("propagate", index):
            for states in self._carried:
                if states is self.along or index + 1 < self.blocks:
                    self.engine.propagate(index, states)

    def _groups(self, index: int) -> tuple[list[SharedInput], HiddenStates | None, tuple[str, ...]]:
        """The block's matrices by input, with statistics; and the dense block's outputs, where they are wanted."""
        engine, targets = self.engine, None
        if not self.method.needs_data and not self.settings.reconstruct:
            return [SharedInput([matrix], None) for matrix in engine.matrices[index]], None, ()
        states = self.states
        assert states is not None
        if self.settings.reconstruct:
            with engine.phases("calibration"):
                targets = states.another()
        with engine.phases("statistics", index):
            observer = engine.observe(index, states, self._statistic(self.method), into=targets)
        unused = [f"{engine.decoder.path}.{index}.{matrix.name}" for matrix in observer.unseen]
        notes = (f"{', '.join(unused)}: not used by the model, left as it is",) if unused else ()
        return observer.groups, targets, notes

    def _statistic(self, method: Method) -> Callable[[int], Statistic]:
        samples, device = 0 if self.ids is None else len(self.ids), self.engine.device
        return lambda columns: method.statistic(samples, columns, device)

    def _select(self, index: int, groups: Sequence[SharedInput], sparsity: Sparsity) -> tuple[str, ...]:
        engine, notes = self.engine, list[str]()
        slots = engine.weights(index)
        path = f"{engine.decoder.path}.{index}"
        check_finite(dict(self._looked_at(path, groups, slots)))
        self._ask_tokens(groups)
        for number, group in enumerate(groups):
            owner = engine.team.owner(number)
            if owner == engine.team.rank:
                notes += self.method.prune([matrix.weight(slots) for matrix in group.matrices], group, sparsity)
            for matrix in group.matrices:
                engine.team.send(slots[matrix.slot] if matrix.transposed else matrix.weight(slots), owner)
            group.statistic = None  # its memory is the next one's
        return (*(f"{path}: {note}" for note in notes), *_few_tokens(path, groups))

    def _looked_at(
        self, path: str, groups: Sequence[SharedInput], slots: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        for name in dict.fromkeys(matrix.slot for group in groups for matrix in group.matrices):
            yield f"{path}.{name}", slots[name]
        for group in groups:
            if group.statistic is not None:
                yield f"inputs of {path}.{group.matrices[0].name}", group.statistic.summary()

    def _ask_tokens(self, groups: Sequence[SharedInput]) -> None:
        counted = [group for group in groups if group.tokens is not None]
        if counted:
            together = torch.stack([group.tokens for group in counted if group.tokens is not None])
            if not together.is_meta:
                for group, seen in zip(counted, together.tolist(), strict=True):
                    group.seen = seen

    def _count(self, index: int, groups: Sequence[SharedInput]) -> Callable[[], list[MatrixReport]]:
        """Zeros of each matrix: counted on the device now, asked for later so that nothing waits."""
        engine, slots = self.engine, self.engine.weights(index)
        matrices = [(matrix, group.seen) for group in groups for matrix in group.matrices]
        zeros = torch.stack([_zeros(matrix.weight(slots)) for matrix, _ in matrices])
        there = engine.host.empty(zeros.shape, zeros.dtype)
        arrived = engine.lanes[1].copy(there, zeros, after=engine.lanes[1].now())
        copied_from = zeros if arrived is not None else None
        del zeros
        engine.host.release(there)

        @cache
        def ask() -> list[MatrixReport]:
            finished(arrived)
            counts, _ = numbers(there), copied_from
            return [
                MatrixReport(name=matrix.name, rows=matrix.rows, columns=matrix.columns, zeros=count, tokens=seen)
                for (matrix, seen), count in zip(matrices, counts, strict=True)
            ]

        return ask

    def _report(self, index: int, found: list[MatrixReport], notes: tuple[str, ...], started: float) -> BlockReport:
        return BlockReport(index=index, matrices=tuple(found), seconds=time.perf_counter() - started, notes=notes)

    def _reconstruct(self, index: int, states: HiddenStates, targets: HiddenStates) -> None:
        engine = self.engine
        block, slots = engine.decoder.blocks[index], engine.weights(index)
        tuned = {name: slots[name] for name in dict.fromkeys(matrix.slot for matrix in engine.matrices[index])}

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for (_, hidden), (_, target) in zip(states.batches(), targets.batches(), strict=True):
                yield hidden, target

        def forward(weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
            call = states.calls[len(hidden)][index]
            out = torch.func.functional_call(block, dict(weights), (hidden, *call.args), call.kwargs)
            made: Tensor = out[0] if isinstance(out, tuple) else out
            return made

        masks = {name: weight == 0 for name, weight in tuned.items()}
        reconstruct_(tuned, masks, forward, batches, states.steps)

    # -- blocks that are finished ----------------------------------------------------------------------------------

    def _replay(self, index: int, reader: BlockReader) -> BlockReport:
        engine = self.engine
        if self._carried:
            with engine.phases("load", index):
                engine.load(reader, self._finished(index))
                engine.team.send(engine.flat, 0)
            self._propagate(index)
            engine.leave(reader)
        facts = self.output.facts(index) if self.output is not None else None
        return BlockReport.from_json(engine.team.tell(facts))

    @contextmanager
    def _kernels(self) -> Iterator[tuple[str, ...]]:
        decoder, device = self.engine.decoder, self.engine.device
        windows = [ids for ids in (self.ids, self.evaluated) if ids is not None]
        tokens = sum(ids.numel() for ids in windows) // self.engine.team.size * self.engine.whole
        length = max((ids.shape[1] for ids in windows), default=0)
        with (
            kernels.compiled(decoder.blocks, decoder.config, device, tokens) as notes,
            attention_kernels(decoder.config, device, tokens, length),
        ):
            yield notes

    @contextmanager
    def _writing(self) -> Iterator[BlockWriter | None]:
        """Blocks go out while this is open; what else the folder needs is copied beside."""
        if self.sink is None:
            yield None
            return
        rest = self.sink.copy_rest() if isinstance(self.sink, OutputFolder) else None
        downloads = Downloads(self.engine.device, self.engine.host)
        writer = BlockWriter(self.sink, downloads)
        try:
            yield writer
            writer.wait()
            if rest is not None:
                rest.result()
            if isinstance(self.sink, OutputFolder):
                self.sink.settle()
        finally:
            writer.close()
            downloads.release()


def _zeros(weight: Tensor) -> Tensor:
    """On the device, in parts, so that no mask of a whole large matrix is made."""
    flat = weight.mT.reshape(-1) if not weight.is_contiguous() else weight.view(-1)
    return torch.stack([part.eq(0).sum() for part in flat.split(COUNTED_AT_ONCE)]).sum()


def _few_tokens(path: str, groups: Iterable[SharedInput]) -> tuple[str, ...]:
    """Experts whose statistics say little."""
    seen = {group.matrices[0].name.rpartition(".")[0]: group.seen for group in groups if group.seen is not None}
    if not seen:
        return ()
    even = sum(seen.values()) / len(seen)
    notes = []
    for what, few in (
        ("saw no token, so their weights went by magnitude", [n for n, count in seen.items() if count == 0]),
        (
            f"saw fewer than {even * FEW_TOKENS:.0f} tokens (an even share is {even:.0f})",
            [n for n, count in seen.items() if 0 < count < even * FEW_TOKENS],
        ),
    ):
        if few:
            named = ", ".join(few[:NAMED]) + (f" and {len(few) - NAMED} more" if len(few) > NAMED else "")
            notes.append(f"{path}: experts {named} {what}")
    return tuple(notes)
