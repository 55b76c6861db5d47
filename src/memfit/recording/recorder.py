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
"""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from memfit.core.events import Trace
from memfit.core.whole_file import check_free, written_whole
from memfit.errors import MemfitError

MAX_ENTRIES = 1_000_000
P = ParamSpec("P")
R = TypeVar("R")


class record:
    """What the allocator does on one device from entering to leaving. One at a time: torch has one history."""

    _active: record | None = None

    def __init__(
        self, path: str | Path | None = None, *, device: int | None = None, max_entries: int = MAX_ENTRIES,
        model: Any = None, optimizer: Any = None, force: bool = False,
    ) -> None:  # fmt: skip
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
            with type(self)(
                self.path, device=self.device, max_entries=self.max_entries, model=self.model,
                optimizer=self.optimizer, force=self.force,
            ):  # fmt: skip
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
            from memfit.recording.labels import Labels

            self._labels = Labels(self.model, self.optimizer)
            self._labels.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        import torch

        record._active = None
        try:
            if self._labels is not None:
                self._labels.__exit__(kind, error, where)
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
            from memfit.core.snapshot import snapshot_of

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
