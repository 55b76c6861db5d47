"""What `fully_shard` (FSDP2) must believe to run on the traced device, and what its own kernels allocate.

FSDP2 takes a model without memory, shards it there, and is given memory shard by shard: here both devices are the same
one, so it is told which tensors have memory. All else is FSDP2's own code, on its own streams.
"""

from __future__ import annotations

import math
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
CUDA = torch.device("cuda")
TILE_BYTES = 128 * 16
"""TensorShape.cu: threads of a thread block, and what each copies at once."""
INDEX_BYTES = 8


@contextmanager
def fully_shard_traced(tracer: Tracer, *, from_host: bool = False) -> Iterator[None]:
    """`from_host`: the model to be sharded lies in host memory, so that FSDP2 moves it; else it has no memory yet."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    shard, reset = FSDPParam.__init__, FSDPParam.reset_sharded_param
    move = _fsdp_init._move_states_to_device

    def shard_where_it_lies(self: Any, param: Tensor, *args: Any, **kwargs: Any) -> None:
        """Of a tensor without memory the shard has none either."""
        if not tracer.owns(param):
            with _disable_current_modes():
                shard(self, param, *args, **kwargs)
            return
        shard(self, param, *args, **kwargs)
        _name_shard(tracer, self)

    def reset_with_memory(self: Any) -> None:
        with _HasMemory(tracer):
            reset(self)

    def move_to_device(params: list[nn.Parameter], buffers: list[Tensor], device: torch.device) -> None:
        for tensor in (*params, *buffers):
            if not tracer.owns(tensor):
                tensor.data = tensor.to("cuda")

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (FSDPParam, "__init__", shard_where_it_lies),
        (FSDPParam, "reset_sharded_param", reset_with_memory),
        (FSDPParamGroup, "_validate_no_meta_params", lambda _: None),
        (_fsdp_init, "_move_states_to_device", move_to_device if from_host else move),
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


# -- kernels -----------------------------------------------------------------------------------------------------------


def _copied_out(
    tracer: Tracer, _: None, gathered: Tensor, sizes: Sequence[int], dim: int = 0, **named: Any
) -> None:  # fmt: skip
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


def _copied_in(
    tracer: Tracer, _: None, gradients: Sequence[Tensor], dim: int, chunks: int, **named: Tensor
) -> None:  # fmt: skip
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
