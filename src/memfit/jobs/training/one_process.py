"""This process as one of several, over a process group that sends nothing.

What a process holds does not depend on what the others say, so one device shows exactly what each of many would hold,
but for the buffers of the network library (NCCL), which lie outside torch's allocator.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from warnings import catch_warnings, filterwarnings

import torch

from memfit.errors import UsageError

ACCELERATES_OWN = ".*(torch.distributed|broadcast_buffers).*deprecated"
"""It calls torch by names that torch is about to change."""


@contextmanager
def one_process_of(world_size: int) -> Iterator[None]:
    """The first: where weights do not divide evenly, its shards are the largest."""
    if world_size == 1:
        yield
        return
    import torch.distributed as dist

    if not dist.is_available():
        raise UsageError(f"--world-size {world_size}: this torch was built without torch.distributed")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UsageError(
            f"--world-size {world_size} cannot be planned by a process that trains with others",
            hint="plan in a process of its own",
        )
    as_before = sys.excepthook  # torch puts one of its own in front of it, and never takes it away
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with mock.patch.dict(os.environ, _as_torchrun_says(world_size)), _buckets_come_back(), catch_warnings():
            filterwarnings("ignore", message=ACCELERATES_OWN, category=FutureWarning)
            filterwarnings("ignore", message=".*returned a view tensor.*", category=UserWarning)
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = as_before


def _as_torchrun_says(world_size: int) -> dict[str, str]:
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}


@contextmanager
def _buckets_come_back() -> Iterator[None]:
    """The group that sends nothing gives nothing back either, and DDP waits for the sum of its buckets: it gets each
    as it is."""
    from torch.nn.parallel import DistributedDataParallel

    make = DistributedDataParallel.__init__

    def make_alone(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.register_comm_hook(None, lambda _, bucket: _as_it_is(bucket))

    with mock.patch.object(DistributedDataParallel, "__init__", make_alone):
        yield


def _as_it_is(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    sent: torch.Tensor = bucket.buffer()
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[sent.device] if sent.is_cuda else [])
    done.set_result(sent)
    return done
