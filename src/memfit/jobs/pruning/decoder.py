"""A causal language model as front, blocks and tail, without weights, and how a block's weights lie in memory.

The model is built on meta. Its blocks are taken out and stand-ins put in their place, so that the model's own forward
still runs: it embeds, builds masks and rotary tables, and calls each stand-in with what that block is to be given. The
stand-ins write that down, per block, which is how sliding windows and several rotary tables come out right. The same
forward with the last stand-in returning given hidden states is the tail: final norm, head, and whatever the model does
to its logits.

A block travels as one copy, so its tensors lie one after the other. A stored tensor is a whole parameter or, for
experts that transformers keeps as one 3-D parameter and checkpoints store one by one, a part of one.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memfit.errors import InputError
from memfit.jobs.quantised import DTYPES
from memfit.models.checkpoint import StoredTensor, WeightStore
from memfit.models.registry import ModelSource, build_model, head_named, is_encoder, load_config, resolve
from memfit.models.stored_weights import refuse_stored

ALIGN = 256
TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
RENAMED = ((re.compile(r"^embed_out\."), "lm_head."), (re.compile(r"\.block_sparse_moe\."), ".mlp."))
"""Names that transformers changed after checkpoints had been published: GPT-NeoX, Mixtral."""
ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")
GATE_UP = {"w1": 0, "gate_proj": 0, "w3": 1, "up_proj": 1}


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of a block and where it lies."""

    name: str
    """Inside the block: `self_attn.q_proj.weight`."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A stored tensor, and the bytes of the block that it fills."""

    stored: StoredTensor
    slot: Slot
    offset: int
    """From the beginning of the block."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.stored.shape) * self.slot.dtype.itemsize

    @property
    def as_stored(self) -> bool:
        return TORCH_DTYPES.get(self.stored.dtype) == self.slot.dtype


@dataclass(frozen=True, slots=True)
class Layout:
    slots: tuple[Slot, ...]
    pieces: tuple[StoredPiece, ...]
    nbytes: int

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {slot.name: slot.view(flat) for slot in self.slots}


def lay_out(block: nn.Module, prefix: str, where: Mapping[str, list[tuple[StoredTensor, int]]]) -> Layout:
    """`where` says for each parameter of the model which stored tensors it is made of, and from which element on."""
    slots, pieces, at = [], [], 0
    for name, tensor in _persistent(block):
        slot = Slot(name, tuple(tensor.shape), tensor.dtype, at)
        slots.append(slot)
        for stored, first in where.get(f"{prefix}.{name}", ()):
            pieces.append(StoredPiece(stored, slot, at + first * slot.dtype.itemsize))
        at = -(-(at + slot.nbytes) // ALIGN) * ALIGN
    return Layout(tuple(slots), tuple(pieces), at)


def _persistent(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    kept = set(module.state_dict(keep_vars=True))
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in kept)


# -- names -------------------------------------------------------------------------------------------------------------


def find_stored(model: nn.Module, stored: Mapping[str, StoredTensor]) -> dict[str, list[tuple[StoredTensor, int]]]:
    """Each tensor of the model with the stored ones that fill it, in order. What the model has no use for (a saved
    mask, a rotary table) is in none."""
    wanted = model.state_dict(keep_vars=True)
    prefix = getattr(model, "base_model_prefix", "")
    found: dict[str, list[tuple[StoredTensor, int]]] = {}
    for name, tensor in stored.items():
        placed = _place(name, tensor, wanted, prefix)
        if placed is not None:
            target, first = placed
            found.setdefault(target, []).append((tensor, first))
    for name in found:
        found[name].sort(key=lambda part: part[1])
    return found


def _place(name: str, tensor: StoredTensor, wanted: Mapping[str, Tensor], prefix: str) -> tuple[str, int] | None:
    for candidate in _spellings(name, prefix):
        if candidate in wanted:
            if tensor.shape != tuple(wanted[candidate].shape):
                raise InputError(
                    f"weight '{name}' has the shape {list(tensor.shape)}; "
                    f"the model's config asks for {list(wanted[candidate].shape)}"
                )
            return candidate, 0
        expert = ONE_EXPERT.fullmatch(candidate)
        if expert is not None and (part := _part_of_experts(expert, tensor, wanted)) is not None:
            return part
    return None


def _spellings(name: str, prefix: str) -> Iterable[str]:
    renamed = name
    for old, new in RENAMED:
        renamed = old.sub(new, renamed)
    for each in dict.fromkeys((name, renamed)):
        yield each
        if prefix and not each.startswith(f"{prefix}."):
            yield f"{prefix}.{each}"
        elif prefix:
            yield each.removeprefix(f"{prefix}.")


def _part_of_experts(
    match: re.Match[str], tensor: StoredTensor, wanted: Mapping[str, Tensor]
) -> tuple[str, int] | None:
    """`experts.3.up_proj` is the second half of the fourth matrix of `experts.gate_up_proj`."""
    path, number, which = match[1], int(match[2]), match[3]
    target = f"{path}.gate_up_proj" if which in GATE_UP else f"{path}.down_proj"
    if target not in wanted:
        return None
    experts, rows, columns = wanted[target].shape
    rows = rows // 2 if which in GATE_UP else rows
    if number >= experts or tensor.shape != (rows, columns):
        raise InputError(
            f"weight '{tensor.name}' has the shape {list(tensor.shape)}; "
            f"the model's config asks for {experts} experts of {[rows, columns]}"
        )
    halves = 2 if which in GATE_UP else 1
    return target, (number * halves + GATE_UP.get(which, 0)) * rows * columns


class Weights(Protocol):
    """Where stored tensors come from: files, or memory."""

    @property
    def stored(self) -> dict[str, StoredTensor]: ...

    def read_into(self, name: str, out: memoryview, start: int = 0) -> None: ...


@dataclass(frozen=True)
class Call:
    """What the model gives a block besides the hidden states."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def read_settings(folder: str | Path) -> tuple[ModelSource, Any]:
    """A folder's config, of a model that can be pruned. Its weights need not be there yet."""
    source = resolve(str(folder))
    if source.kind not in ("folder", "hub", "config"):
        raise InputError(f"'{folder}' is a {source.kind} without weights", hint="give a folder with weights")
    config = load_config(source)
    check_decoder(source, config)
    return source, config


