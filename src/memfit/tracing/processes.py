"""The other processes of a job, for code that talks to them: each is taken to say what this one says.

What a process holds does not depend on what the others say, so one shows what each of many would hold. `nccl` and
`gloo` are here a process group that sends nothing; where values are known, a sum is that of equal parts. What NCCL
allocates by torch's allocator is allocated here too; its own buffers lie outside.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock
from urllib.parse import parse_qsl, urlsplit
from warnings import catch_warnings, filterwarnings

import torch
import torch.distributed as dist

from memfit.errors import TraceError
from memfit.tracing.answers import asking_line
from memfit.tracing.distributed import ddp_traced, fully_shard_traced
from memfit.tracing.own_code import OwnCodeTracer

Tensor = torch.Tensor
c10d: Any = dist.distributed_c10d
parts: Any = torch._C._distributed_c10d
BACKEND = "memfit"
FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
REFUSED = {
    "torch.distributed.fsdp": ("FullyShardedDataParallel", "FSDP of the first kind"),
    "deepspeed": ("initialize", "DeepSpeed"),
    "megatron.core.parallel_state": ("initialize_model_parallel", "Megatron"),
    "torch.distributed.pipelining": ("PipelineStage", "pipelines of torch"),
    "torch.distributed.rpc": ("init_rpc", "torch's RPC"),
}
"""By module: what is refused when it is called, and what that is."""
UNSETTLED = ".*(torch.distributed|broadcast_buffers|no_sync).*deprecated"


class Echo(c10d.ProcessGroup):  # type: ignore[misc]
    """Whatever this process sends comes back from all others."""

    tracer: OwnCodeTracer

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            self._sum(tensor, getattr(opts, "reduceOp", None))
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return _done(tensors)

    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Any:
        """ProcessGroupNCCL.cpp: NCCL writes into one tensor, from which the list is copied."""
        for made, given in zip(gathered, tensors, strict=True):
            alike = all(each.shape == given.shape for each in made)
            flat = given.new_empty((len(made), *given.shape)) if alike and self._is_on_gpu(given) else None
            for each in made:
                if each.shape == given.shape:
                    each.detach().copy_(given.detach())
            del flat
        return _done(gathered)

    def _allgather_base(self, gathered: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        if (known := self.tracer.values.read(tensor)) is not None:
            joined = torch.cat([known.detach().reshape(-1)] * self.size()).reshape(gathered.shape)
            if gathered.device.type == "cpu":
                gathered.detach().copy_(joined)
            else:
                self.tracer.values.put(gathered, joined)
        return _done([gathered])

    def allgather_into_tensor_coalesced(self, gathered: list[Tensor], tensors: list[Tensor], opts: Any = None) -> Any:
        for made, given in zip(gathered, tensors, strict=True):
            self._allgather_base(made, given)
        return _done(gathered)

    def reduce_scatter(self, reduced: list[Tensor], tensors: list[list[Tensor]], opts: Any = None) -> Any:
        for made, given in zip(reduced, tensors, strict=True):
            alike = all(each.shape == made.shape for each in given)
            flat = made.new_empty((len(given), *made.shape)) if alike and self._is_on_gpu(made) else None
            made.detach().copy_(given[self.rank()].detach())
            self._sum(made, getattr(opts, "reduceOp", None))
            del flat
        return _done(reduced)

    def _reduce_scatter_base(self, reduced: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        if self._is_known(tensor):
            reduced.detach().view(-1).copy_(tensor.detach().reshape(-1).chunk(self.size())[self.rank()])
            self._sum(reduced, getattr(opts, "reduceOp", None))
        return _done([reduced])

    def reduce_scatter_tensor_coalesced(self, reduced: list[Tensor], tensors: list[Tensor], opts: Any = None) -> Any:
        for made, given in zip(reduced, tensors, strict=True):
            self._reduce_scatter_base(made, given, opts)
        return _done(reduced)

    def gather(self, gathered: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Any:
        for made, given in zip(gathered, tensors, strict=False):
            for each in made:
                each.detach().copy_(given.detach())
        return _done(gathered)

    def scatter(self, received: list[Tensor], tensors: list[list[Tensor]], opts: Any = None) -> Any:
        for made, given in zip(received, tensors, strict=False):
            made.detach().copy_(given[self.rank()].detach())
        return _done(received)

    def alltoall(self, received: list[Tensor], tensors: list[Tensor], opts: Any = None) -> Any:
        for made, given in zip(received, tensors, strict=True):
            if made.shape == given.shape:
                made.detach().copy_(given.detach())
        return _done(received)

    def alltoall_base(self, received: Tensor, tensor: Tensor, *_: Any) -> Any:
        if self._is_known(tensor) and received.shape == tensor.shape:
            received.detach().copy_(tensor.detach())
        return _done([received])

    def send(self, tensors: list[Tensor], *_: Any) -> Any:
        return _done(tensors)

    def recv(self, tensors: list[Tensor], *_: Any) -> Any:
        raise TraceError(
            f"{asking_line()}the code waits for what another process sends, and memfit runs one process",
            hint="memfit covers what all processes do together: DDP, FSDP2, collectives",
        )

    recv_anysource = recv
    # as torch calls them from 2.13 on
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Any:
        """ProcessGroupNCCL.cpp: one number is summed up on the GPU."""
        if c10d.get_backend(self) == "nccl":
            self.tracer.temporary(4, "barrier of NCCL")
        return _done([])

    def _start_coalescing(self, *_: Any) -> None:
        pass

    def _end_coalescing(self, *_: Any) -> Any:
        return _done([])

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> Any:
        """Of a group that is written in Python, torch keeps it elsewhere."""
        return c10d._world.pg_names[self]

    pg_name = group_name

    def _sum(self, tensor: Tensor, how: Any) -> None:
        if how != dist.ReduceOp.SUM or self.size() == 1 or tensor.dtype == torch.bool:
            return
        if self._is_known(tensor):
            tensor.detach().mul_(self.size())

    def _is_known(self, tensor: Tensor) -> bool:
        return self.tracer.values.read(tensor) is not None

    def _is_on_gpu(self, tensor: Tensor) -> bool:
        return self.tracer.place(tensor) == "cuda"


def _done(value: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return parts._create_work_from_future(future)


@contextmanager
def processes_pretended(tracer: OwnCodeTracer) -> Iterator[None]:
    """`init_process_group` finds the others at once, whatever the backend."""
    if dist.is_initialized():
        raise TraceError(
            "this process already trains with others", hint="trace in a process of its own: memfit plan script"
        )
    make = c10d._new_process_group_helper

    def make_echo(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **kwargs: Any) -> Any:
        asked = "nccl" if str(backend) == "undefined" else str(backend)
        kwargs["device_id"] = None
        kwargs["backend_options"] = None
        made, store = make(size, rank, ranks, dist.Backend(BACKEND), *args[:2], **kwargs)
        if made in c10d._world.pg_map:
            c10d._world.pg_map[made] = (asked, store)
        if not ranks and size > 1:
            tracer.assume(
                f"process {rank} of {size}: the others do as this one does; what NCCL takes for itself lies outside"
                " torch's memory and is not in the plan"
            )
        return made, store

    def echo(_: Any, rank: int, size: int, __: Any) -> Echo:
        made = Echo(rank, size)
        made.tracer = tracer
        return made

    as_before = sys.excepthook  # torch puts one of its own in front of it, and never takes it away
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, echo, devices=["cpu", "cuda"])
    plugin = c10d.Backend._BackendPlugin(echo, False)
    replaced: list[tuple[Any, str, Any]] = [
        (c10d, "_new_process_group_helper", make_echo),
        (c10d, "rendezvous", _meet),
        (c10d, "_store_based_barrier", lambda *_, **__: None),
        (dist, "is_nccl_available", lambda: True),
        (c10d, "is_nccl_available", lambda: True),
        (dist, "monitored_barrier", lambda *_, **__: None),
    ]
    with ExitStack() as stack:
        for owner, name, function in replaced:
            stack.enter_context(mock.patch.object(owner, name, function))
        stack.enter_context(mock.patch.dict(dist.Backend._plugins, {BACKEND.upper(): plugin}))
        stack.enter_context(ddp_traced(tracer, keeps_sent=False))
        stack.enter_context(_once_imported(tracer))
        stack.enter_context(catch_warnings())
        filterwarnings("ignore", message=UNSETTLED, category=FutureWarning)
        filterwarnings("ignore", message=".*(returned a view tensor|default timeout for nccl).*", category=UserWarning)
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            sys.excepthook = as_before


def _meet(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """rendezvous.py: rank and size are given, or stand in the address or in the environment."""
    said = dict(parse_qsl(urlsplit(url).query))
    if urlsplit(url).scheme == "env":
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            _variable(name)
    rank = int(said.get("rank", rank if rank >= 0 else _variable("RANK")))
    world_size = int(said.get("world_size", world_size if world_size >= 0 else _variable("WORLD_SIZE")))
    yield parts.HashStore(), rank, world_size


def _variable(name: str) -> str:
    if name not in os.environ:
        raise ValueError(
            f"Error initializing torch.distributed using env:// rendezvous: environment variable {name} expected, but"
            " not set"
        )
    return os.environ[name]


@contextmanager
def _once_imported(tracer: OwnCodeTracer) -> Iterator[None]:
    """FSDP2 is traced, other ways to share the work are refused: what the code does not import costs nothing."""
    patched: set[str] = set()
    with ExitStack() as stack:

        def patch() -> None:
            if FSDP2 in sys.modules and FSDP2 not in patched:
                patched.add(FSDP2)
                stack.enter_context(fully_shard_traced(tracer))
                dispatch = importlib.import_module("torch.distributed.tensor._dispatch")
                # what shards draw is nobody's value, so nobody need agree on where the drawing begins
                stack.enter_context(mock.patch.object(dispatch, "is_rng_supported_mesh", lambda _: False))
                table = importlib.import_module("torch._decomp").decomposition_table
                stack.enter_context(mock.patch.dict(table))
                table.pop(torch.ops.aten.uniform_.default, None)  # it needs the GPU's own generator
            for module, (name, what) in REFUSED.items():
                owner = sys.modules.get(module)
                if owner is None or module in patched or not hasattr(owner, name):
                    continue
                patched.add(module)
                found = getattr(owner, name)
                if isinstance(found, type):
                    stack.enter_context(mock.patch.object(found, "__init__", _refusal(what)))
                else:
                    stack.enter_context(mock.patch.object(owner, name, _refusal(what)))

        patch()
        tracer.after_import.append(patch)
        yield
        tracer.after_import.remove(patch)


def _refusal(what: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise TraceError(
            f"{asking_line()}the code uses {what}, which memfit does not cover",
            hint="of several processes it covers DDP (DistributedDataParallel) and FSDP2 (fully_shard)",
        )

    return refuse
