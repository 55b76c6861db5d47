"""A model's blocks on a device, one at a time: weights come and go, hidden states pass through.

There is one block on the device, in memory that the next one takes over. The same code runs on a GPU, on the CPU and,
to plan, on a device without memory. `sweep` has what happens to each block when a model is pruned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from memfit.errors import InputError
from memfit.jobs.host import Event, HostMemory, Lane
from memfit.jobs.pruning import kernels
from memfit.jobs.pruning.decoder import Call, Decoder, Layout, Slot, StoredPiece, move_tables
from memfit.jobs.pruning.observation import Matrix, Observer, Pattern, Statistic, find_matrices
from memfit.jobs.pruning.output import OutputFolder
from memfit.jobs.pruning.placement import (
    DeviceNeeds,
    HiddenStates,
    MicroBatch,
    Placement,
    Team,
    Where,
    activations_per_token,
    choose,
    deal,
    usual_micro_batch,
)
from memfit.jobs.pruning.result import BlockReport, PruningOutcome
from memfit.jobs.pruning.settings import PruneSettings
from memfit.jobs.pruning.streaming import BlockReader, Load, Sink, Uploads, bring
from memfit.jobs.run import Phases
from memfit.models.checkpoint import StoredTensor, WeightStore


@contextmanager
def no_phases(name: str, step: int = 0) -> Iterator[None]:
    yield


class Engine:
    def __init__(
        self,
        decoder: Decoder,
        *,
        device: torch.device | str,
        budget: int | None = None,
        phases: Phases = no_phases,
        micro_batch: int | None = None,
        where: Where | None = None,
        host: HostMemory | None = None,
        team: Team | None = None,
        whole: int | None = None,
        some: Callable[[list[MicroBatch]], list[MicroBatch]] = list,
    ) -> None:
        """`budget` is in bytes of the device's memory, all that is free by default; `micro_batch` and `where` settle
        what it would decide. A plan looks at `some` micro-batches of all, and at some blocks of a `whole` number."""
        self.decoder = decoder
        self.device = torch.device(device)
        if budget is None and self.device.type == "cuda":
            budget = int(torch.cuda.mem_get_info(self.device)[0])
        self.budget = budget
        self.phases = phases
        self.team = team or Team()
        self.host = host or HostMemory(self.device)
        self.lanes = (Lane(self.device), Lane(self.device))
        self.matrices = [find_matrices(block) for block in decoder.blocks]
        self.whole = whole or len(decoder.blocks)
        self._asked = (micro_batch, where)
        self._some = some
        self._flats: list[Tensor] = []
        self._free: list[Event] = []
        """When the last work with what a place held was done."""
        self._here = 0
        self._places = 2
        self._uploads: Uploads | None = None
        self._placed: dict[tuple[int, tuple[Slot, ...]], dict[str, nn.Parameter]] = {}
        self._patterns: dict[tuple[str, ...], Pattern] = {}
        kernels.fuse(decoder.blocks, self.device)
        move_tables(decoder.model, self.device)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @torch.no_grad()
    def prune(
        self,
        settings: PruneSettings,
        windows: Tensor | None,
        *,
        output: OutputFolder | None = None,
        sink: Sink | None = None,
        on_block: Callable[[BlockReport], None] = lambda _: None,
        pruned: Tensor | None = None,
    ) -> PruningOutcome:
        """`windows` [samples, length] may be None where the method reads no data. `pruned` are windows to evaluate:
        they go through each block after it is pruned. `sink` takes the blocks instead of files."""
        from memfit.jobs.pruning.sweep import Sweep

        return Sweep(self, settings, windows, output, sink, pruned).run(on_block)

    @torch.no_grad()
    def run_blocks(self, states: HiddenStates, *, output: OutputFolder | None = None) -> None:
        """Forward through all blocks as they are stored, or as an output folder has them."""
        loads = [Load(i, "source" if output is None else "output") for i in range(len(self.decoder.blocks))]
        with self.reading(loads, output) as reader:
            for load in loads:
                with self.phases("load", load.block):
                    self.load(reader, load)
                with self.phases("propagate", load.block):
                    self.propagate(load.block, states)
                self.leave(reader)
        states.settle()

    # -- the front and the tail ------------------------------------------------------------------------------------

    @torch.no_grad()
    def embed(self, ids: Tensor, placement: Placement | None = None) -> HiddenStates:
        """Windows [n, length] as the blocks get them."""
        placement = placement or self.placement(ids, None)
        batches = deal(len(ids), placement.micro_batch, self.team.rank, self.team.size)
        decoder, calls = self.decoder, dict[int, Sequence[Call]]()
        with self.phases("calibration"):
            shape, some = (ids.shape[1], decoder.hidden_size), self._some(batches)
            states = HiddenStates(batches, shape, decoder.dtype, placement.where, self.host, self.lanes, some)
        with self.phases("embed"), decoder.outer_weights(self._load_outer):
            for number, batch in enumerate(self._some(batches)):
                hidden = decoder.front(ids[batch.first : batch.first + batch.count].to(self.device))
                given = decoder.take_calls()
                known = calls.setdefault(batch.count, given)
                if number == 1 and known is not given:
                    _check_same(known, given)
                states.put(batch, hidden)
                del hidden, given
        states.calls = calls
        return states

    @contextmanager
    def tail(self) -> Iterator[None]:
        """Loads the final norm and the head for the `logits` calls inside, and lets go of them after."""
        with self.phases("head"), self.decoder.outer_weights(self._load_outer):
            yield
        self.release()

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[windows, tokens, vocabulary] of any tokens that left the last block; inside `tail`."""
        return self.decoder.logits(hidden)

    # -- placement -------------------------------------------------------------------------------------------------

    def placement(self, windows: Tensor, settings: PruneSettings | None, more: int = 0) -> Placement:
        """`more` windows are carried along beside these."""
        asked, where = self._asked
        count, length = windows.shape
        here = -(-(count + more) // self.team.size)
        size = asked or usual_micro_batch(count, length)
        budget = self.budget if where is None else None
        chosen = choose(self._needs(length, count, settings), here, size, budget, smaller=asked is None)
        self._places = chosen.blocks
        return dataclasses.replace(chosen, where=where or chosen.where)

    def _needs(self, length: int, samples: int, settings: PruneSettings | None) -> DeviceNeeds:
        decoder, item = self.decoder, self.decoder.dtype.itemsize
        statistics = 0
        if settings is not None and settings.workload.method == "sparsegpt":
            statistics = max(_bytes_of_updates(found) for found in self.matrices)
        elif settings is not None and settings.needs_data:
            statistics = max(sum(4 * samples * m.columns for m in found) for found in self.matrices)
        if settings is not None and settings.reconstruct:
            statistics += 8 * decoder.block_bytes + samples * length * decoder.hidden_size * item
        table = decoder.vocab_size * decoder.hidden_size * item
        experts = getattr(decoder.config, "num_experts_per_tok", None) or 1
        widest = max(activations_per_token(block, decoder.hidden_size, item, experts) for block in decoder.blocks)
        if getattr(decoder.config, "_attn_implementation", "sdpa") == "eager":
            widest += 3 * item * int(decoder.config.num_attention_heads) * length
        return DeviceNeeds(
            hidden_per_window=length * decoder.hidden_size * item,
            activations_per_window=length * widest,
            block=decoder.block_bytes,
            fixed=max(statistics, table),
        )

    # -- a block comes and goes ------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, loads: Sequence[Load], output: OutputFolder | None = None) -> Iterator[BlockReader]:
        """The blocks to be loaded, in this order."""
        with self.phases("weights"):
            for _ in range(self._places):
                self._flats.append(torch.empty(self.decoder.block_bytes, dtype=torch.uint8, device=self.device))
                self._free.append(self.lanes[0].now())  # until then the memory may be in use for what it was before
        written = output.weights() if output is not None and any(load.origin == "output" for load in loads) else None
        reader = BlockReader(loads, self._places, lambda load, place: self._fetch(load, place, output, written))
        try:
            yield reader
        finally:
            reader.close()
            if written is not None:
                written.close()
            self.release()

    def _fetch(self, load: Load, place: int, output: OutputFolder | None, written: WeightStore | None) -> Event:
        """In the reader's thread."""
        weights = written if load.origin == "output" else self.decoder.weights
        uploads, layout = self.uploads, self.decoder.layouts[load.block]
        if weights is None:
            return None
        uploads.after(self._free[place])
        if output is not None and load.origin == "output":
            check = output.checking(load.block)
            bring(weights, layout, self._flats[place], uploads, check.seen)
            check.end()
        else:
            bring(weights, layout, self._flats[place], uploads)
        return uploads.arrived()

    def load(self, reader: BlockReader, load: Load) -> None:
        """Wait for a block's weights, and put them into its modules as views of one stretch of memory."""
        self._here, arrived = reader.wait(load)
        self.lanes[0].wait(arrived)
        key = (self._here, self.decoder.layouts[load.block].slots)
        if key not in self._placed:
            views = self.decoder.layouts[load.block].views(self._flats[self._here])
            self._placed[key] = {n: nn.Parameter(view, requires_grad=False) for n, view in views.items()}
        self.decoder.put_in_place(load.block, self._placed[key], self.device)

    def leave(self, reader: BlockReader, written: Future[None] | None = None) -> None:
        """The block is done with, once it is `written`: its place is the next one's."""
        self._free[self._here] = self.lanes[0].now()
        reader.leave(written)

    @property
    def flat(self) -> Tensor:
        """The memory of the block that is here."""
        return self._flats[self._here]

    @property
    def uploads(self) -> Uploads:
        if self._uploads is None:
            self._uploads = Uploads(self.device, self.host)
        return self._uploads

    def weights(self, index: int) -> Mapping[str, Tensor]:
        """The block's tensors on the device, by their names inside it."""
        return self._placed[self._here, self.decoder.layouts[index].slots]

    def release(self) -> None:
        """Let go of the blocks' memory and of what they came through."""
        self.decoder.take_out()
        self._placed.clear()
        self._flats.clear()
        self._free.clear()
        if self._uploads is not None:
            self._uploads.release()
            self._uploads = None

    def _load_outer(self, parameter: nn.Parameter, stored: Sequence[StoredTensor]) -> Tensor:
        """A weight outside the blocks."""
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
        weights = self.decoder.weights
        if weights is not None:
            (tensor,) = stored
            slot = Slot("", tuple(parameter.shape), parameter.dtype, 0)
            layout = Layout((slot,), (StoredPiece(tensor, slot, 0),), slot.nbytes)
            self.uploads.after(self.lanes[0].now())
            bring(weights, layout, made.view(-1).view(torch.uint8), self.uploads)
            self.lanes[0].wait(self.uploads.arrived())
        return made

    # -- passes ----------------------------------------------------------------------------------------------------

    def propagate(self, index: int, states: HiddenStates) -> None:
        """The hidden states through the block as it is now."""
        for batch, hidden in states.batches():
            out = self.decoder.run(index, hidden, states.calls[batch.count][index])
            states.put(batch, out)
            del out

    def observe(
        self, index: int, states: HiddenStates, make: Callable[[int], Statistic], into: HiddenStates | None = None
    ) -> Observer:
        """Statistics of the block's inputs, over all micro-batches. Its outputs are computed only if they are to go
        `into` some other states, or these."""
        block, matrices = self.decoder.blocks[index], self.matrices[index]
        kind = (type(block).__name__, *(matrix.name for matrix in matrices))
        observer = Observer(
            matrices, make, states.shape[1], self.device, self._patterns.get(kind), whole=into is not None
        )
        for batch, hidden in states.batches():
            with observer.watching(block, batch):
                out = self.decoder.run(index, hidden, states.calls[batch.count][index])
                if into is not None:
                    into.put(batch, out)
                del out
        if observer.pattern is not None:
            self._patterns[kind] = observer.pattern
        statistics = [group.statistic for group in observer.groups if group.statistic is not None]
        self.team.add_up(part for statistic in statistics for part in statistic.sums)
        self.team.add_up(group.tokens for group in observer.groups if group.tokens is not None)
        return observer


def _bytes_of_updates(matrices: Sequence[Matrix]) -> int:
    """SparseGPT: X^T X of every input, a second one of the widest, and the widest input's matrices in fp32."""
    inputs = {(m.module if m.expert is not None else m.columns, m.expert, m.side): m.columns for m in matrices}
    widest = max(inputs.values())
    stacked = max(sum(m.rows for m in matrices if m.columns == c and m.expert is None) * c for c in inputs.values())
    return 4 * (sum(c * c for c in inputs.values()) + widest * widest + stacked)


def _check_same(known: Sequence[Call], now: Sequence[Call]) -> None:
    """What the model gives its blocks must not depend on the text: it is asked once and used for all."""
    for before, after in zip(known, now, strict=True):
        for x, y in zip(_tensors(before), _tensors(after), strict=True):
            if x is not y and not x.is_meta and not torch.equal(x, y):
                raise InputError("this model gives its blocks inputs that depend on the text; memfit cannot stream it")


def _tensors(call: Call) -> list[Tensor]:
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
