"""The card and the software whose kernels a trace imitates.

What CUDA allocates depends on more than the code: the architecture decides which attention kernel runs, the number
of multiprocessors sizes the buffers of reductions, the torch and cuDNN versions move both. The defaults are the
machine on which every rule of `tracing/kernels` was measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memfit.gpus import Gpu
from memfit.units import MiB


@dataclass(frozen=True, kw_only=True)
class Platform:
    arch: tuple[int, int] = (9, 0)
    """Compute capability."""
    sm_count: int = 132
    max_threads_per_sm: int = 2048
    l2_bytes: int = 60 * MiB
    torch: tuple[int, int] = (2, 11)
    """The torch that will run the job, not the one that traces it."""
    cudnn: int = 91900
    """Runtime cuDNN as `torch.backends.cudnn.version()` prints it (9.19.0 comes with the cu130 wheels)."""

    def facts(self, *, compiled: bool) -> dict[str, Any]:
        """What a trace depends on: the L2 cache only by what torch's compiler times."""
        return {name: value for name, value in asdict(self).items() if compiled or name != "l2_bytes"}

    @property
    def prefers_cudnn_attention(self) -> bool:
        """cuDNN goes before flash on 9.0, 10.0 and 10.3 with cuDNN above 9.15.0 (pytorch#171627, 2.11);
        from 2.9 on sm90 and sm100 whatever the cuDNN (pytorch#149282)."""
        if self.torch >= (2, 11):
            return self.arch in {(9, 0), (10, 0), (10, 3)} and self.cudnn > 91500
        return self.torch >= (2, 9) and self.arch in {(9, 0), (10, 0)}


H200 = Platform()


def platform_of(gpu: Gpu | None) -> Platform:
    """The card's own kernels; without a card, those of the reference machine."""
    if gpu is None:
        return H200
    return Platform(
        arch=gpu.arch, sm_count=gpu.sm_count, max_threads_per_sm=gpu.max_threads_per_sm, l2_bytes=gpu.l2_bytes
    )
