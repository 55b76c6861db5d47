"""What the traced program's own variables hold when a backward pass begins, and gradients that it zeroes in place.

`outputs = model(**batch); outputs.loss.backward()` keeps the logits while the gradients are made, and until the next
batch's forward pass has ended. Which blocks those are, and which of them autograd holds as well, goes into the facts of
the trace: what it costs is computed later (`analysis/advice.py`).
"""

from __future__ import annotations

import dis
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any
from unittest import mock

import torch

from memfit.events import Action, Trace
from memfit.tracing.python_stacks import OURS

HELD, ZEROED = "held", "zeroed"
MOST_LOOKS = 32
"""Backward passes that are looked at: more of them show nothing new."""
READS_ITS_NAMES = frozenset({"locals", "vars", "dir", "exec", "eval", "f_locals"})
"""Functions that ask for their own variables by name keep a copy of them that looking here would change."""
DEEPEST, MOST_ITEMS = 3, 256


@contextmanager
def noting_what_is_held(tracer: Any, is_own: Callable[[str], bool], *, drops_gradients: bool) -> Iterator[None]:
    """`drops_gradients`: as if every `zero_grad` let them go."""
    around, looks = tracer.on_backward, 0

    def look_first(begins: bool) -> None:
        nonlocal looks
        if begins and looks < MOST_LOOKS and not tracer.in_backward:
            looks += 1
            found = _held(tracer, is_own)
            if found:
                tracer.trace.facts.setdefault(HELD, []).append([len(tracer.trace), found])
        around(begins)

    tracer.on_backward = look_first
    with _noting_zeroed(tracer, is_own, drops_gradients):
        yield
    tracer.on_backward = around


