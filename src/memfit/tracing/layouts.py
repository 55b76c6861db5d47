"""How a tensor lies in memory, where kernels ask."""

from __future__ import annotations

import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """No gaps, no overlaps: some order of its dimensions is contiguous."""
    size = 1
    for length, stride in sorted(
        ((n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1), key=lambda p: p[1]
    ):
        if stride != size:
            return False
        size *= length
    return True


def contiguous_copy(tensor: torch.Tensor) -> int:
    """Bytes of what `contiguous()` makes: nothing where it lies so already."""
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()
