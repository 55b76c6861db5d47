"""What the driver says of the GPUs of this machine: memory, load and who holds it, through NVML.

NVML sees every process, torch sees only its own: the two side by side tell a neighbour from a leak. Inside a container
the driver may hide other processes or show them under the host's numbers; what it does not tell is None, never 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


class NoNvml(Exception):
    """Why there is nothing to read, in words for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    pid: int
    used_bytes: int | None
    name: str | None
    """None where the number means nothing here: another container's process, or one that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    busy_percent: int | None
    processes: tuple[GpuProcess, ...]

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


@contextmanager
def nvml() -> Iterator[Any]:
    """The library, started and stopped."""
    try:
        import pynvml
    except ImportError as error:
        raise NoNvml("the package nvidia-ml-py is not installed: pip install nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoNvml(f"no NVIDIA driver answers here ({error})") from error
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def read_gpus() -> tuple[GpuState, ...]:
    """All GPUs, now. Raises NoNvml where the driver cannot be asked."""
    with nvml() as library:
        return tuple(_state(library, index) for index in range(library.nvmlDeviceGetCount()))


def gpu_of_torch_device(library: Any, index: int) -> Any:
    """The driver's handle of what torch calls `cuda:index`: CUDA_VISIBLE_DEVICES renumbers and may name GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        chosen = [each.strip() for each in visible.split(",") if each.strip()]
        if index < len(chosen) and not chosen[index].isdigit():
            return library.nvmlDeviceGetHandleByUUID(chosen[index])
        index = int(chosen[index]) if index < len(chosen) else index
    return library.nvmlDeviceGetHandleByIndex(index)


def _state(library: Any, index: int) -> GpuState:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    load = _asked(library, lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu)
    return GpuState(
        index=index, uuid=_text(library.nvmlDeviceGetUUID(handle)), name=_text(library.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total), used_bytes=int(memory.used), busy_percent=load,
        processes=tuple(_processes(library, handle)),
    )  # fmt: skip


def _processes(library: Any, handle: Any) -> Iterator[GpuProcess]:
    found = _asked(library, lambda: library.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    for each in sorted(found, key=lambda process: -(process.usedGpuMemory or 0)):
        pid, used = int(each.pid), each.usedGpuMemory
        yield GpuProcess(pid=pid, used_bytes=None if used is None else int(used), name=_name_of(pid))


def _asked(library: Any, question: Any) -> Any:
    """Not every card answers every question: None is what such a card says."""
    try:
        return question()
    except library.NVMLError:
        return None


def _name_of(pid: int) -> str | None:
    import psutil

    try:
        command = psutil.Process(pid).cmdline()
    except psutil.Error:
        return None
    return " ".join(command)[:200] or None


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
