"""The card that a person's own code finds: what `torch.cuda` and `torch.accelerator` say about it.

Its name, size and capability are those of the card that the plan is for. What is allocated at a moment is told by the
replay of the trace up to there, so that code which prints its own peak prints the predicted one.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.machinery import PathFinder
from inspect import signature
from types import FunctionType
from typing import Any
from unittest import mock

import torch
import torch.backends.cudnn.rnn
from torch.utils._python_dispatch import _disable_current_modes

from memfit.errors import TraceError
from memfit.gpus import Gpu
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.replay import Replay, replay
from memfit.tracing.answers import Answers, asking_line
from memfit.tracing.cuda_names import CUDA_TENSOR_TYPES, TracedEvent, default_tensor_type_kept
from memfit.tracing.own_code import (
    CUDA,
    OwnCodeNames,
    OwnCodeTracer,
    check_number,
    devices_grouped_by_name,
    saved_tensors_met_by_name,
    streams_recorded,
)
from memfit.tracing.unknown import UnknownAboveZero, UnknownNumber

RANDOM_STATE_BYTES = 16
CUDA_VERSION = "13.0"
KIND = torch.device("cuda")
CUDNN_MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}
CUDNN_DTYPES = (torch.half, torch.float, torch.double)
"""`torch.backends.cudnn` has no bf16: weights of such a recurrent layer stay where they are."""
NOT_COVERED = (
    "CUDAGraph",
    "graph",
    "make_graphed_callables",
    "MemPool",
    "use_mem_pool",
    "CUDAPluggableAllocator",
    "cudart",
    "change_current_allocator",
    "caching_allocator_alloc",
    "memory_snapshot",
    "memory_usage",
    "device_memory_used",
    "list_gpu_processes",
    "ExternalStream",
    "set_per_process_memory_fraction",
)
REMEMBER = {"transformers.utils.import_utils": ("cuda", "gpu", "bf16"), "torch.utils._triton": ("triton",)}
WITHOUT_CARD = ("bitsandbytes", "torch._inductor.cudagraph_trees")
"""What loads kernels, or torch's own parts for CUDA, where it finds a GPU: here as on a machine without one."""
PATCHED_AT_ONCE = ("datasets", "evaluate", "scipy.optimize", "tiktoken")
"""Whose functions others import by their names, while they are imported themselves."""
TASK_SECONDS = 2.0
"""How long a task of a thread pool is waited for before the code goes on: tasks in their order give one answer."""