class _Reached(Exception):
    """The last block was reached: what comes after it is not wanted."""


def check_decoder(source: ModelSource, config: Any) -> None:
    refuse_stored(source.kind, source.target, source.name)
    if head_named(source) is not None:
        raise InputError(f"{source.name} is a {config.architectures[0]}; only language models are pruned")
    if is_encoder(config):
        raise InputError(f"{source.name} is an encoder; only decoders that predict the next token are pruned")


class Decoder:
    def __init__(
        self, model: Any, weights: Weights | None, *, folder: Path | None = None, converts: bool = False
    ) -> None:
        """`weights` may be None where only shapes matter. `converts`: what is written has the type computed with, not
        the one stored."""
        self.model: Any = model.eval()
        self.weights = weights
        self.folder = folder
        self.converts = converts
        self.config: Any = model.config
        self.path, self.blocks = _find_blocks(model)
        self.dtype = next(p.dtype for p in self.blocks[0].parameters() if p.is_floating_point())
        self.hidden_size = int(self.config.hidden_size)
        self.vocab_size = int(self.config.vocab_size)
        where = {} if weights is None else find_stored(model, weights.stored)
        self.layouts = [lay_out(block, f"{self.path}.{i}", where) for i, block in enumerate(self.blocks)]
        self._taken: list[tuple[dict[str, Any], str, Any]] = []
        self._outer = _Outer(model, self.path, where)
        if weights is not None:
            self._check_complete()
        _make_buffers(model)
        last = len(self.blocks) - 1
        self._stand_ins = [_StandIn(block, first=i == 0, last=i == last) for i, block in enumerate(self.blocks)]
        holder = model.get_submodule(self.path)
        for i, stand_in in enumerate(self._stand_ins):
            holder._modules[str(i)] = stand_in

    @classmethod
    def open(cls, folder: str | Path, *, dtype: str = "auto") -> Decoder:
        """From a folder with config.json and safetensors. auto is the type that most of the weights are stored in."""
        source, _ = read_settings(folder)
        where = Path(source.target).parent
        weights = WeightStore.open(where)
        chosen = _stored_dtype(weights) if dtype == "auto" else DTYPES[dtype]
        with torch.device("meta"):
            model = build_model(source, dtype=chosen)
        return cls(model, weights, folder=where, converts=dtype != "auto")

    @property
    def block_bytes(self) -> int:
        return max(layout.nbytes for layout in self.layouts)

    def take_calls(self) -> list[Call]:
        """What the blocks were given in the last `front`; it is kept here no longer."""
        calls = [stand_in.call for stand_in in self._stand_ins]
        for stand_in in self._stand_ins:
            stand_in.call = Call()
        return calls

    def front(self, ids: Tensor) -> Tensor:
        """Embed ids [q, L] with the model's own code, up to the first block. The weights used must be there."""
        for stand_in in self._stand_ins:
            stand_in.returned = None
        try:
            self.model.base_model(input_ids=ids, use_cache=False)
        except _Reached as reached:
            forget_frames(reached)
        hidden = self._stand_ins[0].hidden
        assert hidden is not None
        self._stand_ins[0].hidden = None
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The tail of the model on what left the last block. It looks at each token by itself."""
        last = self._stand_ins[-1]
        last.returned = hidden
        table = self.model.get_input_embeddings()
        ignored = hidden.new_zeros(()).expand(*hidden.shape[:2], table.weight.shape[1])
        try:
            logits: Tensor = self.model(inputs_embeds=ignored, use_cache=False).logits
        finally:
            last.returned = None
            self._stand_ins[0].hidden = None
        return logits

    def outer_weights(self, load: LoadOuter) -> AbstractContextManager[None]:
        """While this is open, a module outside the blocks gets its weights when it is first called."""
        return self._outer.loading(load)

    def run(self, index: int, hidden: Tensor, call: Call) -> Tensor:
        out = self.blocks[index](hidden, *call.args, **call.kwargs)
        made: Tensor = out[0] if isinstance(out, tuple) else out
        return made

    def put_in_place(self, index: int, weights: Mapping[str, nn.Parameter], device: torch.device) -> None:
        """Give a block's modules these tensors for their own, in the place of the last block's."""
        self.take_out()
        for name, tensor in weights.items():
            path, _, leaf = name.rpartition(".")
            module = self.blocks[index].get_submodule(path)
            holder: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
            self._taken.append((holder, leaf, holder[leaf]))
            holder[leaf] = tensor
        move_tables(self.blocks[index], device)

    def take_out(self) -> None:
        """Leave the block without weights, as it was built."""
        while self._taken:
            holder, leaf, before = self._taken.pop()
            holder[leaf] = before

    def _check_complete(self) -> None:
        for i, layout in enumerate(self.layouts):
            filled = dict.fromkeys((slot.name for slot in layout.slots), 0)
            for piece in layout.pieces:
                filled[piece.slot.name] += piece.nbytes
                if piece.stored.dtype not in TORCH_DTYPES and not piece.as_stored:
                    raise InputError(
                        f"weight '{piece.stored.name}' is stored as {piece.stored.dtype}",
                        hint="quantised weights cannot be pruned; use the original model",
                    )
            for slot in layout.slots:
                if filled[slot.name] != slot.nbytes:
                    raise _lacking(f"{self.path}.{i}.{slot.name}")
        for name in self._outer.missing:
            raise _lacking(name)


def move_tables(model: nn.Module, device: torch.device) -> None:
    """What no checkpoint holds, such as rotary frequencies."""
    for module in model.modules():
        for leaf in module._non_persistent_buffers_set:
            buffer = module._buffers.get(leaf)
            if buffer is not None:
                module._buffers[leaf] = buffer.to(device)


def _lacking(name: str) -> InputError:
    return InputError(
        f"the weights lack '{name}'", hint="the folder's config.json and its weights must be of the same model"
    )


class _StandIn(nn.Module):
    """In a block's place: notes what it is called with. Asked for anything else, it answers as the block would."""

    def __init__(self, block: nn.Module, *, first: bool, last: bool) -> None:
        super().__init__()
        object.__setattr__(self, "_block", block)  # not a child: the block's weights are not the model's any more
        self.first, self.last = first, last
        self.call = Call()
        self.hidden: Tensor | None = None
        self.returned: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_block"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden: Tensor = args[0] if args else kwargs.pop("hidden_states")
        if self.first:
            self.hidden = hidden
        if self.returned is not None:
            return self.returned
        self.call = Call(args[1:], kwargs)
        if self.last:
            raise _Reached
        return hidden


