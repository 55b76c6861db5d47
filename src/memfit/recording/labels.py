"""What a recorded allocation was for, where torch itself can tell: weights, gradients, optimizer state, saved tensors.

torch's history knows addresses and times, not purposes. While a recording runs, each tensor whose purpose is certain
is noted with its address at a moment when it is alive; afterwards that names the allocation which held the address
then. Nothing is guessed: an allocation that no note fits stays unknown.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, UNKNOWN = "weights", "gradients", "optimizer", "activations", "unknown"
CERTAINTY = (ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS)
"""A weight that is saved for the backward pass is still a weight: the later one wins."""


class Labels:
    """Notes from entering to leaving; `write_into` puts them on the events of a snapshot."""

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        self.model, self.optimizer = model, optimizer
        self.notes: list[tuple[int, int, str]] = []  # microseconds, address, category
        self._open = ExitStack()

    def __enter__(self) -> Labels:
        import torch

        def saved(tensor: Any) -> Any:
            self._note(tensor, ACTIVATIONS)
            return tensor

        self._open.enter_context(torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor))
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._note_gradient)
                self._open.callback(handle.remove)
        if self.optimizer is not None:
            handle = self.optimizer.register_step_post_hook(lambda *_: self._note_state())
            self._open.callback(handle.remove)
        self._note_what_stays()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._open.close()
        self._note_what_stays()

    def write_into(self, snapshot: dict[str, Any], device: int) -> None:
        """A `category` on each allocation of the history; memory_viz colours by it."""
        events = snapshot["device_traces"][device] if len(snapshot["device_traces"]) > device else []
        lives = _lives(events)
        found: dict[int, str] = {}
        for at, address, category in self.notes:
            event = _holding(lives.get(address, []), at)
            if event is not None and CERTAINTY.index(category) >= CERTAINTY.index(found.get(event, ACTIVATIONS)):
                found[event] = category
        for i, event in enumerate(events):
            if event["action"] == "alloc":
                event["category"] = found.get(i, UNKNOWN)

    def _note_what_stays(self) -> None:
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            self._note(tensor, WEIGHTS)
            if tensor.grad is not None:
                self._note(tensor.grad, GRADIENTS)
        self._note_state()

    def _note_gradient(self, parameter: Any) -> None:
        self._note(parameter.grad, GRADIENTS)

    def _note_state(self) -> None:
        for tensor in _tensors(self.optimizer.state.values() if self.optimizer is not None else ()):
            self._note(tensor, OPTIMIZER)

    def _note(self, tensor: Any, category: str) -> None:
        if tensor is not None and tensor.is_cuda:
            address = tensor.untyped_storage().data_ptr()
            if address:
                self.notes.append((time.time_ns() // 1000, address, category))


def _tensors(states: Any) -> Iterator[Any]:
    for state in states:
        for value in state.values() if isinstance(state, dict) else ():
            if hasattr(value, "untyped_storage"):
                yield value


def _lives(events: list[dict[str, Any]]) -> dict[int, list[tuple[int, int]]]:
    """When each address was handed out: (time, event), in order."""
    lives: dict[int, list[tuple[int, int]]] = {}
    for i, event in enumerate(events):
        if event["action"] == "alloc":
            lives.setdefault(event["addr"], []).append((event.get("time_us", 0), i))
    return lives


def _holding(lives: list[tuple[int, int]], at: int) -> int | None:
    """The allocation that held the address at that time; the last one made until then."""
    place = bisect_right(lives, (at, 1 << 62))
    return lives[place - 1][1] if place else None
