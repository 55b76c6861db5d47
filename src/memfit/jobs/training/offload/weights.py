"""Frozen weights of the blocks lie in pinned host memory; the GPU has room for those of two blocks.

Every second block uses the same room: its frozen parameters are views of it for good, and hold its values only while
it runs. When a block begins, forward or backward, its weights have arrived, and those of the next one that way begin to
come where the last one's were. Adapters, embedding, head and what belongs to no block stay on the GPU.

    FrozenWeightsOnHost(model)      # before `model.to(device)`, which carries it along
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memfit.errors import UsageError
from memfit.jobs.host import Event, Lane
from memfit.jobs.training.offload.host import ALIGNED, HostPieces, blocks_of

PLACES = 2


class FrozenWeightsOnHost:
    def __init__(self, model: nn.Module) -> None:
        self._blocks = [_Frozen(block) for block in blocks_of(model, lever="offload weights")]
        counted = [id(each) for block in self._blocks for each in block.parameters]
        if not counted:
            raise UsageError("offload weights: the blocks have no frozen weights", hint="LoRA freezes them")
        if len(counted) != len(set(counted)):
            raise UsageError("offload weights: blocks share their weights, which then cannot come block by block")
        self.device: torch.device | None = None
        self._lane: Lane | None = None
        self._rooms: list[Tensor] = []
        self._holds: list[int | None] = [None] * PLACES
        self._arrived: list[Event] = [None] * PLACES
        self._backward_of: int | None = None
        self._follow(model)

    def _follow(self, model: nn.Module) -> None:
        """Wherever the model goes, and whenever a block begins."""
        apply, mine = model._apply, weakref.ref(model)

        def apply_to_the_rest(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
            device = function(torch.empty(0, device="cpu")).device
            if device != self.device:
                self.lie_beside(device)
            rooms = {room.untyped_storage()._cdata for room in self._rooms}
            apply(lambda each: each if each.untyped_storage()._cdata in rooms else function(each), recurse)
            found = mine()
            assert found is not None
            return found

        model._apply = apply_to_the_rest  # type: ignore[method-assign]
        for index, block in enumerate(self._blocks):
            block.module.register_forward_pre_hook(partial(self._begins, index))
            block.module.register_forward_hook(partial(self._ends, index))

    def lie_beside(self, device: torch.device) -> None:
        """Weights to the host's memory, room for two blocks on the device."""
        self.device, self._lane = device, Lane(device)
        pieces = HostPieces(device, "weights")
        largest = max(block.nbytes for block in self._blocks)
        self._rooms = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(PLACES)]
        for room in self._rooms:
            pieces.memory.copied(room, "frozen weights of one block at a time")
        self._holds, self._arrived = [None] * PLACES, [None] * PLACES
        for index, block in enumerate(self._blocks):  # one by one: the host need not hold all of them twice
            block.to_host(pieces)
            block.lie_in(self._rooms[index % PLACES])

    def _begins(self, index: int, block: nn.Module, _: Any) -> None:
        runs_again, self._backward_of = self._backward_of == index, None
        self._bring(index, -1 if runs_again else 1)

    def _ends(self, index: int, block: nn.Module, _: Any, output: Any) -> None:
        """Its backward begins when the gradient of what it gave is known; a checkpointed block then runs again."""
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._goes_back(index))

    def _goes_back(self, index: int) -> None:
        self._backward_of = index
        self._bring(index, -1)

    def _bring(self, index: int, way: int) -> None:
        if self.device is None:
            self.lie_beside(self._blocks[index].parameters[0].device)
        assert self._lane is not None
        if self._holds[index % PLACES] != index:
            self._fetch(index)
        following = index + way
        if 0 <= following < len(self._blocks) and self._holds[following % PLACES] != following:
            self._fetch(following)
        self._lane.wait(self._arrived[index % PLACES])

    def _fetch(self, index: int) -> None:
        """All work with what was there before has been given to the main stream by now."""
        assert self._lane is not None
        place, block = index % PLACES, self._blocks[index]
        room = self._rooms[place][: block.nbytes]
        self._arrived[place] = self._lane.copy(room, block.on_host, after=self._lane.now())
        self._holds[place] = index


class _Frozen:
    """The frozen parameters of one block, one after the other."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = [each for each in module.parameters() if not each.requires_grad]
        self.nbytes = 0
        self._places: list[int] = []
        for each in self.parameters:
            self._places.append(self.nbytes)
            self.nbytes += -(-each.numel() * each.element_size() // ALIGNED) * ALIGNED
        self._on_host: Tensor | None = None

    @property
    def on_host(self) -> Tensor:
        assert self._on_host is not None
        return self._on_host

    @torch.no_grad()
    def to_host(self, pieces: HostPieces) -> None:
        """The first time; from then on nothing but a copy of it is anywhere else."""
        if self._on_host is None:
            self._on_host = pieces.bytes(self.nbytes)
            for each, view in zip(self.parameters, self._views(self._on_host), strict=True):
                view.copy_(each)

    def lie_in(self, room: Tensor) -> None:
        for each, view in zip(self.parameters, self._views(room), strict=True):
            each.data = view

    def _views(self, room: Tensor) -> list[Tensor]:
        return [
            room[start : start + each.numel() * each.element_size()].view(each.dtype).view(each.shape)
            for each, start in zip(self.parameters, self._places, strict=True)
        ]
