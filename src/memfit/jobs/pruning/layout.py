"""How a block's weights lie in one stretch of memory, and which stored tensors fill it.

A block travels as one copy, so its tensors lie one after the other. A stored tensor is a whole parameter or, for
experts that transformers keeps as one 3-D parameter and checkpoints store one by one, a part of one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memfit.errors import InputError
from memfit.models.checkpoint import Stored

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
class Piece:
    """A stored tensor, and the bytes of the block that it fills."""

    stored: Stored
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
    pieces: tuple[Piece, ...]
    nbytes: int

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {slot.name: slot.view(flat) for slot in self.slots}


def lay_out(block: nn.Module, prefix: str, where: Mapping[str, list[tuple[Stored, int]]]) -> Layout:
    """`where` says for each parameter of the model which stored tensors it is made of, and from which element on."""
    slots, pieces, at = [], [], 0
    for name, tensor in _persistent(block):
        slot = Slot(name, tuple(tensor.shape), tensor.dtype, at)
        slots.append(slot)
        for stored, first in where.get(f"{prefix}.{name}", ()):
            pieces.append(Piece(stored, slot, at + first * slot.dtype.itemsize))
        at = -(-(at + slot.nbytes) // ALIGN) * ALIGN
    return Layout(tuple(slots), tuple(pieces), at)


def _persistent(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    kept = set(module.state_dict(keep_vars=True))
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in kept)


# -- names -------------------------------------------------------------------------------------------------------------


def find_stored(model: nn.Module, stored: Mapping[str, Stored]) -> dict[str, list[tuple[Stored, int]]]:
    """Each tensor of the model with the stored ones that fill it, in order. What the model has no use for (a saved
    mask, a rotary table) is in none."""
    wanted = dict(_persistent_with_tied(model))
    prefix = getattr(model, "base_model_prefix", "")
    found: dict[str, list[tuple[Stored, int]]] = {}
    for name, tensor in stored.items():
        placed = _place(name, tensor, wanted, prefix)
        if placed is not None:
            target, first = placed
            found.setdefault(target, []).append((tensor, first))
    for name in found:
        found[name].sort(key=lambda part: part[1])
    return found


def _persistent_with_tied(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.state_dict(keep_vars=True).items()


def _place(name: str, tensor: Stored, wanted: Mapping[str, Tensor], prefix: str) -> tuple[str, int] | None:
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


def _part_of_experts(match: re.Match[str], tensor: Stored, wanted: Mapping[str, Tensor]) -> tuple[str, int] | None:
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
