"""The card that torch's compiler finds: what Dynamo and Inductor ask about it while they plan the code."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from memfit.platform import Platform
from memfit.tracing.compiled.torch_names import (
    DEVICE_KINDS,
    GUARDS,
    KIND_CUDA,
    KIND_META,
    compiler,
    is_triton_here,
    missing,
)
from memfit.tracing.pretended_card import CUDA_VERSION, RANDOM_STATE_BYTES

CUDA = torch.device("cuda", 0)
TRITONS_FLUSH_BYTES = 256 << 20
OPT_IN_SHARED_BYTES = 232_448
SHARED_BYTES = 49_152
REGISTERS = 65_536
REMEMBERING = ("inductor_utils", "triton_asked", "scheduler", "pad_mm")
"""Modules whose functions remember what they were told about the card."""


class PretendedGenerator(torch.Generator):
    """Of random numbers on the card; it draws none."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    def clone_state(self) -> PretendedGenerator:
        return self

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, _: Any) -> PretendedGenerator:
        return self


def flush_bytes(platform: Platform) -> int:
    """Of the buffer that is written before each run of what is timed: as large as the L2 cache, if torch times it
    (`InductorBenchmarker`); that of triton has always 256 MiB."""
    config: Any = import_module("torch._inductor.config")
    by_torch = config.use_experimental_benchmarker or getattr(config, "use_torch_profiler_benchmarker", False)
    return platform.l2_bytes if by_torch else TRITONS_FLUSH_BYTES


def properties_of(platform: Platform) -> Any:
    """As `torch.cuda.get_device_properties` has them, as far as they move what Inductor decides."""
    return SimpleNamespace(
        name="a card",
        major=platform.arch[0],
        minor=platform.arch[1],
        multi_processor_count=platform.sm_count,
        max_threads_per_multi_processor=platform.max_threads_per_sm,
        total_memory=80 << 30,
        warp_size=32,
        max_threads_per_block=1024,
        regs_per_multiprocessor=REGISTERS,
        L2_cache_size=platform.l2_bytes,
        shared_memory_per_block=SHARED_BYTES,
        shared_memory_per_block_optin=OPT_IN_SHARED_BYTES,
        shared_memory_per_multiprocessor=OPT_IN_SHARED_BYTES + 1024,
        gcnArchName="",
        uuid="",
        is_integrated=False,
        memory_clock_rate=2_619_000,
        memory_bus_width=6_144,
        clock_rate=1_980_000,
    )


def _of_cuda(platform: Platform) -> dict[str, Any]:
    found = properties_of(platform)
    return {
        "is_available": lambda: True, "current_device": lambda: 0, "device_count": lambda: 1,
        "get_device_properties": lambda *_, **__: found, "get_device_capability": lambda *_, **__: platform.arch,
        "get_device_name": lambda *_: found.name,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or platform.arch >= (8, 0),
        "_lazy_init": lambda: None, "is_initialized": lambda: False, "synchronize": lambda *_: None,
        "current_stream": lambda *_: None, "set_device": lambda *_: None, "device": lambda *_: nullcontext(),
        "_exchange_device": lambda *_: 0, "_maybe_exchange_device": lambda *_: 0,
        "get_rng_state": lambda *_, **__: torch.zeros(RANDOM_STATE_BYTES, dtype=torch.uint8),
        "set_rng_state": lambda *_, **__: None, "default_generators": (PretendedGenerator(),),
    }  # fmt: skip


PRETENDED = frozenset(_of_cuda(Platform()))


def _of_interface(platform: Platform) -> dict[str, Any]:
    asked = _of_cuda(platform)
    same = ("get_device_properties", "current_device", "is_available", "device_count", "is_bf16_supported",
            "set_device", "synchronize")  # fmt: skip
    return {name: asked[name] for name in same} | {
        "get_compute_capability": lambda *_: 10 * platform.arch[0] + platform.arch[1],
        "exchange_device": lambda *_: 0, "maybe_exchange_device": lambda *_: 0, "get_raw_stream": lambda *_: 0,
        "raise_if_triton_unavailable": lambda *_: None, "is_triton_capable": lambda *_: True,
    }  # fmt: skip


_IN_C = {
    "_cuda_getDevice": lambda: 0, "_cuda_getDeviceCount": lambda: 1, "_cuda_getCurrentRawStream": lambda *_: 0,
    "_cuda_exchangeDevice": lambda *_: 0, "_cuda_maybeExchangeDevice": lambda *_: 0,
}  # fmt: skip


@contextmanager
def gpu_pretended(platform: Platform) -> Iterator[None]:
    """Without triton nobody but Inductor's code generator is told that it is there: Dynamo would import it."""
    torchs = compiler()
    interface = torchs.device_interface.CudaInterface
    asking = [torchs.inductor_utils, torchs.scheduler, torchs.pad_mm]
    names = ["has_triton", "is_triton_capable"]
    if is_triton_here():
        asking.append(torchs.triton_asked)
        names.append("has_triton_package")
    replaced: list[tuple[Any, dict[str, Any]]] = [
        (torch.cuda, _of_cuda(platform)),
        (torch._C, _IN_C),
        (torch, {"Generator": torch._C.Generator}),
        (torch.version, {"cuda": CUDA_VERSION}),
        (interface, {name: staticmethod(value) for name, value in _of_interface(platform).items()}),
        (interface.Worker, {"get_device_properties": staticmethod(lambda *_: properties_of(platform)),
                            "current_device": staticmethod(lambda: 0)}),
        (torchs.triton_asked, {"triton_hash_with_backend": lambda *_, **__: "", "triton_backend": lambda *_: None}),
        *((module, {name: lambda *_, **__: True for name in names if hasattr(module, name)}) for module in asking),
    ]  # fmt: skip
    if loaded := sys.modules.get("triton.runtime"):
        replaced.append((loaded.driver, {"_active": _driver_of(platform)}))
    with ExitStack() as stack:
        for owner, values in replaced:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield


def _driver_of(platform: Platform) -> Any:
    """triton's, which torch asks how to look into a Triton kernel of the program's own."""
    target = import_module("triton.backends.compiler").GPUTarget("cuda", 10 * platform.arch[0] + platform.arch[1], 32)
    return SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)


def forget_the_card() -> None:
    """What torch remembers of the card it last saw."""
    torchs = compiler()
    for short in REMEMBERING:
        for value in list(vars(getattr(torchs, short)).values()):
            if callable(clear := getattr(value, "cache_clear", None)):
                clear()
    getattr(torchs.device_interface, "caching_worker_device_properties", {}).clear()


@contextmanager
def nothing_logged_about_the_card() -> Iterator[None]:
    """Of a small one torch says that it will not time products, which nobody has asked for."""
    log = compiler().inductor_utils.log

    def is_of_the_job(record: logging.LogRecord) -> bool:
        return not record.msg.startswith("Not enough SMs")

    log.addFilter(is_of_the_job)
    try:
        yield
    finally:
        log.removeFilter(is_of_the_job)


@contextmanager
def guard_of_no_device() -> Iterator[None]:
    """C++ asks for a guard of "cuda" where shapes on it meet autograd. A build without CUDA has none, and that of a
    build with CUDA would wake the driver: the traced device's stands in for it."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    try:
        guards = (ctypes.c_void_p * DEVICE_KINDS).in_dll(library, GUARDS)
    except ValueError as error:
        raise missing(GUARDS) from error
    before, guards[KIND_CUDA] = guards[KIND_CUDA], guards[KIND_META]
    try:
        yield
    finally:
        guards[KIND_CUDA] = before
