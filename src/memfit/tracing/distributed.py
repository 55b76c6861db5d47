"""What FSDP2 (`fully_shard`) and DDP must find to run on the traced device, and what the kernels of FSDP2 allocate.

FSDP2 takes a model without memory, shards it there, and is given memory shard by shard: here both devices are the same
one, so it is told which tensors have memory. All else is FSDP2's own code, on its own streams.

DistributedDataParallel must find the values that it sends and reads back. Its reducer is C++ that goes through the
dispatcher, so its buckets are seen as all else is. But it sends numbers to the other processes by way of the device and
compares what comes back: how many weights there are, their shapes, the order of buckets. They come from the host and
nobody changes them on the way, so they are kept beside.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer


Tensor = torch.Tensor
CUDA, HOST = torch.device("cuda"), torch.device("cpu")
TILE_BYTES = 128 * 16
"""TensorShape.cu: threads of a thread block, and what each copies at once."""
INDEX_BYTES = 8


@contextmanager
def fully_shard_traced(tracer: Tracer) -> Iterator[None]:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    shard, reset = FSDPParam.__init__, FSDPParam.reset_sharded_param

    def shard_where_it_lies(self: Any, param: nn.Parameter, *args: Any, **kwargs: Any) -> None:
        """Of a tensor without memory the shard has none either."""
        if not tracer.owns(param):
            with _disable_current_modes():
                shard(self, param, *args, **kwargs)
            return
        shard(self, param, *args, **kwargs)
        _name_shard(tracer, self)

    def making(category: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """What a group of weights makes is its own, also at the end of backward, when no module is named."""

        def run(group: Any, *args: Any, **kwargs: Any) -> Any:
            with tracer.making(category, tracer.modules.name_of(group.modules[0])):
                return method(group, *args, **kwargs)

        return run

    def reset_with_memory(self: Any) -> None:
        with _HasMemory(tracer):
            reset(self)

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (FSDPParam, "__init__", shard_where_it_lies),
        (FSDPParam, "reset_sharded_param", reset_with_memory),
        (FSDPParamGroup, "unshard", making("weights", FSDPParamGroup.unshard)),
        (FSDPParamGroup, "wait_for_unshard", making("weights", FSDPParamGroup.wait_for_unshard)),
        (FSDPParamGroup, "post_backward", making("gradients", FSDPParamGroup.post_backward)),
        (FSDPParamGroup, "_validate_no_meta_params", lambda _: None),
        (torch._C, "_get_accelerator", lambda *_: CUDA),
        (torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),
        (Tensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata + tensor.storage_offset()),
    ]
    with ExitStack() as stack:
        for owner, name, function in replaced:
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


def _name_shard(tracer: Tracer, sharded: Any) -> None:
    info = sharded._module_info
    tracer.name(sharded._sharded_param_data, f"{tracer.modules.name_of(info.module)}.{info.param_name}".lstrip("."))
    block = tracer.block_of(sharded._sharded_param_data)
    if block is not None:
        tracer.trace.set_category(block, "weights")


class _HasMemory(TorchFunctionMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_meta.__get__ and self.tracer.owns(args[0]):  # type: ignore[attr-defined]
            return False
        return func(*args, **(kwargs or {}))


class OnHost(TorchFunctionMode):
    """What was made before the trace says that it lies in host memory, so that FSDP2 moves it before it shards it."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func == Tensor.device.__get__ and result == self.tracer.device and not self.tracer.owns(args[0]):
            return HOST
        return result


# -- kernels -----------------------------------------------------------------------------------------------------------


