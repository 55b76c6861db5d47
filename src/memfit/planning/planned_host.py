"""Host memory of a planned run: counted, and not taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from memfit.jobs.host_memory import HostMemory
from memfit.jobs.training.offload.host import host_memory_by
from memfit.planning.host_facts import HOST
from memfit.tracing.tracer import Tracer


class PlannedHost(HostMemory):
    def __init__(self, tracer: Tracer, *, pinned: bool = True, category: str = "") -> None:
        """Pinned memory is rounded up as torch does it. `category`: of what has its place here, while it is on the
        device."""
        super().__init__(tracer.device)
        self.pinned = pinned
        self._tracer, self._category = tracer, category

    def copied(self, on_device: torch.Tensor, name: str = "") -> None:
        if name:
            self._tracer.name(on_device, name)
        block = self._tracer.block_of(on_device)
        if block is not None and self._category:
            self._tracer.trace.set_category(block, self._category)

    def computing(self) -> AbstractContextManager[None]:
        return self._tracer.host_computes()

    def _made(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return self._tracer.host_empty(shape, dtype)


@contextmanager
def levers_counted(tracer: Tracer) -> Iterator[None]:
    """What the levers of a training take of the host is written down, lever by lever."""
    hosts: dict[str, PlannedHost] = {}

    def make(device: torch.device, lever: str) -> HostMemory:
        return hosts.setdefault(lever, PlannedHost(tracer, pinned=False, category=lever))

    with host_memory_by(make):
        yield
    if hosts:
        tracer.trace.facts[HOST] = {lever: host.peak_bytes for lever, host in hosts.items()}
