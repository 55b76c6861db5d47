"""What a training keeps in host memory or computes again: activations, frozen weights, the optimizer.

The same for a plan as for a run, switched on before the model goes to its device: `use_block_levers` of the blocks, and
an optimizer of its own (`AdamWOnHost`). All of it lies in pinned memory, which a run takes and a plan counts.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memfit.errors import UsageError
from memfit.jobs.host import Event, HostMemory, Lane, finished
from memfit.jobs.settings import Checkpointing
from memfit.models.registry import block_list
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


# -- activations -------------------------------------------------------------------------------------------------------

LEAST = 1 * MiB
"""Smaller storages stay: a copy costs more than they take."""


class ActivationsOnHost:
    """What autograd saves for backward lies on the host, and comes back one block ahead.

    A saved storage is copied out on a side stream while the GPU goes on. It is let go when the next one is saved: the
    main stream then waits for its copy, which by that time has long been done. In backward, whoever needs a storage
    asks for the last one before it that is still to be used, too. So at any time one is leaving or one is arriving,
    whatever the timing: what is alive on the GPU depends on the order of events alone. All of its memory is taken on
    the main stream.

    Whole storages are kept, not tensors: views of one storage are kept once, as autograd itself would do.
    """

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


# -- frozen weights ----------------------------------------------------------------------------------------------------

PLACES = 2


class FrozenWeightsOnHost:
    """Frozen weights of the blocks lie on the host; the GPU has room for those of two blocks.

    Every second block uses the same room: its frozen parameters are views of it for good, and hold its values only
    while it runs. When a block begins, forward or backward, its weights have arrived, and those of the next one that
    way begin to come where the last one's were. Adapters, embedding, head and what belongs to no block stay on the GPU.

        FrozenWeightsOnHost(model)      # before `model.to(device)`, which carries it along
    """

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


# -- the optimizer -----------------------------------------------------------------------------------------------------


class AdamWOnHost(torch.optim.Optimizer):
    """AdamW whose state lies on the host and whose step is done by the CPU.

    It is torch's own AdamW, given copies of the weights in pinned memory. When a step is due, gradients are copied to
    the host, AdamW runs there, and the new weights are copied back: the GPU holds weights and gradients alone.
    Clipping, a gradient scaler and schedules see an ordinary optimizer over the GPU's parameters; what is saved is what
    AdamW saves.
    """

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        """The arguments of torch.optim.AdamW."""
        self._inner: torch.optim.AdamW | None = None
        self._copies: dict[Tensor, _Copy] = {}
        super().__init__(params, {})
        device = self.param_groups[0]["params"][0].device
        self._lane, self._pieces = Lane(device), HostPieces(device, "optimizer")
        groups = [{**group, "params": [self._copy_of(each) for each in group["params"]]} for group in self.param_groups]
        with self._pieces.memory.computing():
            self._inner = torch.optim.AdamW(groups, **settings)
        self._take_settings()

    def _copy_of(self, parameter: Tensor) -> Tensor:
        self._copies[parameter] = copy = _Copy(parameter, self._pieces)
        return copy.weight

    @property
    def _adamw(self) -> torch.optim.AdamW:
        assert self._inner is not None
        return self._inner

    # -- an optimizer's state is AdamW's own -------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        return {} if self._inner is None else self._inner.state

    @state.setter
    def state(self, value: Any) -> None:
        if self._inner is not None:
            self._inner.state = value

    def state_dict(self) -> dict[str, Any]:
        self._give_settings()
        return self._adamw.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._adamw.load_state_dict(state_dict)
        self._take_settings()

    def _take_settings(self) -> None:
        for mine, inner in zip(self.param_groups, self._adamw.param_groups, strict=True):
            mine.update({name: value for name, value in inner.items() if name != "params"})

    def _give_settings(self) -> None:
        """Schedules write the learning rate into this optimizer's groups."""
        for mine, inner in zip(self.param_groups, self._adamw.param_groups, strict=True):
            inner.update({name: value for name, value in mine.items() if name != "params"})

    # -- the step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._give_settings()
        arrived = None
        for parameter, copy in self._copies.items():
            arrived = copy.take_gradient(parameter, self._lane) or arrived
        finished(arrived)
        with self._pieces.memory.computing():
            self._adamw.step()
        for parameter, copy in self._copies.items():
            copy.give_weight(parameter)
        return loss


