"""Host memory that a GPU can read by itself, side streams to copy on, and which errors mean that memory ran out.

On a device without streams the same calls copy in line, in plain memory, so that whoever copies is written once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class HostMemory:
    """Buffers of the host, pinned where there is a GPU, and how many bytes they came to at most."""

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type == "cuda"
        self.held_bytes = 0
        self.peak_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.held_bytes += self.taken(math.prod(shape) * dtype.itemsize)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return self._made(shape, dtype)

    def release(self, tensor: Tensor) -> None:
        """The caller lets go of it."""
        self.held_bytes -= self.taken(tensor.numel() * tensor.element_size())

    def taken(self, nbytes: int) -> int:
        """torch rounds pinned memory up to a power of two."""
        return 1 << (nbytes - 1).bit_length() if self.pinned and nbytes > 1 else nbytes

    def copied(self, on_device: Tensor, name: str = "") -> None:
        """Called with what is on the device for a while and has its place here."""

    def computing(self) -> AbstractContextManager[None]:
        """Around what the host computes with this memory."""
        return nullcontext()

    def _made(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self.pinned, device="cpu")


def as_bytes(tensor: Tensor) -> memoryview:
    """A contiguous tensor of the host's memory, to be read or written in place."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def numbers(tensor: Tensor) -> list[int]:
    """Of a tensor in host memory; a plan has none, and gets zeros."""
    made: list[int] = [0] * tensor.numel() if tensor.is_meta else tensor.tolist()
    return made


Event = Any  # torch.cuda.Event, or None where there are no streams


class Lane:
    """A side stream. Copies on it run beside the main stream's work, in the order they are given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor, *, after: Event = None) -> Event:
        """Both must outlive the copy; what it returns says when it is done."""
        if self.stream is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def now(self) -> Event:
        """The point that the main stream has reached."""
        return None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

    def wait(self, event: Event) -> None:
        """Let the main stream wait; the program goes on."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


def finished(event: Event) -> None:
    """Let the program wait."""
    if event is not None:
        event.synchronize()


MAX_CAUSE = 1000


def cause_of(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return first.partition(" If reserved but unallocated")[0][:MAX_CAUSE]  # torch's own advice, which seldom fits


DISGUISED = (
    "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: can't allocate",
    "DefaultCPUAllocator: not enough memory", "would exceed allowed memory",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in DISGUISED)


def on_the_host(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
