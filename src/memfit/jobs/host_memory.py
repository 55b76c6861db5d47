"""Host memory that a GPU can read by itself; on any other device, plain memory."""

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
