"""In traced code, "cuda" means the traced device, and streams are that device's.

`torch.zeros(3, device="cuda")`, `x.to("cuda")` and `model.cuda()` work unchanged; a model built on meta before the
trace is a model in host memory, and moving it to "cuda" allocates it there, module by module, as it would on a GPU.

What is born while a stream is current lies in that stream's pool, as on a GPU. Nothing runs here, so there is nothing
to wait for: events are always done. A stream is numbered in the order of its making; 0 is the default one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from memfit.tracing.autocast import Autocast

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer


class TracedEvent:
    """Of anything: it has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: StreamOfCuda | None = None) -> None:
        pass

    def wait(self, stream: StreamOfCuda | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class StreamOfCuda:
    """Made with whatever `torch.cuda.Stream` takes."""

    numbers: ClassVar[Iterator[int]]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream_id = next(self.numbers)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: TracedEvent | None = None) -> TracedEvent:
        return event or TracedEvent()

    def wait_event(self, event: TracedEvent) -> None:
        pass

    def wait_stream(self, stream: StreamOfCuda) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Streams:
    """Those of one trace, and which one is current."""

    def __init__(self) -> None:
        self.kind: type[StreamOfCuda] = type("Stream", (StreamOfCuda,), {"numbers": count()})
        self.default = self.kind()
        self.current = self.default

    @contextmanager
    def within(self, stream: StreamOfCuda | None) -> Iterator[None]:
        """None is allowed, as it is by torch: nothing changes."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def set_current(self, stream: StreamOfCuda) -> None:
        self.current = stream


@contextmanager
def streams_of_cuda(tracer: Tracer) -> Iterator[None]:
    """`torch.cuda` makes and knows the streams of the traced device, and is the module to ask about that device."""
    streams = tracer.streams
    names: dict[str, Any] = {
        "Stream": streams.kind, "stream": streams.within, "set_stream": streams.set_current, "Event": TracedEvent,
        "current_stream": lambda device=None: streams.current, "default_stream": lambda device=None: streams.default,
        "current_device": lambda: 0, "is_initialized": lambda: True,
    }  # fmt: skip
    with ExitStack() as stack:
        for name, replacement in names.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", names["current_stream"]))
        stack.enter_context(mock.patch.object(torch, tracer.device.type, torch.cuda, create=True))
        yield


Tensor = torch.Tensor
FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray)
"""They copy Python data to the device without an op that a mode would see."""
NUMBERS = (bool, int, float)
"""As a value to assign, a number stays in host memory on CUDA (torch/csrc/autograd/python_variable_indexing.cpp)."""


@contextmanager
def cuda_names(names: CudaNames) -> Iterator[None]:
    tracer = names.tracer
    with (
        _optimizers_as_on_cuda(tracer.device.type),
        _parameters_stay_themselves(),
        _calls_without_effect(tracer),
        streams_of_cuda(tracer),
        _storages_resized(tracer),
        names.autocast.answering(),
        _backward_keeps(names),
        names,
    ):
        yield


class CudaNames(TorchFunctionMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.autocast = Autocast(tracer.device, tracer.platform.torch)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return self._made_device(*args, **kwargs)
        if func is Tensor.cuda:
            return self._move(args[0])
        if func is Tensor.__setitem__ and type(args[2]) in NUMBERS and args[0].device.type == self.tracer.device.type:
            args = (*args[:2], torch.scalar_tensor(args[2], dtype=args[0].dtype, device="cpu"))
        args = tuple([self._device(value) for value in args])
        if kwargs:
            kwargs = {name: self._device(value) for name, value in kwargs.items()}
            if type(kwargs.get("device")) is int:
                kwargs["device"] = self.tracer.device
        if func is Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], self.tracer.device, *args[2:])
        if func is Tensor.to and self._is_host_copy_wanted(args, kwargs):
            dtype = next((a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.dtype)), None)
            return self._move(args[0], dtype)
        result = func(*args, **kwargs)
        if func in FROM_HOST and isinstance(result, Tensor):
            self.tracer.track(result, f"torch.{func.__name__}")
            if self.tracer.sent is not None and isinstance(args[0], (bool, int, list)):
                self.tracer.sent.put(result, func(args[0], dtype=result.dtype, device="cpu"))
        return result

    def _made_device(self, *args: Any, **kwargs: Any) -> torch.device:
        kind = kwargs.get("type", args[0] if args else None)
        named = isinstance(kind, str) and kind.split(":")[0] in ("cuda", self.tracer.device.type)
        return self.tracer.device if named or isinstance(kind, int) else torch.device(*args, **kwargs)

    def _device(self, value: Any) -> Any:
        if type(value) is str:
            return self.tracer.device if value == "cuda" or value.startswith("cuda:") else value
        if type(value) is torch.device and value.type == "cuda":
            return self.tracer.device
        return value

    def _is_host_copy_wanted(self, args: Any, kwargs: Any) -> bool:
        target = next((a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.device)), None)
        on_device = args[0].device.type == self.tracer.device.type
        return (
            target is not None
            and target.type == self.tracer.device.type
            and on_device
            and not self.tracer.owns(args[0])
        )

    def _move(self, host: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor in host memory: real, or on the traced device's type but born outside the trace."""
        if self.tracer.owns(host):
            return host
        if host.device.type != self.tracer.device.type:
            return host.to(self.tracer.device, dtype)
        return torch.empty_like(host, dtype=dtype or host.dtype, requires_grad=host.requires_grad)


