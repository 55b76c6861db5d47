"""Which errors mean that memory ran out, also where a library says it in its own words."""

from __future__ import annotations

DISGUISED = (
    "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: can't allocate",
    "DefaultCPUAllocator: not enough memory", "would exceed allowed memory",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in DISGUISED)


def on_the_host(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
