"""What DistributedDataParallel must find to run on the traced device: the values it sends and reads back.

Its reducer is C++ that goes through the dispatcher, so its buckets are seen as all else is. But it sends numbers to the
other processes by way of the device and compares what comes back: how many weights there are, their shapes, the order
of buckets. They come from the host and nobody changes them on the way, so they are kept beside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer

aten = torch.ops.aten
Tensor = torch.Tensor


@contextmanager
def ddp_traced(tracer: Tracer) -> Iterator[None]:
    from torch.nn.parallel import DistributedDataParallel

    def reading_back(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before, tracer.default_category = tracer.default_category, "gradients"
            try:
                with _SentAndReadBack(tracer):
                    return method(*args, **kwargs)
            finally:
                tracer.default_category = before

        return run

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.distributed.Logger, "set_runtime_stats_and_log", lambda _: None))
        for name in ("__init__", "_pre_forward"):  # buckets are made, and made anew in the second step
            wrapped = reading_back(getattr(DistributedDataParallel, name))
            stack.enter_context(mock.patch.object(DistributedDataParallel, name, wrapped))
        # a future looks for tensors in its value, to wait for their device
        stack.enter_context(mock.patch.object(torch._jit_internal, "_extract_tensors", lambda value: []))
        yield


class _SentAndReadBack(TorchDispatchMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self._values: dict[int, tuple[weakref.ref[torch.UntypedStorage], Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default and (known := self._value(args[0])) is not None:
            return known.flatten()[args[0].storage_offset()].item()
        if func is aten.copy_.default and not self._is_traced(args[0]) and (known := self._value(args[1])) is not None:
            args[0].copy_(known)
            return args[0]
        out = func(*args, **(kwargs or {}))
        if func is aten._to_copy.default:
            self._keep(out, args[0])
        elif func is aten.copy_.default:
            self._keep(args[0], args[1])
        elif func is torch.ops.c10d.allgather_.default:
            for gathered in args[0][0]:
                self._keep(gathered, self._value(args[1][0]))
        return out

    def _is_traced(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.tracer.device.type

    def _keep(self, tensor: Tensor, value: Tensor | None) -> None:
        if value is None or not self._is_traced(tensor) or self._is_traced(value) or value.is_floating_point():
            return
        storage = tensor.untyped_storage()
        self._values[storage._cdata] = (weakref.ref(storage), value.clone())

    def _value(self, tensor: Tensor) -> Tensor | None:
        storage = tensor.untyped_storage()
        kept = self._values.get(storage._cdata)
        return kept[1] if kept is not None and kept[0]() is storage else None
