"""One process of several that train together: torch's own DDP and FSDP2, over a process group that sends nothing.

What a process holds does not depend on what the others say, so one device shows exactly what each of many would hold,
but for the buffers of the network library (NCCL), which lie outside torch's allocator.

    ddp     the whole model in each process; buckets of gradients, reduced after the last micro-step (`no_sync` before)
    fsdp2   each block of the model, and then the whole, `fully_shard`ed, and resharded after its forward. Gradients
            are reduced in each micro-step. `amp-bf16` is a mixed precision policy: fp32 shards, bf16 weights gathered,
            gradients reduced in fp32. The model is sharded before it has memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock
from warnings import catch_warnings, filterwarnings

import torch
from torch import nn

from memfit.errors import UsageError
from memfit.jobs.workload import Workload
from memfit.models.block_list import block_list
from memfit.models.gsa_names import is_gsa


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
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with mock.patch.dict(os.environ, _as_torchrun_says(world_size)), _buckets_come_back(), catch_warnings():
            filterwarnings("ignore", message=ACCELERATES_OWN, category=FutureWarning)
            yield
    finally:
        dist.destroy_process_group()


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


def is_sharded(work: Workload) -> bool:
    return work.trains and work.world_size > 1 and work.parallel == "fsdp2"


def is_made_without_memory(work: Workload) -> bool:
    """A bare loop shards first; the Trainer takes a model in host memory, and moves it group by group."""
    return is_sharded(work) and work.loop == "plain"


def is_replicated(work: Workload) -> bool:
    return work.trains and work.world_size > 1 and work.parallel == "ddp"


def to_device(model: nn.Module, device: torch.device | str, work: Workload) -> nn.Module:
    """The model to be called from then on."""
    if is_sharded(work):
        shard_blocks(model, work)
        model.to_empty(device=device)
        return model
    model.to(device)
    if not is_replicated(work):
        return model
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(
        model, gradient_as_bucket_view=bool(work.gradient_as_bucket_view),
        find_unused_parameters=is_gsa(work.model),  # no gradient reaches its indexer
    )  # fmt: skip


def shard_blocks(model: nn.Module, work: Workload) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cuda", (work.world_size,))
    policy = MixedPrecisionPolicy()
    if work.autocast == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = block_list(model)
    for block in found[1] if found else ():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def without_reduction(model: Any, work: Workload, *, last: bool) -> AbstractContextManager[Any]:
    """Of a micro-step: DDP need not reduce before the last one."""
    return model.no_sync() if is_replicated(work) and not last else nullcontext()