@dataclass(frozen=True)
class DeviceProperties:
    """As `torch.cuda.get_device_properties` gives them."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    max_threads_per_multi_processor: int
    warp_size: int = 32
    is_integrated: bool = False
    is_multi_gpu_board: bool = False
    gcnArchName: str = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TraceError(
            f"{asking_line()}the code asks for the card's {name}, which memfit does not know",
            hint="memfit knows name, major, minor, total_memory and multi_processor_count of a card",
        )


class CardGenerator(torch.Generator):
    """On the GPU by name; it draws nothing there."""

    def __new__(cls, device: Any = "cpu") -> Any:
        kind = torch.device("cuda", device) if type(device) is int else torch.device(device)
        made: Any = torch._C.Generator.__new__
        return made(cls if kind.type == "cuda" else torch._C.Generator, "cpu")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA


class Card:
    """Answers about memory at the moment of asking."""

    def __init__(self, tracer: OwnCodeTracer, gpu: Gpu, config: AllocatorConfig) -> None:
        self.tracer, self.gpu, self._config = tracer, gpu, config
        self._peak_from = 0
        self._seen: tuple[int, Replay] | None = None

    @property
    def config(self) -> AllocatorConfig:
        said = self.tracer.alloc_conf
        return self._config if said is None else AllocatorConfig.parse(said)

    @property
    def timeline(self) -> Replay:
        events = len(self.tracer.trace)
        if self._seen is None or self._seen[0] != events:
            self._seen = (events, replay(self.tracer.trace, self.config))
        return self._seen[1]

    def allocated(self, *_: Any) -> int:
        return int(self.timeline.allocated[-1]) if len(self.tracer.trace) else 0

    def reserved(self, *_: Any) -> int:
        return int(self.timeline.reserved[-1]) if len(self.tracer.trace) else 0

    def max_allocated(self, *_: Any) -> int:
        return int(self.timeline.allocated[max(self._peak_from - 1, 0) :].max(initial=0))

    def max_reserved(self, *_: Any) -> int:
        return int(self.timeline.reserved[max(self._peak_from - 1, 0) :].max(initial=0))

    def reset_peak(self, *_: Any) -> None:
        self._peak_from = len(self.tracer.trace)

    def free_and_total(self, *_: Any) -> tuple[int, int]:
        held = self.gpu.context_start_bytes + self.reserved()
        return max(self.gpu.capacity_bytes - held, 0), self.gpu.capacity_bytes

    def stats(self, *_: Any) -> dict[str, int]:
        now = {"allocated_bytes": self.allocated(), "active_bytes": self.allocated(), "reserved_bytes": self.reserved()}
        peak = {"allocated_bytes": self.max_allocated(), "active_bytes": self.max_allocated()}
        made = {f"{name}.all.current": value for name, value in now.items()}
        made |= {f"{name}.all.peak": peak.get(name, self.max_reserved()) for name in now}
        return made | {"num_alloc_retries": 0, "num_ooms": 0}

    def summary(self, *_: Any, **__: Any) -> str:
        """Shorter than torch's own, which counts what nobody needs here."""
        told = [f"{self.properties().name}, predicted"]
        for what, now, peak in (
            ("allocated", self.allocated(), self.max_allocated()),
            ("reserved", self.reserved(), self.max_reserved()),
        ):
            told.append(f"{what:<9} {now >> 20:>8,} MiB now, {peak >> 20:>8,} MiB at the peak")
        return "\n".join(told)

    def measured(self, *_: Any) -> Any:
        """Milliseconds, degrees, watts: told to people, and nobody knows them."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            found = self.tracer.answers.unknown(torch.zeros(()))
        return UnknownAboveZero(found._decide) if isinstance(found, UnknownNumber) else found

    def properties(self, *_: Any) -> DeviceProperties:
        gpu = self.gpu
        return DeviceProperties(
            gpu.name if gpu.name.startswith("NVIDIA") else f"NVIDIA {gpu.name}",
            *gpu.arch,
            gpu.capacity_bytes,
            gpu.sm_count,
            gpu.max_threads_per_sm,
        )


def _random_state(*_: Any) -> torch.Tensor:
    return torch.zeros(RANDOM_STATE_BYTES, dtype=torch.uint8)


def _not_covered(name: str, real: Any, answers: Answers) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        answers.refuse(
            TraceError(
                f"{asking_line()}the code uses torch.cuda.{name}, which memfit does not cover",
                hint="leave it out of the traced code, if the job's memory does not depend on it",
            )
        )

    return type(name, (real,), {"__new__": refuse}) if isinstance(real, type) else refuse


def _device_count() -> int:
    """One; under a launcher, one for each process of this machine, of which this process uses the first."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _of_cuda(card: Card) -> dict[str, Any]:
    arch = card.gpu.arch
    names: dict[str, Any] = {
        "is_available": lambda: True, "device_count": _device_count, "current_device": lambda: 0,
        "is_initialized": lambda: True, "init": lambda: None,
        "get_device_name": lambda *_: card.properties().name, "get_device_capability": lambda *_: arch,
        "get_device_properties": card.properties, "_get_device_properties": card.properties,
        "get_arch_list": lambda: [f"sm_{arch[0]}{arch[1]}"],
        "is_bf16_supported": lambda including_emulation=True: including_emulation or arch >= (8, 0),
        "mem_get_info": card.free_and_total, "memory_allocated": card.allocated, "memory_reserved": card.reserved,
        "max_memory_allocated": card.max_allocated, "max_memory_reserved": card.max_reserved,
        "memory_cached": card.reserved, "max_memory_cached": card.max_reserved, "memory_stats": card.stats,
        "reset_peak_memory_stats": card.reset_peak, "reset_max_memory_allocated": card.reset_peak,
        "reset_accumulated_memory_stats": lambda *_: None, "get_rng_state": _random_state,
        "set_device": _check_index, "get_rng_state_all": lambda: [_random_state()],
        "set_rng_state": lambda *_, **__: None,
        "set_rng_state_all": lambda *_: None, "seed": lambda: None, "seed_all": lambda: None,
        "initial_seed": lambda: 0, "Event": type("Event", (TracedEvent,), {"elapsed_time": lambda *_: card.measured()}),
        "memory_summary": card.summary, "utilization": card.measured, "temperature": card.measured,
        "power_draw": card.measured, "clock_rate": card.measured, "device": _DeviceContext, "device_of": _DeviceContext,
        "default_generators": (CardGenerator("cuda"),), "ipc_collect": lambda: None,
        "get_per_process_memory_fraction": lambda *_: 1.0,
        "is_current_stream_capturing": lambda: False, "can_device_access_peer": lambda *_: False,
    }  # fmt: skip
    missing = {name: getattr(torch.cuda, name) for name in NOT_COVERED if hasattr(torch.cuda, name)}
    return (
        {name: _by_device(getattr(torch.cuda, name, None), value) for name, value in names.items()}
        | CUDA_TENSOR_TYPES
        | {name: _not_covered(name, real, card.tracer.answers) for name, real in missing.items()}
    )