def _find_blocks(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """The list of as many modules as the config says there are layers, in no other list."""
    if not hasattr(model.config, "num_hidden_layers"):
        raise InputError(f"a {type(model).__name__} is no model of transformers; only those are pruned")
    count = int(model.config.num_hidden_layers)  # type: ignore[arg-type]
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    for name, found in lists.items():
        if len(found) == count and not any(name.startswith(f"{other}.") for other in lists):
            return name, list(found)
    raise InputError(f"cannot find the {count} blocks of a {type(model).__name__}")


def _stored_dtype(weights: WeightStore) -> torch.dtype:
    total: dict[str, int] = {}
    for tensor in weights.stored.values():
        total[tensor.dtype] = total.get(tensor.dtype, 0) + tensor.nbytes
    most = max(total, key=lambda name: total[name], default="")
    if most not in ("F32", "F16", "BF16"):
        raise InputError(
            f"the weights are stored as {most or 'nothing'}", hint="F32, F16 and BF16 can be pruned; --dtype converts"
        )
    return TORCH_DTYPES[most]


def _make_buffers(model: nn.Module) -> None:
    """Tables that no checkpoint holds (rotary frequencies, a scale) are made in host memory by the model's own code."""
    for path, module in model.named_modules():
        empty = [name for name in module._non_persistent_buffers_set if module._buffers.get(name) is not None]
        if not empty:
            continue
        for name in empty:
            buffer = module._buffers[name]
            assert buffer is not None
            if buffer.is_meta:
                module._buffers[name] = torch.full(buffer.shape, torch.nan, dtype=buffer.dtype, device="cpu")
        with torch.device("cpu"), torch.no_grad():
            model._init_weights(module)  # type: ignore[operator]
        for name in empty:
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_floating_point() and bool(buffer.isnan().any()):
                raise InputError(f"transformers does not say how to make the table '{path}.{name}' of this model")


LoadOuter = Callable[[nn.Parameter, Sequence[StoredTensor]], Tensor]


class _Outer:
    """The weights outside the blocks: embedding, final norm, head."""

    def __init__(self, model: nn.Module, blocks: str, where: dict[str, list[tuple[StoredTensor, int]]]) -> None:
        self._owners: list[tuple[nn.Module, dict[str, nn.Parameter]]] = []
        self._stored: dict[int, list[StoredTensor]] = {}
        self.missing: list[str] = []
        tied: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            tied.setdefault(id(parameter), []).append(name)
        for path, module in model.named_modules():
            if path == blocks or path.startswith(f"{blocks}."):
                continue
            own = {name: p for name, p in module._parameters.items() if p is not None}
            if own:
                self._owners.append((module, own))
            for name, parameter in own.items():
                parts = next((where[each] for each in tied[id(parameter)] if each in where), None)
                if parts is None:
                    self.missing.append(f"{path}.{name}")
                self._stored[id(parameter)] = [stored for stored, _ in parts or ()]

    @contextmanager
    def loading(self, load: LoadOuter) -> Iterator[None]:
        loaded: dict[int, nn.Parameter] = {}  # by the parameter on meta: a tied head is the embedding

        def fetch(module: nn.Module, own: dict[str, nn.Parameter]) -> None:
            for name, parameter in own.items():
                if id(parameter) not in loaded:
                    made = load(parameter, self._stored[id(parameter)])
                    loaded[id(parameter)] = nn.Parameter(made, requires_grad=False)
                module._parameters[name] = loaded[id(parameter)]

        handles = []
        for module, own in self._owners:
            handles.append(module.register_forward_pre_hook(lambda m, _, own=own: fetch(m, own)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module, own in self._owners:
                module._parameters.update(own)


def forget_frames(error: BaseException) -> None:
    """What an exception passed through holds tensors; they are not to live until Python's collector comes by."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
