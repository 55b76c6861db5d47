"""Record what a block of code does with GPU memory, as torch's allocator saw it.

    with memfit.record("step.pickle"):            # a snapshot that memory_viz and `memfit report` open
        train_step()

    with memfit.record(model=model, optimizer=optimizer) as recording:
        train_step()
    recording.trace                               # events, as a prediction has them: report, diff, replay

    @memfit.record("run.pickle")
    def main(): ...

If memory runs out inside, the snapshot is taken at that very moment, before the stack unwinds and frees the evidence.
With `model` and `optimizer` the categories of weights, gradients, optimizer state and saved tensors are exact.

torch's history knows addresses and times, not purposes. While a recording runs, each tensor whose purpose is certain
is noted with its address at a moment when it is alive; afterwards that names the allocation which held the address
then. Nothing is guessed: an allocation that no note fits stays unknown.
"""

from __future__ import annotations

import copy
import functools
import pickle
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from memfit.errors import MemfitError
from memfit.events import Trace
from memfit.files import check_free, written_whole

MAX_ENTRIES = 1_000_000
P = ParamSpec("P")
R = TypeVar("R")


class record:
    """What the allocator does on one device from entering to leaving. One at a time: torch has one history."""

    _active: record | None = None

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        device: int | None = None,
        max_entries: int = MAX_ENTRIES,
        model: Any = None,
        optimizer: Any = None,
        force: bool = False,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.device, self.max_entries, self.force = device, max_entries, force
        self.model, self.optimizer = model, optimizer
        self.snapshot: dict[str, Any] | None = None
        self.ran_out: dict[str, int] | None = None
        """What was asked for when memory ran out: alloc_size, total and free bytes of the device."""
        self._labels: Any = None
        self._trace: Trace | None = None

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
            with copy.copy(self):  # each call is a recording of its own
                return function(*args, **kwargs)

        return recorded

    def __enter__(self) -> record:
        torch = _torch_with_cuda()
        if record._active is not None:
            raise MemfitError("a recording is already going on", hint="torch keeps one history: end the first one")
        if self.path is not None:
            check_free(self.path, "path", self.force, hint="record(..., force=True) overwrites it")
        if self.device is None:
            self.device = torch.cuda.current_device()
        torch.cuda.synchronize(self.device)
        start_history(self.max_entries)
        record._active = self
        _watch_for_ooms()
        if self.model is not None:
            self._labels = CategoryNotes(self.model, self.optimizer)
            self._labels.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        record._active = None
        try:
            if self._labels is not None:
                self._labels.__exit__()
            if self.snapshot is None:
                torch.cuda.synchronize(self.device)
                self.take()
        finally:
            stop_history()
        if self.path is not None:
            self.save(self.path)

    def take(self) -> None:
        """The history up to now."""
        import torch

        self.snapshot = torch.cuda.memory._snapshot(self.device)
        if self._labels is not None:
            self._labels.write_into(self.snapshot, int(self.device or 0))

    def save(self, path: str | Path) -> None:
        """As a pickle of protocol 4, the newest that every version of torch's viewer reads."""
        if self.snapshot is None:
            raise MemfitError("nothing has been recorded yet", hint="save after the `with` block")
        with written_whole(path) as beside, beside.open("wb") as file:
            pickle.dump(self.snapshot, file, protocol=4)

    @property
    def trace(self) -> Trace:
        """The recording as events: what `memfit report` and `memfit diff` read."""
        if self._trace is None:
            if self.snapshot is None:
                raise MemfitError("nothing has been recorded yet", hint="ask after the `with` block")
            from memfit.snapshots.read import snapshot_of

            self._trace = snapshot_of(self.snapshot).traces[int(self.device or 0)]
        return self._trace


def start_history(max_entries: int = MAX_ENTRIES) -> None:
    """Python stacks only: with C++ frames a dump takes minutes."""
    import torch

    torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=max_entries)


def stop_history() -> None:
    import torch

    torch.cuda.memory._record_memory_history(None)


def _torch_with_cuda() -> Any:
    import torch

    if not torch.cuda.is_available():
        built = "has no CUDA GPU to use" if torch.version.cuda else "was built without CUDA"
        raise MemfitError(
            f"a recording needs a CUDA GPU; this torch ({torch.__version__}) {built}",
            hint="without one, memfit.trace(fn) predicts the same events",
        )
    if not hasattr(torch.cuda.memory, "_record_memory_history"):
        raise MemfitError(f"this torch ({torch.__version__}) cannot record its allocator", hint="2.1 or newer can")
    return torch


_watching = False


def _watch_for_ooms() -> None:
    """torch calls an observer before the error unwinds the stack. It cannot be taken off again, so there is one."""
    global _watching
    import torch

    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if _watching or attach is None:
        return
    attach(_out_of_memory)
    _watching = True


def _out_of_memory(device: int, alloc_size: int, total: int, free: int) -> None:
    active = record._active
    if active is None or active.device != device:
        return
    try:
        active.ran_out = {"alloc_size": alloc_size, "total": total, "free": free, "time_us": time.time_ns() // 1000}
        active.take()
        if active.path is not None:
            active.save(active.path)
    except Exception as error:  # an observer that raises would hide the error the user has to see
        active.ran_out = {**(active.ran_out or {}), "failed": 1}
        del error


WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, UNKNOWN = "weights", "gradients", "optimizer", "activations", "unknown"
CERTAINTY = (ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS)
"""A weight that is saved for the backward pass is still a weight: the later one wins."""


class CategoryNotes:
    """Notes from entering to leaving; `write_into` puts them on the events of a snapshot."""

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        self.model, self.optimizer = model, optimizer
        self.notes: list[tuple[int, int, str]] = []  # microseconds, address, category
        self._open = ExitStack()

    def __enter__(self) -> CategoryNotes:
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

    def __exit__(self, *_: object) -> None:
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
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            for value in state.values() if isinstance(state, dict) else ():
                if hasattr(value, "untyped_storage"):
                    self._note(value, OPTIMIZER)

    def _note(self, tensor: Any, category: str) -> None:
        if tensor is not None and tensor.is_cuda:
            address = tensor.untyped_storage().data_ptr()
            if address:
                self.notes.append((time.time_ns() // 1000, address, category))


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