def _copied_out(tracer: Tracer, _: None, gathered: Tensor, sizes: Sequence[int], dim: int = 0, **named: Any) -> None:
    """TensorShape.cu, split_with_sizes_copy_out_cuda_contiguous_no_cast: a list of which thread block copies what."""
    width = math.prod(gathered.shape[dim + 1 :]) * gathered.element_size()
    pieces = [size * width for size in sizes]
    chunks = math.prod(gathered.shape[:dim])
    most = tracer.platform.sm_count * tracer.platform.max_threads_per_sm // 128 * 2
    factor = -(-sum(-(-piece // TILE_BYTES) for piece in pieces) * chunks // most)
    rounds = -(-factor // min(math.ceil(math.sqrt(factor)), chunks))
    blocks = sum(-(-piece // (TILE_BYTES * rounds)) for piece in pieces)
    tracer.temporary(INDEX_BYTES * (4 * len(pieces) + 1 + blocks), "list of pieces to copy out")
    tracer.rule_calls.as_traced()


def _copied_in(tracer: Tracer, _: None, gradients: Sequence[Tensor], dim: int, chunks: int, **named: Tensor) -> None:
    """TensorShape.cu, get_chunk_cat_metadata, for gradients that lie dense and are not converted but from bf16."""
    into = named["out"]
    if gradients[0].dtype != into.dtype and (gradients[0].dtype, into.dtype) != (torch.bfloat16, torch.float32):
        return
    pieces = [-(-g.shape[dim] // chunks) * math.prod(g.shape[dim + 1 :]) * into.element_size() for g in gradients]
    blocks = sum(-(-piece // TILE_BYTES) for piece in pieces)
    tracer.temporary(INDEX_BYTES * (6 * len(pieces) + 2 + blocks), "list of pieces to copy in")
    tracer.rule_calls.as_traced()


HIDDEN: dict[str, Callable[..., Any]] = {
    "fsdp.split_with_sizes_copy.default": _copied_out,
    "fsdp.chunk_cat.default": _copied_in,
}
"""By name: the ops are there once torch.distributed.fsdp is imported."""


aten = torch.ops.aten


COPIES = (aten._to_copy.default, aten.copy_.default)


@contextmanager
def ddp_traced(tracer: Tracer, *, keeps_sent: bool = True) -> Iterator[None]:
    """`keeps_sent` for a tracer that follows no values by itself."""
    from torch._C._distributed_c10d import Logger
    from torch.nn.parallel import DistributedDataParallel

    def about_gradients(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with tracer.making("gradients"):
                return method(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for name in ("__init__", "_pre_forward"):  # buckets are made, and made anew in the second step
            wrapped = about_gradients(getattr(DistributedDataParallel, name))
            stack.enter_context(mock.patch.object(DistributedDataParallel, name, wrapped))
        stack.enter_context(mock.patch.object(Logger, "set_runtime_stats_and_log", lambda _: None))
        if keeps_sent:
            # a future looks for tensors in its value, to wait for their device
            stack.enter_context(mock.patch.object(torch._jit_internal, "_extract_tensors", lambda value: []))
            stack.enter_context(mock.patch.object(tracer, "sent", Sent()))
        yield


class Sent:
    """Whole numbers that were copied from the host to the device."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[torch.UntypedStorage], Tensor]] = {}

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        storage = tensor.untyped_storage()
        kept = self._values.get(storage._cdata)
        return kept[1] if kept is not None and kept[0]() is storage else None

    def number(self, tensor: Tensor) -> int | None:
        known = self.copy_of(tensor)
        return None if known is None else int(known.flatten()[tensor.storage_offset()])

    def read_back(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """In host memory, if that is where this op copies to and the values are known."""
        if func is aten._to_copy.default and kwargs.get("device") == HOST:
            return self.copy_of(args[0])
        if func is not aten.copy_.default or not args[0].is_cpu or (known := self.copy_of(args[1])) is None:
            return None
        written: Tensor = args[0].copy_(known)
        return written

    def keep(self, func: Any, args: Any, out: Any) -> None:
        if func in COPIES:
            source = args[0] if func is aten._to_copy.default else args[1]
            if source.is_cpu and not out.is_cpu and not source.is_floating_point():
                self.put(out, source)
        elif func is torch.ops.c10d.allgather_.default and (known := self.copy_of(args[1][0])) is not None:
            for gathered in args[0][0]:
                self.put(gathered, known)

    def put(self, tensor: Tensor, value: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._values[storage._cdata] = (weakref.ref(storage), value.clone())