@contextmanager
def _backward_keeps(names: CudaNames) -> Iterator[None]:
    """torch takes a mode off while it handles `backward()`. It is put on again at the door of the engine, so that the
    names, and autocast, hold in checkpointed blocks that backward runs again."""
    tracer, run = names.tracer, torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_backward(tensors: Any, given: Any, retain: bool, create: bool, *args: Any, **kwargs: Any) -> Any:
        tracer.on_backward(True)
        outermost = not tracer.in_backward
        began = tracer.numbers.begin(tensors) if outermost else 0
        with names, tracer.modules.backward():
            result = run(tensors, given, retain, create, *args, **kwargs)
        if outermost:
            tracer.numbers.end(began, result or (), tensors if create else ())
        tracer.on_backward(False)
        return result

    with mock.patch.object(torch.autograd, "_engine_run_backward", run_backward):
        yield


@contextmanager
def _parameters_stay_themselves() -> Iterator[None]:
    """`model.cuda()` keeps parameter objects on a GPU. From the host's memory to a device without any, torch would make
    new ones, and tied weights and optimizers would come apart, unless it swaps what is inside."""
    future = torch.__future__
    before = future.get_swap_module_params_on_conversion()
    future.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        future.set_swap_module_params_on_conversion(before)


@contextmanager
def _optimizers_as_on_cuda(kind: str) -> Iterator[None]:
    """torch.optim picks its foreach and fused paths by a list of device types."""
    from importlib import import_module

    names = ("torch.utils._foreach_utils", "torch.optim.optimizer", "torch.nn.utils.clip_grad")
    _foreach_utils, optimizer, clip_grad = (import_module(name) for name in names)
    with ExitStack() as stack:
        for name in ("_get_foreach_kernels_supported_devices", "_get_fused_kernels_supported_devices"):
            original: Callable[[], list[str]] | None = getattr(_foreach_utils, name, None)
            if original is None:
                continue
            devices = [*original(), kind]
            for module in (_foreach_utils, optimizer, clip_grad):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, lambda devices=devices: devices))
        yield


@contextmanager
def _calls_without_effect(tracer: Tracer) -> Iterator[None]:
    def nothing() -> Callable[..., None]:
        return lambda *_, **__: None  # one each: torch's compiler keeps a table by identity

    with ExitStack() as stack:
        for name in ("synchronize", "reset_peak_memory_stats", "set_device", "manual_seed", "manual_seed_all"):
            stack.enter_context(mock.patch.object(torch.cuda, name, nothing()))
        stack.enter_context(mock.patch.object(torch.cuda, "empty_cache", tracer.trace.empty_cache))
        yield


@contextmanager
def _storages_resized(tracer: Tracer) -> Iterator[None]:
    """No op that a mode would see."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> None:
        resize(storage, nbytes)
        if storage.device.type == tracer.device.type:
            tracer.resized(storage, nbytes)

    with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
        yield


class CudaTensorType(type):
    """Old names for tensors of one type on the GPU, such as `torch.cuda.FloatTensor`: they make one, and tell one."""

    dtype: torch.dtype

    def __call__(cls, *given: Any, device: Any = None) -> Any:
        where: dict[str, Any] = {"dtype": cls.dtype, "device": "cuda"}
        if len(given) != 1 or isinstance(given[0], (int, torch.Size)):
            return torch.empty(given[0] if given and isinstance(given[0], torch.Size) else given or (0,), **where)
        return given[0].to(**where) if isinstance(given[0], torch.Tensor) else torch.tensor(given[0], **where)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype == cls.dtype


def _tensor_type(name: str) -> CudaTensorType:
    dtype = getattr(torch, name).dtype
    return CudaTensorType(name, (), {"dtype": dtype, "__module__": "torch.cuda", "is_cuda": True})


_KINDS = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
CUDA_TENSOR_TYPES = {f"{kind}Tensor": _tensor_type(f"{kind}Tensor") for kind in _KINDS}


@contextmanager
def default_tensor_type_kept(names: CudaNames) -> Iterator[None]:
    """`torch.set_default_tensor_type("torch.cuda.FloatTensor")`: what is made without a device lies on the GPU, also
    by `torch.Tensor(...)`, which no mode sees."""
    set_type, make = torch.set_default_tensor_type, Tensor.__new__

    def set_default(kind: Any) -> None:
        if type(kind) is str and kind.startswith("torch.cuda."):
            kind = CUDA_TENSOR_TYPES.get(kind.removeprefix("torch.cuda."), kind)
        on_gpu = isinstance(kind, CudaTensorType)
        set_type(getattr(torch, kind.__name__) if on_gpu else kind)
        torch.set_default_device("cuda" if on_gpu else None)
        Tensor.__new__ = make_on_gpu if on_gpu else make  # type: ignore[assignment]

    def make_on_gpu(kind: type[Tensor], *given: Any, **named: Any) -> Any:
        made = make(kind, *given, **named)
        elsewhere = kind is not Tensor or "device" in named or (given and isinstance(given[0], Tensor))
        if elsewhere or names not in _get_current_function_mode_stack():
            return made
        return made.to("cuda")

    with mock.patch.object(torch, "set_default_tensor_type", set_default):
        try:
            yield
        finally:
            Tensor.__new__ = make  # type: ignore[method-assign]
