"""The NVIDIA driver of this machine: its version, the newest CUDA that it serves, what each GPU can compute."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.recording.nvml import nvml


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    version: str
    cuda: tuple[int, int]
    """The newest that it serves."""
    capabilities: tuple[tuple[int, int], ...]
    """Of each GPU, in the driver's order: (9, 0) is sm_90."""


def read_driver() -> Driver:
    """Raises NoNvml where no driver answers. No CUDA context is made, so this takes no memory of a GPU."""
    with nvml() as library:
        version = library.nvmlSystemGetDriverVersion()
        cuda = int(library.nvmlSystemGetCudaDriverVersion_v2())
        handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        capabilities = [library.nvmlDeviceGetCudaComputeCapability(handle) for handle in handles]
    return Driver(
        version=version.decode() if isinstance(version, bytes) else str(version),
        cuda=(cuda // 1000, cuda % 1000 // 10),
        capabilities=tuple((int(major), int(minor)) for major, minor in capabilities),
    )
