"""Blocks and tensors that a call made, as they can be made again."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.events import Action
from memfit.tracing.repeated.state import PLAIN

Tensor = torch.Tensor
WIDENED = "widened"


@dataclass(frozen=True)
class MadeAgain:
    """A tensor of a call's own, by the number of its block among those of the call."""

    block: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool = False


class Maker:
    """Blocks are numbered from the first of a call."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def noted_blocks(self, first: int) -> list[tuple[Any, ...]]:
        """From the first on: of each its size, stream, category, op, module, stack, and whether it is a 16-bit tensor
        in fp32."""
        trace = self._tracer.trace
        column, widened = trace.stack_of, set(trace.facts.get(WIDENED, ())[-(len(trace.requested) - first) :])
        return [
            (trace.requested[i], trace.streams[i], trace.category(i), trace.op(i), trace.module(i),
             column[i] if i < len(column) else 0, i in widened)
            for i in range(first, len(trace.requested))
        ]  # fmt: skip

    def alloc(self, block: tuple[Any, ...]) -> int:
        trace = self._tracer.trace
        nbytes, stream, category, op, module, stack, widened = block
        trace.stack_of.extend([0] * (len(trace.requested) - len(trace.stack_of)))
        trace.stack_of.append(stack)
        made = int(trace.alloc(nbytes, stream=stream, category=category, op=op, module=module))
        if widened:
            trace.facts.setdefault(WIDENED, []).append(made)
        return made

    def repeat(self, events: list[tuple[int, int]], blocks: list[tuple[Any, ...]]) -> int:
        """Returns the number of the first block."""
        trace = self._tracer.trace
        first = len(trace.requested)
        for action, number in events:
            if action == Action.ALLOC:
                self.alloc(blocks[number])
            else:
                trace.free(first + number)
        return first

    def form(self, leaf: Any, first_block: int) -> Any:
        """Of what is returned; None for what cannot be made again."""
        if not isinstance(leaf, Tensor):
            return (leaf,) if isinstance(leaf, PLAIN) else None
        return None if self._tracer.values.read(leaf) is not None else self.form_of_tensor(leaf, first_block)

    def form_of_tensor(self, leaf: Tensor, first_block: int) -> MadeAgain | None:
        block = self._tracer.block_of(leaf)
        if type(leaf) is not Tensor or block is None or block < first_block:
            return None
        shape, stride, offset = tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset())
        return MadeAgain(block - first_block, leaf.dtype, shape, stride, offset, leaf.requires_grad)

    def storage(self, block: int, nbytes: int) -> torch.UntypedStorage:
        """Followed: the block is freed when it goes."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            raw = torch.empty(nbytes, dtype=torch.uint8, device=self._tracer.device)
            storage = raw.untyped_storage()
            self._tracer._follow(storage, block)
            return storage

    def tensor(self, made: MadeAgain, storage: torch.UntypedStorage) -> Tensor:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            empty = torch.empty(0, dtype=made.dtype, device=self._tracer.device)
            return empty.set_(storage, made.offset, made.shape, made.stride)


def held_elsewhere(returned: list[Any], leaves: list[Any]) -> bool:
    """Whether somebody beside the caller has a tensor that a call returns. What transformers returns has each as an
    item and as an attribute. `returned`: a list of that alone, for an interpreter that Dynamo has changed counts the
    arguments of a call twice."""
    is_mapping = isinstance(returned[0], Mapping)
    attributes = {id(value) for value in getattr(returned[0], "__dict__", {}).values()} if is_mapping else set()
    own = 4  # the structure that is returned, the list here, the name below, the argument of `getrefcount`
    return any(isinstance(leaf, Tensor) and sys.getrefcount(leaf) > own + (id(leaf) in attributes) for leaf in leaves)
