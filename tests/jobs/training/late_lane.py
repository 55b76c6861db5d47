"""A side stream that is as late as it may be: what it is given to copy is copied when somebody waits for it.

On a GPU a copy runs at some time between the moment it was given and the moment it is waited for. In line, as on the
CPU, it runs at once; here it runs at the last moment. Whoever reads too early, writes too early or lets memory go that
is still being copied gets other numbers, or an error.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor


class LateLane:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._given: list[tuple[_Place, _Place]] = []
        self._done = 0

    def copy(self, target: Tensor, source: Tensor, *, after: object = None) -> _Late:
        self._given.append((_Place.of(target), _Place.of(source)))
        return _Late(self, len(self._given))

    def now(self) -> None:
        return None

    def wait(self, event: _Late | None) -> None:
        if event is not None:
            event.synchronize()

    def run_until(self, count: int) -> None:
        for target, source in self._given[self._done : count]:
            target.tensor().copy_(source.tensor())
        self._done = max(self._done, count)

    @property
    def nothing_is_under_way(self) -> bool:
        return self._done == len(self._given)


@dataclass(frozen=True)
class _Late:
    lane: LateLane
    count: int

    def synchronize(self) -> None:
        self.lane.run_until(self.count)


@dataclass(frozen=True)
class _Place:
    """A tensor that is not kept alive."""

    storage: weakref.ref[torch.UntypedStorage]
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        at = tensor.storage_offset()
        return cls(weakref.ref(tensor.untyped_storage()), tensor.dtype, tensor.size(), tensor.stride(), at)

    def tensor(self) -> Tensor:
        storage = self.storage()
        assert storage is not None, "memory was let go while it was being copied"
        with torch.no_grad():
            return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)
