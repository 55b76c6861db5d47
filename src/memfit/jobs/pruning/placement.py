"""Where the hidden states lie, how many windows run at once, and who runs which.

Hidden states are the only thing carried from block to block: one buffer, written over in place. It lies on the device
if it fits; else in host memory, and two micro-batches of it are on the device while one is computed and the next comes
in. The same micro-batches run in the same order wherever the buffer is, so the results are the same to the bit.

Of several processes under torchrun, one a GPU, each runs whole micro-batches, so that every one has the shape and the
numbers it has in a single process. Norms are kept one row a sequence: adding a process's rows to the others' zeros is
exact, and the sum over sequences is then taken in the same order everywhere. Products X^T X are added up, in an order
that is the library's. Each input's matrices are pruned by one process and sent to the others, so all go on with the
same weights, to the bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memfit.errors import InputError
from memfit.jobs.host import Event, HostMemory, Lane, finished
from memfit.units import MiB, format_bytes

Where = Literal["device", "host"]
PLACES: tuple[Where, ...] = ("device", "host")
TOKENS = 8192
"""Enough for the matrix products of a block to run at full speed; more only takes memory."""
WORKSPACES = 64 * MiB
SELECTION = 192 * MiB


@dataclass(frozen=True, slots=True)
class MicroBatch:
    first: int
    """Its first window, of all."""
    count: int
    row: int
    """Where it begins in this process's own buffer."""


def deal(windows: int, size: int, rank: int = 0, world: int = 1) -> list[MicroBatch]:
    """Micro-batches in turn, so that each is the same whoever runs it."""
    mine, row = [], 0
    for first in range(rank * size, windows, world * size):
        count = min(size, windows - first)
        mine.append(MicroBatch(first, count, row))
        row += count
    return mine


class HiddenStates:
    calls: Mapping[int, Sequence[Any]]
    """By the size of a micro-batch: what the model gives each block with it (`decoder.Call`)."""

    def __init__(
        self,
        batches: list[MicroBatch],
        shape: Sequence[int],
        dtype: torch.dtype,
        where: Where,
        host: HostMemory,
        lanes: tuple[Lane, Lane],
        some: list[MicroBatch] | None = None,
    ) -> None:
        """Room for all of the micro-batches, of windows of this shape; `some` of them are gone through, in a plan."""
        self.where = where
        self.calls = {}
        self._all = batches
        self._batches = batches if some is None else some
        self._host = host
        self._in, self._out = lanes
        windows = sum(batch.count for batch in batches)
        most = max((batch.count for batch in batches), default=0)
        if where == "device":
            self._memory = torch.empty(windows, *shape, dtype=dtype, device=self._in.device)
            self._slots: list[Tensor] = []
        else:
            self._memory = host.empty((windows, *shape), dtype)
            self._slots = [torch.empty(most, *shape, dtype=dtype, device=self._in.device) for _ in range(2)]
        self._written: list[Event] = [None, None]
        """When the last use of a slot ended, its carrying to the host included."""

    @property
    def shape(self) -> tuple[int, int, int]:
        windows, length, width = self._memory.shape
        return windows, length, width

    @property
    def steps(self) -> int:
        """Micro-batches of this process."""
        return len(self._batches)

    def another(self) -> HiddenStates:
        """An empty buffer of the same shape in the same place."""
        _, *shape = self.shape
        dtype, lanes = self._memory.dtype, (self._in, self._out)
        return HiddenStates(self._all, shape, dtype, self.where, self._host, lanes, self._batches)

    def batches(self) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Each micro-batch on the device, the next one on its way while this one is used."""
        if self.where == "device":
            for batch in self._batches:
                yield batch, self._rows(batch)
            return
        arrived = self._fetch(0)
        for number, batch in enumerate(self._batches):
            here, arrived = arrived, self._fetch(number + 1)
            self._in.wait(here)
            yield batch, self._slots[number % 2][: batch.count]
            self._used(number)

    def put(self, batch: MicroBatch, hidden: Tensor) -> None:
        """Write over a micro-batch: the one that `batches` has just given, or each in turn to fill the buffer."""
        if self.where == "device":
            self._rows(batch).copy_(hidden)
            return
        number = self._batches.index(batch)
        slot = self._slots[number % 2][: batch.count]
        self._out.wait(self._written[number % 2])
        slot.copy_(hidden)
        self._written[number % 2] = self._out.copy(self._rows(batch), slot, after=self._out.now())

    def settle(self) -> None:
        """Wait until the host has everything."""
        for event in self._written:
            finished(event)

    def release(self) -> None:
        self.settle()
        if self.where == "host":
            self._host.release(self._memory)
        self._memory = self._memory.new_empty((0, *self._memory.shape[1:]))
        self._slots = []

    def _rows(self, batch: MicroBatch) -> Tensor:
        return self._memory[batch.row : batch.row + batch.count]

    def _fetch(self, number: int) -> Event:
        if number >= len(self._batches):
            return None
        batch, slot = self._batches[number], number % 2
        free = self._written[slot] if self._written[slot] is not None else self._in.now()
        self._written[slot] = None
        return self._in.copy(self._slots[slot][: batch.count], self._rows(batch), after=free)

    def _used(self, number: int) -> None:
        """A slot that was only read is free when the work on it is done."""
        slot = number % 2
        if self._written[slot] is None:
            self._written[slot] = self._in.now()


# -- the budget --------------------------------------------------------------------------------------------------------


class NoRoom(InputError):
    """Not even one window at a time, with one block on the device."""

    def __init__(self, least: int, budget: int) -> None:
        super().__init__(
            f"a block of this model needs about {format_bytes(least)}; there are {format_bytes(budget)}",
            hint="a smaller --seqlen or a larger --max-gpu-memory; `memfit plan prune` has the exact figure",
        )
        self.least = least
        """Bytes, from above."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    micro_batch: int
    where: Where
    blocks: int = 2
    """Room for so many on the device: the next one can come in while one is in use."""


