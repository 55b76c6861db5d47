"""What autograd saves for backward lies in pinned host memory, and comes back one block ahead.

A saved storage is copied out on a side stream while the GPU goes on. It is let go when the next one is saved: the main
stream then waits for its copy, which by that time has long been done. In backward, whoever needs a storage asks for the
last one before it that is still to be used, too. So at any time one is leaving or one is arriving, whatever the timing:
what is alive on the GPU depends on the order of events alone. All of its memory is taken on the main stream.

Whole storages are kept, not tensors: views of one storage are kept once, as autograd itself would do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memfit.jobs.host import Event, Lane
from memfit.jobs.training.offload.host import HostPieces, blocks_of
from memfit.units import MiB

LEAST = 1 * MiB
"""Smaller storages stay: a copy costs more than they take."""


class ActivationsOnHost:
    def __init__(self) -> None:
        self._carrier: _Carrier | None = None
        self._weights: frozenset[int] = frozenset()

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """A checkpoint function whose inputs, which are all that it keeps, lie on the host."""

        def checkpoint_on_host(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with saved_tensors_hooks(self.pack, self.unpack):
                return checkpoint(function, *args, **kwargs)

        return checkpoint_on_host

    def watch_blocks(self, model: nn.Module) -> None:
        """Without checkpointing: whatever is saved inside a block."""
        for block in blocks_of(model, lever="offload activations"):
            open_ones: list[saved_tensors_hooks] = []
            block.register_forward_pre_hook(partial(self._enter, open_ones))
            block.register_forward_hook(partial(self._leave, open_ones), always_call=True)

    def _enter(self, open_ones: list[saved_tensors_hooks], block: nn.Module, _: Any) -> None:
        tensors = (*block.parameters(), *block.buffers())
        self._weights = frozenset(each.untyped_storage()._cdata for each in tensors)
        hooks = saved_tensors_hooks(self.pack, self.unpack)
        hooks.__enter__()
        open_ones.append(hooks)

    @staticmethod
    def _leave(open_ones: list[saved_tensors_hooks], *_: Any) -> None:
        if open_ones:
            open_ones.pop().__exit__(None, None, None)

    def pack(self, tensor: Tensor) -> Tensor | _SavedTensor:
        storage = tensor.untyped_storage()
        if type(tensor) is not Tensor or storage.nbytes() < LEAST or storage._cdata in self._weights:
            return tensor
        if self._carrier is None or self._carrier.device != tensor.device:
            self._carrier = _Carrier(tensor.device)
        return _SavedTensor(self._carrier.keep(storage, tensor._version), tensor)

    def unpack(self, saved: Tensor | _SavedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        raw = saved.kept.carrier.fetch(saved.kept)
        return raw.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)


class _SavedTensor:
    """One tensor that autograd saved, by its place in a storage."""

    __slots__ = ("dtype", "kept", "offset", "size", "stride")

    def __init__(self, kept: _HostCopy, tensor: Tensor) -> None:
        self.kept = kept
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()


class _HostCopy:
    """A storage on the host, and while it is there on the device."""

    __slots__ = ("__weakref__", "before", "carrier", "here", "moved", "piece", "uses", "version")

    def __init__(self, carrier: _Carrier, piece: Tensor, version: int, before: Callable[[], _HostCopy | None]) -> None:
        self.carrier, self.piece, self.version, self.before = carrier, piece, version, before
        self.uses = 0
        self.here: Tensor | None = None
        """Its bytes on the device."""
        self.moved: Event = None
        """When its last copy, out or in, is done."""

    def __del__(self) -> None:
        if self.here is not None:  # it came for nothing: the graph was let go without backward
            self.carrier.wait_for(self)
        # Whoever gets this memory next fills it on the same side stream, after what is still being copied.
        self.carrier.pieces.give_back(self.piece)


class _Carrier:
    """To the host of one device and back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pieces = HostPieces(device, "activations")
        self._lane = Lane(device)
        self._leaving: _HostCopy | None = None
        self._last: Callable[[], _HostCopy | None] = lambda: None
        self._known: dict[int, tuple[weakref.ref[Any], weakref.ref[_HostCopy]]] = {}

    def keep(self, storage: torch.UntypedStorage, version: int) -> _HostCopy:
        kept = self._found(storage, version) or self._copied_out(storage, version)
        kept.uses += 1
        return kept

    def _found(self, storage: torch.UntypedStorage, version: int) -> _HostCopy | None:
        """The same storage, saved before and not changed since."""
        of, kept = self._known.get(storage._cdata, (None, None))
        found = None if of is None or of() is None or kept is None else kept()
        return found if found is not None and found.version == version else None

    def _copied_out(self, storage: torch.UntypedStorage, version: int) -> _HostCopy:
        if self._leaving is not None:
            self._drop(self._leaving)  # by now it has left
        kept = _HostCopy(self, self.pieces.bytes(storage.nbytes()), version, self._last)
        kept.here = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        self.pieces.memory.copied(kept.here)
        kept.moved = self._lane.copy(kept.piece, kept.here, after=self._lane.now())
        self._leaving, self._last = kept, weakref.ref(kept)
        key = storage._cdata
        known = self._known
        known[key] = (weakref.ref(storage, lambda _: known.pop(key, None)), weakref.ref(kept))
        return kept

    def fetch(self, kept: _HostCopy) -> Tensor:
        here = self._come(kept)
        kept.uses -= 1
        before = kept.before()
        while before is not None and before.uses <= 0:
            before = before.before()
        if before is not None:
            self._come(before)
        self.wait_for(kept)
        if kept.uses <= 0:
            self._drop(kept)
        return here

    def _come(self, kept: _HostCopy) -> Tensor:
        if kept.here is None:
            kept.here = torch.empty(len(kept.piece), dtype=torch.uint8, device=self.device)
            self.pieces.memory.copied(kept.here)
            kept.moved = self._lane.copy(kept.here, kept.piece, after=self._lane.now())
        return kept.here

    def wait_for(self, kept: _HostCopy) -> None:
        self._lane.wait(kept.moved)

    def _drop(self, kept: _HostCopy) -> None:
        """Its memory may be used for something else by what the main stream does next."""
        self.wait_for(kept)
        kept.here = None
        if kept is self._leaving:
            self._leaving = None
