"""Whose kernels a trace imitates. Here and not beside the tracing, because a cached trace is found without torch."""

from __future__ import annotations

from memfit.gpus import Gpu
from memfit.tracing.platform import H200, Platform


def platform_of(gpu: Gpu | None) -> Platform:
    """The card's own kernels; without a card, those of the reference machine."""
    if gpu is None:
        return H200
    return Platform(arch=gpu.arch, sm_count=gpu.sm_count, max_threads_per_sm=gpu.max_threads_per_sm)
