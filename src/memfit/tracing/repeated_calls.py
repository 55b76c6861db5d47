"""A model called again and again without gradients, on tensors of the same shapes, as evaluations do hundreds of times.

Once some such calls have made the same events, the next ones are not run: their events are written down again, and
what they would return is made without them. A call counts only if nothing in it asked for a value, nothing that it made
stays but what it returns and the weights that autocast keeps, nobody else holds that, and no block of before it was
freed. It is told from others only while the model is what it was then: weights, modes, attributes, and no hooks.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from memfit.events import Action

Tensor = torch.Tensor
ALIKE = 8
"""Calls in a row that must have been the same: nobody waits for fewer."""
SKIPPED = (
    "calls of a model without gradients, on the same shapes, were told from the ones before: every one was taken to do"
    " the same"
)
PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.Size)


@dataclass(frozen=True)
class _MadeAgain:
    """A tensor of a call's own, by the number of its block among those of the call."""

    block: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class _NotedCall:
    events: list[tuple[int, int]]
    """Blocks are numbered from the first of the call."""
    blocks: list[tuple[Any, ...]]
    """Of each its size, stream, category, op, module and stack."""
    returned: list[Any]
    form: TreeSpec
    cast: list[_MadeAgain]
    """What autocast keeps of weights."""
    weights: list[weakref.ref[Tensor]] = field(compare=False)
    times: int = field(default=1, compare=False)


class RepeatedCalls:
    def __init__(self, names: Any) -> None:
        self._tracer, self._autocast = names.tracer, names.autocast
        self._seen: dict[Any, _NotedCall] = {}

    def run(self, module: torch.nn.Module, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # tensors as they are, not as the traced code sees them
            key = self._key(module, args, kwargs)
            before = self._seen.get(key)
            if before is not None and before.times >= ALIKE:
                self._tracer.assume(SKIPPED)
                return self._repeat(before)
        if key is None:
            return call()
        tracer, trace = self._tracer, self._tracer.trace
        events, blocks, asked = len(trace), len(trace.requested), tracer.answers.questions
        out = call()
        with torch._C.DisableTorchFunction():
            now = None if tracer.answers.questions != asked else self._noted(events, blocks, out)
        if now is None:
            self._seen.pop(key, None)
        elif now == before:
            before.times += 1
        else:
            self._seen[key] = now
        return out

    def _key(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        signs: list[Any] = []
        for leaf in leaves:
            if type(leaf) is Tensor and self._tracer.place(leaf) == "cuda":
                signs.append((leaf.dtype, leaf.shape, leaf.stride(), leaf.requires_grad))
            elif isinstance(leaf, PLAIN):
                signs.append(leaf)
            else:
                return None
        state = _state(module)
        if state is None:
            return None
        cast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), len(self._autocast._cache)
        phase = [mark.phase for mark in self._tracer.trace.marks[-1:]]  # the first call of a phase begins it
        return weakref.ref(module), state, str(form), tuple(signs), cast, _settings(), *phase

    def _noted(self, first_event: int, first_block: int, out: Any) -> _NotedCall | None:
        trace = self._tracer.trace
        events: list[tuple[int, int]] = []
        alive: set[int] = set()
        for at in range(first_event, len(trace)):
            action, block = trace.actions[at], trace.subjects[at] - first_block
            if action not in (Action.ALLOC, Action.FREE) or block < 0:
                return None
            events.append((action, block))
            alive.add(block) if action == Action.ALLOC else alive.remove(block)
        leaves, form = tree_flatten(out)
        if _held_elsewhere(leaves):
            return None
        returned = [self._made(leaf, first_block) for leaf in leaves]
        weights, cast = [], []
        for weight, copy in self._autocast._cache.values():
            if (form_of_copy := self._form(copy, first_block)) is not None:
                weights.append(weakref.ref(weight))
                cast.append(form_of_copy)
        kept = {each.block for each in (*returned, *cast) if isinstance(each, _MadeAgain)}
        if any(each is None for each in returned) or kept != alive:
            return None
        blocks = [
            (trace.requested[i], trace.streams[i], trace.category(i), trace.op(i), trace.module(i), self._stack(i))
            for i in range(first_block, len(trace.requested))
        ]
        return _NotedCall(events, blocks, returned, form, cast, weights)

    def _made(self, leaf: Any, first_block: int) -> Any:
        """None for what cannot be made again."""
        if not isinstance(leaf, Tensor):
            return (leaf,) if isinstance(leaf, PLAIN) else None
        return None if self._tracer.values.read(leaf) is not None else self._form(leaf, first_block)

    def _form(self, leaf: Tensor, first_block: int) -> _MadeAgain | None:
        block = self._tracer.block_of(leaf)
        if type(leaf) is not Tensor or block is None or block < first_block:
            return None
        return _MadeAgain(block - first_block, leaf.dtype, tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset()))

    def _stack(self, block: int) -> int:
        column = self._tracer.trace.stack_of
        return column[block] if block < len(column) else 0

    def _repeat(self, call: _NotedCall) -> Any:
        trace = self._tracer.trace
        first = len(trace.requested)
        trace.stack_of.extend([0] * (first - len(trace.stack_of)))
        for action, number in call.events:
            if action == Action.ALLOC:
                nbytes, stream, category, op, module, stack = call.blocks[number]
                trace.stack_of.append(stack)
                trace.alloc(nbytes, stream=stream, category=category, op=op, module=module)
            else:
                trace.free(first + number)
        storages: dict[int, torch.UntypedStorage] = {}
        for reference, copy in zip(call.weights, call.cast, strict=True):
            weight, made = reference(), self._tensor(copy, first, call, storages)
            assert weight is not None, "the model is there, and so are its weights"
            if (known := self._tracer.values.read(weight)) is not None:
                self._tracer.values.put(made, known)
            self._autocast._cache[id(weight)] = (weight, made)
        leaves = [
            self._tensor(each, first, call, storages) if isinstance(each, _MadeAgain) else each[0]
            for each in call.returned
        ]
        return tree_unflatten(leaves, call.form)

    def _tensor(
        self, made: _MadeAgain, first: int, call: _NotedCall, storages: dict[int, torch.UntypedStorage]
    ) -> Tensor:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if made.block not in storages:
                raw = torch.empty(call.blocks[made.block][0], dtype=torch.uint8, device=self._tracer.device)
                storages[made.block] = raw.untyped_storage()
                self._tracer._follow(storages[made.block], first + made.block)
            empty = torch.empty(0, dtype=made.dtype, device=self._tracer.device)
            return empty.set_(storages[made.block], made.offset, made.shape, made.stride)