def _by_device(real: Any, pretended: Any) -> Any:
    """There is one card: it is the one that is meant, as the first argument or by name."""
    if not isinstance(real, FunctionType) or not {"device", "__"} & signature(real).parameters.keys():
        return pretended
    if {"device", "__"} & signature(pretended).parameters.keys():
        return pretended
    return lambda *args, device=None, **kwargs: pretended(*args, **kwargs)


def _of_accelerator(card: Card) -> dict[str, Any]:
    return {
        "is_available": lambda: True, "device_count": _device_count, "current_accelerator": lambda *_, **__: KIND,
        "device_index": lambda *_: nullcontext(),
        "current_device_index": lambda: 0, "current_device_idx": lambda: 0, "synchronize": lambda *_: None,
        "set_device_index": _check_index, "set_device_idx": _check_index,
        "memory_allocated": card.allocated, "memory_reserved": card.reserved, "memory_stats": card.stats,
        "max_memory_allocated": card.max_allocated, "max_memory_reserved": card.max_reserved,
        "reset_peak_memory_stats": card.reset_peak, "get_memory_info": card.free_and_total,
        "empty_cache": lambda: card.tracer.trace.empty_cache(),
    }  # fmt: skip


def _check_index(device: Any) -> None:
    if device is None or (type(device) is int and device < 0):  # torch takes these for "as it is"
        return
    check_number(torch.device(device) if isinstance(device, (str, torch.device)) else torch.device("cuda", int(device)))


class _DeviceContext:
    """`torch.cuda.device(0)`."""

    def __init__(self, device: Any = None) -> None:
        if type(device) in (int, str, torch.device):
            _check_index(device)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


def _snapshots_left_out(tracer: OwnCodeTracer) -> Callable[..., None]:
    def left_out(*_: Any, **__: Any) -> None:
        tracer.assume("torch's own memory recorder was left out: nothing was written")

    return left_out


def _scatter_to_one(
    tensor: torch.Tensor, devices: Any, chunk_sizes: Any = None, dim: int = 0, streams: Any = None, **_: Any
) -> tuple[torch.Tensor]:
    """What DataParallel does with one card: what is on the host is copied on a stream of its own."""
    for device in devices:
        _check_index(device)
    with torch.cuda.stream(streams[0]) if streams and streams[0] is not None else nullcontext():
        return (tensor.to("cuda", non_blocking=True),)


