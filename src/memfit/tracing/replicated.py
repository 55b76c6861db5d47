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

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer

aten = torch.ops.aten
Tensor = torch.Tensor


HOST = torch.device("cpu")
COPIES = (aten._to_copy.default, aten.copy_.default)


@contextmanager
def ddp_traced(tracer: Tracer) -> Iterator[None]:
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
        # a future looks for tensors in its value, to wait for their device
        stack.enter_context(mock.patch.object(torch._jit_internal, "_extract_tensors", lambda value: []))
        stack.enter_context(mock.patch.object(Logger, "set_runtime_stats_and_log", lambda _: None))
        stack.enter_context(mock.patch.object(tracer, "sent", Sent()))
        yield


class Sent:
    """Whole numbers that were copied from the host to the device."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[torch.UntypedStorage], Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor | None:
        storage = tensor.untyped_storage()
        kept = self._values.get(storage._cdata)
        return kept[1] if kept is not None and kept[0]() is storage else None

    def number(self, tensor: Tensor) -> int | None:
        known = self.of(tensor)
        return None if known is None else int(known.flatten()[tensor.storage_offset()])

    def read_back(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """In host memory, if that is where this op copies to and the values are known."""
        if func is aten._to_copy.default and kwargs.get("device") == HOST:
            return self.of(args[0])
        if func is not aten.copy_.default or not args[0].is_cpu or (known := self.of(args[1])) is None:
            return None
        written: Tensor = args[0].copy_(known)
        return written

    def keep(self, func: Any, args: Any, out: Any) -> None:
        if func in COPIES:
            source = args[0] if func is aten._to_copy.default else args[1]
            if source.is_cpu and not out.is_cpu and not source.is_floating_point():
                self.put(out, source)
        elif func is torch.ops.c10d.allgather_.default and (known := self.of(args[1][0])) is not None:
            for gathered in args[0][0]:
                self.put(gathered, known)

    def put(self, tensor: Tensor, value: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._values[storage._cdata] = (weakref.ref(storage), value.clone())
