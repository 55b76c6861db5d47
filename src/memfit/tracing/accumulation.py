"""Gradients that meet: the engine adds in place on a GPU, and out of place while a dispatch mode is watching.

Where a tensor was used twice, autograd's engine sums the two gradients. It writes into the first one if nobody else
holds it (`InputBuffer::accumulate` in torch/csrc/autograd/input_buffer.cpp), but never under a mode, where it takes
every tensor for a subclass. A trace would show one tensor too many at each residual connection. So the engine's own
condition is asked here: is it the engine that adds, and is it the only holder?
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.tracing.layouts import is_dense

aten = torch.ops.aten
Holders = tuple[int, int, int]


class EngineSums:
    """Knows what the reference counts of a tensor look like, in this torch, when only the engine holds it."""

    def __init__(self, device: torch.device) -> None:
        self._alone = _holders_when_alone(device)

    def in_place(self, args: Any, kwargs: Any) -> bool:
        if len(args) != 2 or kwargs or torch.is_grad_enabled():
            return False
        first, second = args
        if not isinstance(second, torch.Tensor) or first.shape != second.shape or first.dtype != second.dtype:
            return False
        if not called_by_engine() or not is_dense(first):
            return False
        return all(found <= alone for found, alone in zip(_holders(first), self._alone, strict=True))


def called_by_engine() -> bool:
    """No Python lies between the engine and this op: neither a custom function nor a block run again."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        "/torch/_" in frame.f_code.co_filename or "/memfit/tracing/" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _holders(tensor: torch.Tensor) -> Holders:
    """Of the tensor and of its storage in C++, and of the tensor in Python."""
    storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined,unused-ignore]
    return tensor._use_count(), storage, sys.getrefcount(tensor)  # type: ignore[attr-defined,unused-ignore]


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Holders] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.add.Tensor and torch._C._current_autograd_node() is not None:
            first, _ = args
            self.seen.append(_holders(first))
        return func(*args, **(kwargs or {}))


def _holders_when_alone(device: torch.device) -> Holders:
    x = torch.empty(2, device=device, requires_grad=True)
    watch = _Watch()
    with watch:
        h = x * 2
        loss = (h * 3).sum() + (h * 4).sum()
        torch.autograd.backward(loss)
    return watch.seen[0]
