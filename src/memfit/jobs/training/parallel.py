"""A model in one process of several that train together: torch's own DDP and FSDP2.

ddp     the whole model in each process; buckets of gradients, reduced after the last micro-step (`no_sync` before)
fsdp2   each block of the model, and then the whole, `fully_shard`ed, and resharded after its forward. Gradients
        are reduced in each micro-step. `amp-bf16` is a mixed precision policy: fp32 shards, bf16 weights gathered,
        gradients reduced in fp32. The model is sharded before it has memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from memfit.jobs.workload import Workload
from memfit.models.block_list import block_list


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
        find_unused_parameters=_has_unused_weights(model),
    )  # fmt: skip


def _has_unused_weights(model: nn.Module) -> bool:
    """No gradient reaches GSA's indexer, and DDP would wait for it."""
    from memfit.models.gsa import GsaForCausalLM

    return any(isinstance(module, GsaForCausalLM) for module in model.modules())


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