class _Copy:
    """Of one parameter: its weight, and room for its gradient."""

    def __init__(self, parameter: Tensor, pieces: HostPieces) -> None:
        self.weight = pieces.empty(parameter.shape, parameter.dtype)
        self._gradient = pieces.empty(parameter.shape, parameter.dtype)
        self._seen: tuple[int, int] | None = None
        """The parameter as it was when the two were last the same."""

    def take_gradient(self, parameter: Tensor, lane: Lane) -> Any:
        if parameter.grad is None:
            self.weight.grad = None
            return None
        if self._seen != _state_of(parameter):  # loaded, or written by somebody else
            lane.copy(self.weight, parameter, after=lane.now())
        self.weight.grad = self._gradient
        return lane.copy(self._gradient, parameter.grad, after=lane.now())

    def give_weight(self, parameter: Tensor) -> None:
        if self.weight.grad is not None:
            parameter.copy_(self.weight, non_blocking=True)
            self._seen = _state_of(parameter)


def _state_of(parameter: Tensor) -> tuple[int, int]:
    return parameter.data_ptr(), parameter._version


# -- the levers of a model's blocks ------------------------------------------------------------------------------------


def use_block_levers(
    model: Any,
    *,
    checkpointing: Checkpointing,
    offload: Collection[str],
    adapters: bool,
    setting: str,
    reentrant: bool = False,
) -> None:
    """A block is computed again in backward, all of it or what is cheap; its inputs lie here or on the host.
    `setting` is how the user asked for checkpointing."""
    on_host = ActivationsOnHost() if "activations" in offload else None
    if checkpointing != "none":
        if not hasattr(model, "gradient_checkpointing_enable"):
            raise UsageError(f"{setting} needs a transformers model", hint="checkpoint inside your own factory")
        if adapters:
            model.enable_input_require_grads()  # the embedding is frozen: without this no block would have gradients
        settings: dict[str, Any] = {"use_reentrant": reentrant}
        if checkpointing == "selective":
            settings["context_fn"] = selective_contexts(model)
        try:
            if hasattr(model, "activation_checkpointing_enable"):  # its name since transformers 5.23
                model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
            else:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        except ValueError as error:
            raise UsageError(f"{setting}: {str(error).splitlines()[0]}") from error
        for module in model.modules():
            function = vars(module).get("_gradient_checkpointing_func")
            if on_host is not None and function is not None:
                module._gradient_checkpointing_func = on_host.around(function)
    elif on_host is not None:
        on_host.watch_blocks(model)
    if "weights" in offload:
        FrozenWeightsOnHost(model)


aten = torch.ops.aten

PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}
"""And where their first matrix is among the arguments."""
BATCHED = {aten.bmm.default: 0, aten.baddbmm.default: 1}
ATTENTION_NAMES = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_grouped_mm",
)  # fmt: skip
ATTENTION = frozenset(getattr(aten, name).default for name in ATTENTION_NAMES if hasattr(aten, name))


def selective_contexts(model: Any) -> Callable[[], Any]:
    """What `torch.utils.checkpoint.checkpoint` takes as `context_fn`."""
    rank = max((int(each.r) for each in getattr(model, "peft_config", {}).values()), default=0)

    def policy(_: Any, op: Any, *args: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_kept(op, args, rank) else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


def is_kept(op: Any, args: tuple[Any, ...], rank: int = 0) -> bool:
    """Matrix products and attention are; norms, activation functions and all else between them is computed again. Two
    kinds of products are not worth their memory: the second one of an adapter, over no more terms than its rank, and
    the scores of attention written out, which are larger than what they are made of."""
    if op in ATTENTION:
        return True
    if op in PRODUCTS:
        left: Tensor = args[PRODUCTS[op]]
        return left.shape[-1] > rank
    if op in BATCHED:
        left, right = args[BATCHED[op] : BATCHED[op] + 2]
        return bool(left.shape[-1] >= right.shape[-1])
    return False