@contextmanager
def card_pretended(
    names: OwnCodeNames, gpu: Gpu, config: AllocatorConfig, is_own: Callable[[str], bool] = lambda file: False
) -> Iterator[None]:
    tracer = names.tracer
    card = Card(tracer, gpu, config)
    active = [True]
    left_out = _snapshots_left_out(tracer)
    settled = partial(tracer.settle_allocator, where="a call of the script")
    names_of_cuda = _of_cuda(card)
    replaced: list[tuple[Any, dict[str, Any]]] = [
        (torch.cuda, names_of_cuda),
        (torch.cuda.random, names_of_cuda),
        (torch.accelerator, _of_accelerator(card)),
        (torch.cuda.memory, {
            "_record_memory_history": left_out, "_dump_snapshot": left_out, "_set_allocator_settings": settled,
            **names_of_cuda}),
        (torch._C, {"_accelerator_setAllocatorSettings": settled}),
        (torch.version, {"cuda": CUDA_VERSION}),
        (torch.backends.cuda, {"is_built": lambda: True}),
        (torch.backends.cudnn, {"is_acceptable": lambda tensor: tensor.dtype in CUDNN_DTYPES}),
        (torch.backends.cudnn.rnn, {"get_cudnn_mode": lambda kind: CUDNN_MODES[kind]}),
        (torch, {"Generator": CardGenerator, "_use_cudnn_rnn_flatten_weight": lambda: True}),
        (torch.UntypedStorage, {"data_ptr": lambda storage: storage._cdata}),
        (torch.nn.parallel.comm, {"scatter": _scatter_to_one}),
        (torch.nn.parallel._functions, {"_get_stream": cache(lambda _: torch.cuda.Stream())}),
    ]  # fmt: skip
    with ExitStack() as stack:
        for owner, names_of in replaced:
            for name, value in names_of.items():
                if hasattr(owner, name):
                    kept = _while(active, getattr(owner, name), value)
                    stack.enter_context(mock.patch.object(owner, name, kept))
        stack.enter_context(devices_grouped_by_name())
        stack.enter_context(saved_tensors_met_by_name(names))
        stack.enter_context(streams_recorded(tracer))
        stack.enter_context(_default_device_kept())
        stack.enter_context(default_tensor_type_kept(names))
        stack.enter_context(_threads_traced(names, active))
        stack.enter_context(_imports_as_before(tracer, active, is_own))
        stack.enter_context(_caches_forgotten())
        stack.callback(active.clear)
        yield


def _while(active: list[bool], real: Any, pretended: Any) -> Any:
    """A package that is first imported in a trace keeps what it found there: afterwards that must be torch's own."""
    if not callable(pretended) or isinstance(pretended, type) or not callable(real):
        return pretended

    def either(*args: Any, **kwargs: Any) -> Any:
        return pretended(*args, **kwargs) if active else real(*args, **kwargs)

    return either


@contextmanager
def _default_device_kept() -> Iterator[None]:
    before = torch._GLOBAL_DEVICE_CONTEXT
    held = getattr(before, "device_context", None)
    try:
        yield
    finally:
        if getattr(before, "device_context", None) is not held:
            torch.set_default_device(None if held is None else held.device)