def _settings() -> tuple[Any, ...]:
    """Of torch, which choose kernels."""
    cuda = torch.backends.cuda
    kernels = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled, cuda.cudnn_sdp_enabled)
    return (
        *(enabled() for enabled in kernels), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.enabled,
    )  # fmt: skip


def _state(module: torch.nn.Module) -> tuple[Any, ...] | None:
    """What a call may depend on beside its arguments; None where a hook could do anything."""
    found: list[Any] = []
    for each in module.modules():
        if each._forward_hooks or each._forward_pre_hooks:
            return None
        found.append(id(each))
        found.extend(sign for name, value in vars(each).items() if name not in HOOKS for sign in (name, _sign(value)))
    return tuple(found)


HOOKS = frozenset(name for name in vars(torch.nn.Module()) if name not in ("training", "_parameters", "_buffers"))


def _sign(value: Any, depth: int = 0) -> Any:
    """Of a plain value itself, of a tensor what it is like, of a container or an object what is in it."""
    if isinstance(value, Tensor):
        return id(value), value.dtype, value.shape
    if isinstance(value, PLAIN):
        return value if value == value else "nan"
    if depth < 2 and isinstance(value, Mapping):
        return id(value), len(value), *(_sign(each, depth + 1) for each in value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return id(value), len(value)
    if depth < 1 and hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)):
        return id(value), *(_sign(each, 2) for each in vars(value).values())
    return id(value)


def _held_elsewhere(leaves: list[Any]) -> bool:
    """Whether somebody beside the caller has a tensor that a call returns."""
    own = 4  # the structure that is returned, the list here, the name below, the argument of `getrefcount`
    return any(isinstance(leaf, Tensor) and sys.getrefcount(leaf) > own for leaf in leaves)


@contextmanager
def repeated_calls_skipped(names: Any) -> Iterator[RepeatedCalls]:
    """For modules that are called by no other one."""
    repeated, tracer = RepeatedCalls(names), names.tracer
    call = torch.nn.Module.__call__

    def call_or_repeat(module: Any, *args: Any, **kwargs: Any) -> Any:
        if tracer.modules.depth or torch.is_grad_enabled() or module.training or tracer.in_backward:
            return call(module, *args, **kwargs)
        return repeated.run(module, lambda: call(module, *args, **kwargs), args, kwargs)

    with mock.patch.object(torch.nn.Module, "__call__", call_or_repeat):
        yield repeated
