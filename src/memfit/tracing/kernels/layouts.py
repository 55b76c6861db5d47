"""How a tensor lies in memory, where kernels ask.

Where torch adds in place on a GPU, and out of place while a dispatch mode is watching (`isTensorSubclassLike`).

A trace is such a mode, and the GPU has none: so sums are made in place here. But a job may have modes of its own, as
selective checkpointing has; those are there on the GPU too.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


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


def contiguous_copy(tensor: torch.Tensor, kind: torch.memory_format = torch.contiguous_format) -> int:
    """Bytes of what `contiguous()` makes: nothing where it lies so already."""
    return 0 if tensor.is_contiguous(memory_format=kind) else tensor.numel() * tensor.element_size()


def aligned(n: int, to: int) -> int:
    return -(-n // to) * to


def power_of_two_below(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def added(total: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    return total + more if _job_watches() else total.add_(more)


def _job_watches() -> bool:
    return any(not type(mode).__module__.startswith("memfit.") for mode in _get_current_dispatch_mode_stack())
