"""What the processes of a run do together: agree, add up, wait. In a single process all of it is free."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Together:
    def __init__(self, device: torch.device) -> None:
        self.many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.many else 0
        self.world_size = dist.get_world_size() if self.many else 1
        # Made now: where memory has just run out there may be no room for a single number.
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)

    def all_well(self, here: bool) -> bool:
        """Whether it went well in every process."""
        if not self.many:
            return here
        self._flag.fill_(0 if here else 1)
        dist.all_reduce(self._flag)
        return int(self._flag) == 0

    def sum(self, number: Tensor) -> Tensor:
        if self.many:
            dist.all_reduce(number)
        return number

    def smallest(self, number: int) -> int:
        """Of the processes' numbers."""
        if not self.many:
            return number
        found = torch.tensor(number, device=self._flag.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

    def mean_of_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """In place and one by one: a buffer for all of them would be memory at the worst moment."""
        if not self.many:
            return
        trained = [each for each in parameters if each.requires_grad]
        has = torch.tensor([each.grad is not None for each in trained], dtype=torch.int32, device=self._flag.device)
        dist.all_reduce(has)
        waiting = []
        for parameter, somewhere in zip(trained, has.tolist(), strict=True):
            if not somewhere:
                continue
            if parameter.grad is None:  # a layer that only another process's rows went through
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(self.world_size)
            waiting.append(dist.all_reduce(parameter.grad, async_op=True))
        for each in waiting:
            if each is not None:
                each.wait()

    def first_of(self, text: str) -> str:
        """Of what the processes have to say, the first that is not empty."""
        if not self.many:
            return text
        said: list[str | None] = [None] * self.world_size
        dist.all_gather_object(said, text)
        return next((each for each in said if each), "")

    def wait(self) -> None:
        if self.many:
            dist.barrier()
