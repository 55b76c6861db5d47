"""Several processes, one a GPU, under torchrun: micro-batches are dealt, statistics come together, masks are the same.

Each process runs whole micro-batches, so that every one has the shape and the numbers it has in a single process. Norms
are kept one row a sequence: adding a process's rows to the others' zeros is exact, and the sum over sequences is then
taken in the same order everywhere. Products X^T X are added up, in an order that is the library's. Each input's
matrices are pruned by one process and sent to the others, so all go on with the same weights, to the bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from memfit.jobs.pruning.statistics import ColumnNorms, Gram


class Team:
    """The processes of a run; by default this one alone."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def from_environment(cls, device: torch.device) -> Team:
        """What torchrun has set up; the caller ends it with `leave`."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size < 2:
            return cls()
        import torch.distributed as dist

        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def owner(self, number: int) -> int:
        """Who prunes the matrices of an input."""
        return number % self.size

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        if self.size == 1:
            return
        import torch.distributed as dist

        for tensor in tensors:
            dist.all_reduce(tensor)

    def gather(self, statistics: Iterable[Any]) -> None:
        """Everyone's part of each statistic."""
        known = [each for each in statistics if isinstance(each, (ColumnNorms, Gram))]
        self.add_up(each.rows if isinstance(each, ColumnNorms) else each.matrix for each in known)

    def send(self, tensor: Tensor, owner: int) -> None:
        """The owner's values to all. As bytes: not every library sends every type."""
        if self.size == 1:
            return
        import torch.distributed as dist

        dist.broadcast(tensor.view(-1).view(torch.uint8), owner)

    def tell(self, value: Any) -> Any:
        """What the first process says."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        said = [value]
        dist.broadcast_object_list(said, 0)
        return said[0]

    def leave(self) -> None:
        if self.size > 1:
            import torch.distributed as dist

            dist.destroy_process_group()