@contextmanager
def _threads_traced(names: OwnCodeNames, active: list[bool]) -> Iterator[None]:
    """torch's modes belong to a thread. A task of a pool is waited for, so that two traces of one job are the same."""
    run, submit = threading.Thread.run, ThreadPoolExecutor.submit
    start, here = threading.Thread.start, threading.current_thread()
    running: set[threading.Thread] = set()
    started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
    """By the traced code: others in this process go their own ways."""

    def note_and_start(thread: threading.Thread) -> None:
        if threading.current_thread() in {here, *running}:
            started.add(thread)
        start(thread)

    def run_traced(thread: threading.Thread) -> None:
        if not active or thread not in started:
            return run(thread)
        running.add(thread)
        try:
            with names, names.tracer:
                return run(thread)
        except BaseException as error:
            if names.tracer.stopped is None or not isinstance(error, names.tracer.stopped):
                _note_failed(names.tracer, error)
                raise
        finally:
            running.discard(thread)

    def submit_in_order(pool: ThreadPoolExecutor, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = submit(pool, *args, **kwargs)
        wait([future], timeout=TASK_SECONDS)
        return future

    with (
        mock.patch.object(ThreadPoolExecutor, "submit", submit_in_order),
        mock.patch.object(threading.Thread, "start", note_and_start),
        mock.patch.object(threading.Thread, "run", run_traced),
    ):
        yield
        for thread in [each for each in tuple(running) if not each.daemon and names.tracer.stopped is None]:
            thread.join(TASK_SECONDS)
            if thread.is_alive():
                raise TraceError(
                    f"a thread that the code started ({thread.name}) still runs when the code has ended",
                    hint="wait for it inside the traced code: memfit does not cover what it does afterwards",
                )


def _note_failed(tracer: OwnCodeTracer, error: BaseException) -> None:
    """Python goes on where a thread ends by an error."""
    if isinstance(error, TraceError):
        tracer.answers.refused = tracer.answers.refused or error
    elif not isinstance(error, SystemExit):
        tracer.assume(f"not modelled: what a thread would have done further, which failed by {type(error).__name__}")


@contextmanager
def _imports_as_before(tracer: OwnCodeTracer, active: list[bool], is_own: Callable[[str], bool]) -> Iterator[None]:
    """A package that the code imports late must not be traced while it sets itself up; a file beside the code is part
    of it, and may build its model there."""
    bootstrap: Any = importlib._bootstrap
    find, importing = bootstrap._find_and_load, threading.local()

    def load(*args: Any) -> Any:
        if args[0] in WITHOUT_CARD and active:
            active.clear()
            try:
                return find(*args)
            finally:
                active.append(True)
        if getattr(importing, "now", False):
            found = find(*args)
            if args[0] in PATCHED_AT_ONCE and _is_whole(args[0]):
                _tell(tracer)
            return found
        beside = find(*args) if _lies_beside(args[0], is_own) else None
        importing.now = True
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                found = beside or find(*args)
                _tell(tracer)
                return found
        finally:
            importing.now = False

    with mock.patch.object(bootstrap, "_find_and_load", load):
        yield


def _tell(tracer: OwnCodeTracer) -> None:
    for told in tuple(tracer.after_import):
        told()


def _is_whole(module: str) -> bool:
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


def _lies_beside(module: str, is_own: Callable[[str], bool]) -> bool:
    """In the folder of the program, or where it was started, and in no environment there."""
    parent = module.rpartition(".")[0]
    inside = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and inside is None:
        return _lies_beside(parent, is_own)
    try:
        spec = PathFinder.find_spec(module, inside)
    except Exception:  # whatever is wrong with it shows when it is imported
        return False
    places = () if spec is None else (spec.origin, *(spec.submodule_search_locations or ()))  # a folder may be no file
    origin = next((os.path.realpath(place) for place in places if place), "")
    folders = [sys.path[0] if sys.path else ""]
    with suppress(FileNotFoundError):  # the program may have removed its own
        folders.append(os.getcwd())
    beside = [os.path.realpath(folder) + os.sep for folder in folders]
    return is_own(origin) and origin.startswith(tuple(beside)) and not module.startswith("memfit.")


@contextmanager
def _caches_forgotten() -> Iterator[None]:
    """transformers and torch remember whether there is a GPU, and which."""

    def forget() -> None:
        for name, words in REMEMBER.items():
            for function in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
                if any(word in getattr(function, "__name__", "") for word in words):
                    getattr(function, "cache_clear", lambda: None)()
        interface: Any = sys.modules.get("torch._dynamo.device_interface")
        getattr(interface, "caching_worker_device_properties", {}).clear()

    forget()
    try:
        yield
    finally:
        forget()