def _held(tracer: Any, is_own: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Not what something else refers to as well, an attribute for one: there a `del` frees nothing."""
    begin = _first_block_of_forward(tracer.trace)
    variables: dict[str, tuple[FrameType, set[int]]] = {}
    tensors: dict[int, torch.Tensor] = {}
    references: dict[int, int] = defaultdict(int)
    for frame in _own_frames(is_own):
        if not READS_ITS_NAMES.isdisjoint(frame.f_code.co_names):
            continue
        variables_there = frame.f_locals
        for name, value in variables_there.items():
            for tensor, times in _tensors(value):
                if _made_since(tracer, tensor, begin):
                    tensors[id(tensor)] = tensor
                    references[id(tensor)] += times
                    variables.setdefault(name, (frame, set()))[1].add(id(tensor))
                del tensor
            del value
        if frame.f_code.co_flags & CO_OPTIMIZED and isinstance(variables_there, dict):
            variables_there.clear()  # before Python 3.13 the frame keeps this copy, and all that is in it
    saved = _saved_by_autograd(tracer, list(tensors.values()))
    free = {number: tracer.block_of(tensors[number]) for number in tensors if _is_held_by(tensors, number, references)}
    found = []
    for name, (frame, numbers) in variables.items():
        blocks = sorted({free[number] for number in numbers if number in free})
        if blocks:
            found.append(
                {
                    "name": name, "file": frame.f_code.co_filename, "line": frame.f_lineno, "blocks": blocks,
                    "saved": [block for block in blocks if block in saved], "read_again": _read_again(frame, name),
                }
            )  # fmt: skip
    return found


def _is_held_by(tensors: Mapping[int, torch.Tensor], number: int, references: Mapping[int, int]) -> bool:
    """Whether these references are all that there are: but the one in `tensors`, and the argument of `getrefcount`."""
    return sys.getrefcount(tensors[number]) - 2 <= references[number]


def _first_block_of_forward(trace: Trace) -> int:
    """Blocks are numbered in the order of their making."""
    begin = len(trace.requested)
    for event in range(len(trace) - 1, -1, -1):
        if trace.actions[event] == Action.ALLOC:
            begin = trace.subjects[event]
        elif trace.actions[event] == Action.MARK and trace.marks[trace.subjects[event]].phase == "forward":
            break
    return begin


def _own_frames(is_own: Callable[[str], bool]) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "run_traced":
            return
        if is_own(frame.f_code.co_filename) and not frame.f_code.co_filename.startswith(OURS):
            yield frame
        frame = frame.f_back


def _tensors(value: Any, depth: int = 0) -> Iterator[tuple[torch.Tensor, int]]:
    """With how often they are referred to from here: what transformers returns has each as an item and an attribute."""
    if isinstance(value, torch.nn.Parameter):
        return
    if isinstance(value, torch.Tensor):
        yield value, 1
    elif depth < DEEPEST and isinstance(value, (list, tuple)):
        for item in value[-MOST_ITEMS:]:
            yield from _tensors(item, depth + 1)
    elif depth < DEEPEST and isinstance(value, Mapping) and len(value) <= MOST_ITEMS:
        attributes = list(map(id, getattr(value, "__dict__", {}).values()))
        for item in list(value.values()):
            for tensor, times in _tensors(item, depth + 1):
                yield tensor, times + attributes.count(id(tensor))
    elif depth < DEEPEST and hasattr(type(value), "__dataclass_fields__"):
        fields = type(value).__dataclass_fields__  # some have slots, and no `__dict__`
        yield from _tensors([getattr(value, name, None) for name in fields], depth + 1)


def _made_since(tracer: Any, tensor: torch.Tensor, begin: int) -> bool:
    block = tracer.block_of(tensor)
    return block is not None and block >= begin and not tensor.is_leaf


def _saved_by_autograd(tracer: Any, tensors: list[torch.Tensor]) -> set[int]:
    """Blocks that nodes of these tensors' graphs keep for the backward pass."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, saved = set(waiting), set()
    while waiting:
        node = waiting.pop()
        for storage in getattr(node, "held_of_told_calls", {}).values():
            saved.add(tracer._blocks[storage._cdata][1])
        kept = list(getattr(node, "__dict__", {}).values())  # as `ctx.x`, by a function of a person's own
        for tensor in (*_saved_tensors(node), *(tensor for tensor, _ in _tensors(kept))):
            if (block := tracer.block_of(tensor)) is not None:
                saved.add(block)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return saved


def _saved_tensors(node: Any) -> Iterator[torch.Tensor]:
    """As they were packed: to unpack them would run checkpointed blocks again."""
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        with suppress(RuntimeError):  # freed, as by the pass in which a reentrant checkpoint runs one of its own
            raw = getattr(node, name)
            for each in raw if isinstance(raw, (list, tuple)) else [raw]:
                with suppress(RuntimeError):  # freed, or changed in place since
                    yield from (tensor for tensor, _ in _tensors(each.data))


def _read_again(frame: FrameType, name: str) -> int:
    """The line after this one that reads the variable before it is bound anew; 0 if there is none."""
    line = 0
    for each in dis.get_instructions(frame.f_code):
        line = (each.positions.lineno if each.positions else None) or line
        if each.offset <= frame.f_lasti or each.argval != name:
            continue
        if each.opname.startswith(("STORE_", "DELETE_")):
            return 0
        if each.opname.startswith("LOAD_"):
            return line
    return 0


@contextmanager
def _noting_zeroed(tracer: Any, is_own: Callable[[str], bool], drops: bool) -> Iterator[None]:
    """`zero_grad(set_to_none=False)`: gradients stay where they are, through every forward pass."""

    def noting(zero: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(self: Any, set_to_none: bool = True) -> None:
            if not set_to_none and ZEROED not in tracer.trace.facts:
                frame = next(_own_frames(is_own), None)
                tracer.trace.facts[ZEROED] = None if frame is None else [frame.f_code.co_filename, frame.f_lineno]
            zero(self, drops or set_to_none)

        return zero_grad

    optimizer, module = torch.optim.Optimizer, torch.nn.Module
    with (
        mock.patch.object(optimizer, "zero_grad", noting(optimizer.zero_grad)),
        mock.patch.object(module, "zero_grad", noting(module.zero_grad)),
    ):
        yield
