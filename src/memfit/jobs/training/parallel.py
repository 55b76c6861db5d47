"""A model in one process of several, by torch's own DDP and FSDP2, and what the processes do together.

ddp     the whole model in each process; buckets of gradients, reduced after the last micro-step (`no_sync` before)
fsdp2   each block of the model, and then the whole, `fully_shard`ed, and resharded after its forward. Gradients
        are reduced in each micro-step. `amp-bf16` is a mixed precision policy: fp32 shards, bf16 weights gathered,
        gradients reduced in fp32. The model is sharded before it has memory.

A plan is of one process, over a process group that sends nothing: what a process holds does not depend on what the
others say, so one device shows exactly what each of many would hold, but for the buffers of the network library (NCCL),
which lie outside torch's allocator. In a run they agree, add up and wait; in a single process all of that is free.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock
from warnings import catch_warnings, filterwarnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memfit.errors import UsageError
from memfit.jobs.workload import Workload
from memfit.models.registry import block_list


def is_made_without_memory(work: Workload) -> bool:
    """A bare loop shards first; the Trainer takes a model in host memory, and moves it group by group."""
    return work.is_sharded and work.loop == "plain"


def to_device(model: nn.Module, device: torch.device | str, work: Workload) -> nn.Module:
    """The model to be called from then on."""
    if work.is_sharded:
        shard_blocks(model, work)
        model.to_empty(device=device)
        return model
    model.to(device)
    if not work.is_replicated:
        return model
    from torch.nn.parallel import DistributedDataParallel

    from memfit.models.gsa import GsaForCausalLM

    # No gradient reaches GSA's indexer, and DDP would wait for it.
    unused, view = any(isinstance(m, GsaForCausalLM) for m in model.modules()), bool(work.gradient_as_bucket_view)
    return DistributedDataParallel(model, gradient_as_bucket_view=view, find_unused_parameters=unused)


def shard_blocks(model: nn.Module, work: Workload) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cuda", (work.world_size,))
    policy = MixedPrecisionPolicy()
    if work.autocast_type == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = block_list(model)
    for block in found[1] if found else ():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def without_reduction(model: Any, work: Workload, *, last: bool) -> AbstractContextManager[Any]:
    """Of a micro-step: DDP need not reduce before the last one."""
    return model.no_sync() if work.is_replicated and not last else nullcontext()


ACCELERATES_OWN = ".*(torch.distributed|broadcast_buffers).*deprecated"
"""It calls torch by names that torch is about to change."""


@contextmanager
def one_process_of(world_size: int) -> Iterator[None]:
    """The first: where weights do not divide evenly, its shards are the largest."""
    if world_size == 1:
        yield
        return
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
    count = str(world_size)
    as_by_torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    try:
        with mock.patch.dict(os.environ, as_by_torchrun), _buckets_come_back(), catch_warnings():
            filterwarnings("ignore", message=ACCELERATES_OWN, category=FutureWarning)
            filterwarnings("ignore", message=".*returned a view tensor.*", category=UserWarning)
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = as_before


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


class ProcessGroup:
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
