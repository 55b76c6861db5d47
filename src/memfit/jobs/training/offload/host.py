"""Pinned memory of the host in pieces, which a run takes and a plan counts, and the blocks that levers go by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from memfit.errors import UsageError
from memfit.jobs.host import HostMemory
from memfit.models.own import block_list
from memfit.units import MiB

SLAB = 256 * MiB
ALIGNED = 512
MakeHost = Callable[[torch.device, str], HostMemory]


_makers: list[MakeHost] = [lambda device, lever: HostMemory(device)]


@contextmanager
def host_memory_by(make: MakeHost) -> Iterator[None]:
    """What is taken inside for a device and a lever is made by this."""
    _makers.append(make)
    try:
        yield
    finally:
        _makers.remove(make)


class HostPieces:
    """torch rounds each piece of pinned memory up to a power of two, so small ones are cut from slabs of one."""

    def __init__(self, device: torch.device, lever: str) -> None:
        self.memory = _makers[-1](device, lever)
        self._slab: Tensor | None = None
        self._used = 0
        self._idle: dict[int, list[Tensor]] = {}

    def bytes(self, count: int) -> Tensor:
        """So many bytes, which may have been given back before."""
        idle = self._idle.get(count)
        return idle.pop() if idle else self._cut(count)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))

    def give_back(self, piece: Tensor) -> None:
        self._idle.setdefault(len(piece), []).append(piece)

    def _cut(self, count: int) -> Tensor:
        if not self.memory.pinned or count > SLAB:
            return self.memory.empty((count,), torch.uint8)
        if self._slab is None or self._used + count > SLAB:
            self._slab, self._used = self.memory.empty((SLAB,), torch.uint8), 0
        piece = self._slab[self._used : self._used + count]
        self._used += -(-count // ALIGNED) * ALIGNED
        return piece


def blocks_of(model: nn.Module, *, lever: str) -> list[nn.Module]:
    found = block_list(model)
    if found is None:
        raise UsageError(f"{lever}: a {type(model).__name__} has no list of blocks")
    return list(found[1])
