"""bitsandbytes on the traced device: the Python around its CUDA kernels runs as it is, the kernels do nothing.

What it allocates it asks of torch, in Python (backends/cuda/ops.py), so a private copy of that file, with a library
whose functions do nothing, allocates on the traced device what the real one does on a GPU. States of paged
optimizers lie in managed memory, which torch's allocator does not know: here they have addresses and no memory.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any
from unittest import mock

import torch

from memfit.errors import TraceError
from memfit.tracing.own_code import OwnCodeTracer
from memfit.units import format_bytes

PACKAGE = "bitsandbytes"
KERNELS = "bitsandbytes.backends.cuda.ops"
SEEN = ("0.50.",)
"""Versions whose allocations were compared with a GPU's."""


@contextmanager
def bitsandbytes_traced(tracer: OwnCodeTracer) -> Iterator[None]:
    """Nothing until the traced code has imported it."""
    with ExitStack() as stack:
        library = KernelsThatDoNothing()
        settled: list[bool] = []

        def settle() -> None:
            functional: Any = sys.modules.get(f"{PACKAGE}.functional")
            if settled or functional is None or PACKAGE not in sys.modules:
                return
            settled.append(True)
            stack.enter_context(mock.patch.object(functional, "lib", library))
            stack.enter_context(
                mock.patch.object(functional, "name2qmap", {})
            )  # tables on a device, made once a process
            tracer.kernels_of[PACKAGE] = _kernels(library)
            _tell_version(tracer)

        settle()
        tracer.after_import.append(settle)
        try:
            yield
        finally:
            tracer.after_import.remove(settle)
            tracer.kernels_of.pop(PACKAGE, None)
            if library.managed_bytes:
                managed = format_bytes(library.managed_bytes)
                tracer.assume(
                    f"paged optimizer states: {managed} of managed memory, which moves between host and GPU as there is"
                    " room; neither allocated nor reserved by torch, and not counted here"
                )


class KernelsThatDoNothing:
    """In place of the shared library."""

    compiled_with_cuda = True

    def __init__(self) -> None:
        self.managed_bytes = 0
        self._managed: list[tuple[mmap.mmap, Any]] = []
        self._functions: dict[str, Any] = {"cget_managed_ptr": self._managed_address}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._functions.setdefault(name, Kernel())

    def _managed_address(self, size: Any) -> int:
        """Pages that nobody writes to take no memory."""
        pages = mmap.mmap(-1, max(size.value, 1))
        start = ctypes.c_char.from_buffer(pages)
        self._managed.append((pages, start))
        self.managed_bytes += size.value
        return ctypes.addressof(start)


class Kernel:
    """A function of the library: it has done what it was asked to."""

    argtypes: Any = None
    restype: Any = None

    def __call__(self, *args: Any) -> int:
        return 0


def _kernels(library: KernelsThatDoNothing) -> dict[str, Callable[..., Any]]:
    """By the name of the op: what bitsandbytes would register for CUDA."""
    registry, extension = (importlib.import_module(f"{PACKAGE}.{name}") for name in ("_ops", "cextension"))
    found: dict[str, Callable[..., Any]] = {}

    def register_kernel(name: str, device: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def keep(function: Callable[..., Any]) -> Callable[..., Any]:
            found[name] = function
            return function

        return keep

    spec = importlib.util.find_spec(KERNELS)
    if spec is None or spec.origin is None:
        raise TraceError(
            f"bitsandbytes {version(PACKAGE)} does not have its CUDA kernels where memfit looks for them ({KERNELS})",
            hint="pip install -U bitsandbytes",
        )
    private = importlib.util.spec_from_file_location(f"{KERNELS}_traced", spec.origin)
    assert private is not None and private.loader is not None
    module = importlib.util.module_from_spec(private)
    with (
        mock.patch.object(registry, "register_kernel", register_kernel),
        mock.patch.object(extension, "lib", library),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True),
    ):
        private.loader.exec_module(module)
    return found


def _tell_version(tracer: OwnCodeTracer) -> None:
    here = version(PACKAGE)
    if not here.startswith(SEEN):
        tracer.assume(
            f"bitsandbytes {here} was not compared with a GPU (0.50 was): its own code was traced all the same"
        )
