"""Where torch adds in place on a GPU, and out of place while a dispatch mode is watching (`isTensorSubclassLike`).

A trace is such a mode, and the GPU has none: so sums are made in place here. But a job may have modes of its own, as
selective checkpointing has; those are there on the GPU too.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def added(total: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    return total + more if _job_watches() else total.add_(more)


def _job_watches() -> bool:
    return any(not type(mode).__module__.startswith("memfit.") for mode in _get_current_dispatch_mode_stack())