@dataclass(frozen=True, kw_only=True)
class DeviceNeeds:
    """Bytes on the device, estimated from above; the plan has them exactly."""

    hidden_per_window: int
    activations_per_window: int
    block: int
    fixed: int
    """Statistics, or the embedding while it is used."""

    def total(self, windows: int, placement: Placement) -> int:
        resident = windows if placement.where == "device" else 2 * placement.micro_batch
        moving = resident * self.hidden_per_window + placement.micro_batch * self.activations_per_window
        return moving + placement.blocks * self.block + self.fixed + WORKSPACES + SELECTION


def usual_micro_batch(windows: int, length: int) -> int:
    return max(1, min(TOKENS // length, windows))


def choose(needs: DeviceNeeds, windows: int, size: int, budget: int | None, *, smaller: bool = True) -> Placement:
    """Micro-batches of `size`, with the hidden states on the device if that fits, on the host if not; with room for one
    block only, and then smaller micro-batches, when nothing else fits. `windows` are those of this process."""
    if budget is None:
        return Placement(micro_batch=size, where="device")
    while True:
        for where in PLACES:
            for blocks in (2, 1):
                placement = Placement(micro_batch=size, where=where, blocks=blocks)
                if needs.total(windows, placement) <= budget:
                    return placement
        if size == 1 or not smaller:
            least = needs.total(windows, Placement(micro_batch=size, where="host", blocks=1))
            raise NoRoom(least, budget)
        size //= 2


def activations_per_token(block: nn.Module, hidden: int, item: int, experts_per_token: int = 1) -> int:
    """A block's largest working set for one token, from above: around the attention, or around the MLP."""
    matrices = [parameter for parameter in block.parameters() if parameter.dim() >= 2]
    widths = [matrix.shape[-2] if matrix.dim() == 3 else max(matrix.shape) for matrix in matrices]
    times = experts_per_token if any(matrix.dim() == 3 for matrix in matrices) else 1
    return item * (6 * hidden + 4 * max(widths, default=hidden) * times)


class Team:
    """The processes of a run; by default this one alone."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def from_environment(cls, device: torch.device) -> Team:
        """What torchrun has set up; the caller ends it with `leave`."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size < 2:
            return cls()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def owner(self, number: int) -> int:
        """Who prunes the matrices of an input."""
        return number % self.size

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Everyone's part of each, in place."""
        for tensor in tensors if self.size > 1 else ():
            dist.all_reduce(tensor)

    def send(self, tensor: Tensor, owner: int) -> None:
        """The owner's values to all. As bytes: not every library sends every type."""
        if self.size > 1:
            dist.broadcast(tensor.view(-1).view(torch.uint8), owner)

    def tell(self, value: Any) -> Any:
        """What the first process says."""
        said = [value]
        if self.size > 1:
            dist.broadcast_object_list(said, 0)
        return said[0]

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
