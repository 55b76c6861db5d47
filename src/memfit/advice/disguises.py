"""Errors that mean 'out of memory' without its numbers: of libraries, of the driver, of the system.

They come up because torch's allocator already holds the memory that something else needs. So the cure is to leave room,
not a smaller tensor: except on the host, where the process itself grew.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Certainty = Literal["certain", "likely", "possible"]
SUREST_FIRST: tuple[Certainty, ...] = ("certain", "likely", "possible")
Where = Literal["gpu", "host", "either"]


@dataclass(frozen=True, slots=True)
class Disguise:
    pattern: re.Pattern[str]
    certainty: Certainty
    where: Where
    says: str
    remedy: str
    by_line: bool = False
    """Looked for in lines, where a word alone on its line means something else than in a sentence."""


_ROOM = "torch.cuda.set_per_process_memory_fraction(0.9) before the first tensor keeps room outside torch"
_HANDLE = f"{_ROOM}; one small matrix product early on creates the handle while there is room"
_HOST = "fewer data loader workers, no second copy of the weights, streamed loading"

_TABLE: tuple[tuple[str, Certainty, Where, str, str], ...] = (
    (r"NCCL WARN (?:.{0,40}Cuda failure (?:\d+ )?'out of memory'|"
     r".{0,40}Failed to CUDA (?:host )?[cm]alloc \d+ bytes)",
     "certain", "gpu", "NCCL found no room for its buffers, which lie outside torch's allocator",
     f"{_ROOM}; start the communicators (one small all-reduce) before the model is made"),
    (r"OOM trying to allocate workspace for cublaslt", "certain", "gpu", "cuBLASLt found no room for its workspace",
     _HANDLE),
    (r"CUBLAS_STATUS_ALLOC_FAILED", "certain", "gpu", "cuBLAS found no room for its context", _HANDLE),
    (r"CUDA driver error: out of memory", "certain", "gpu", "the driver refused memory to an expandable segment",
     _ROOM),
    (r"CUDA error: out of memory", "certain", "either",
     "memory was refused outside torch's allocator: to a context, a library, or pinned host memory",
     f"{_ROOM}; if it is pinned host memory (pin_memory, offload), less of that"),
    (r"Error out of memory at line \d+ in file \S{0,300}(?:pythonInterface\.cp{0,2}|ops\.cu)", "certain", "either",
     "bitsandbytes found no room, on the GPU or, for its paged memory, on the host",
     f"{_ROOM}; with a paged optimizer look at host memory first"),
    (r"CUBLAS_STATUS_NOT_INITIALIZED", "likely", "gpu",
     "cuBLAS could not start: mostly for lack of room for its context, else a broken installation or an earlier "
     "error that surfaces late", f"{_HANDLE}; CUDA_LAUNCH_BLOCKING=1 shows an earlier error"),
    (r"CUDNN_STATUS_ALLOC_FAILED", "likely", "gpu", "cuDNN found no room for its workspace", _HANDLE),
    (r"CUDNN_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)", "likely", "gpu",
     "cuDNN found no room for its handle or workspace, or is not installed as torch expects it", _HANDLE),
    (r"cusolver error:.{0,80}cusolverDnCreate", "likely", "gpu",
     "the solver's handle found no room; that its hint speaks of NaN misleads", _HANDLE),
    (r"CUDNN_STATUS_NOT_SUPPORTED", "possible", "gpu",
     "no room for a workspace, or a shape that cuDNN does not support",
     f"{_ROOM}; if it stays the same on an empty GPU it is the shape"),
    (r"NCCL error.{0,200}(?:unhandled cuda error|internal error|unhandled system error)", "possible", "gpu",
     "NCCL failed, perhaps for lack of memory: its own warning above would say so",
     "run again with NCCL_DEBUG=WARN and look for the first rank that failed"),
    (r"(?:oom-kill|Out of memory: Killed process|OOMKilled|Memory cgroup out of memory)", "certain", "host",
     "the system killed the process because host memory ran out", _HOST),
    (r"DataLoader worker \(pid(?:\(s\))? [\d, ]{1,60}\) (?:is killed by signal: Killed|exited unexpectedly)",
     "likely", "host", "a data loader's worker was killed, most often for lack of host memory", _HOST),
    (r"insufficient shared memory \(shm\)", "certain", "host",
     "the shared memory between data loader workers ran out",
     "a larger /dev/shm (docker --shm-size), or fewer workers"),
    (r"(?:OSError: \[Errno 12\] Cannot allocate memory|\bMemoryError\b)", "certain", "host",
     "host memory ran out, not the GPU's", _HOST),
    (r"(?:exit (?:code|status):? 137|exitcode ?: ?-9|Signal 9 \(SIGKILL\)|returned non-zero exit status 137)",
     "likely", "host", "the process was killed from outside, most often for lack of host memory",
     f"`dmesg | grep -i oom` tells whether it was; then {_HOST}"),
    (r"^(?:\S{0,200}: line \d+:\s+)?(?:\d+ )?Killed(?: {2,}\S.{0,200})?$", "likely", "host",
     "the process was killed from outside, most often for lack of host memory",
     f"`dmesg | grep -i oom` tells whether it was; then {_HOST}"),
)  # fmt: skip

DISGUISES = tuple(
    Disguise(re.compile(pattern, re.MULTILINE), certainty, where, says, remedy, pattern.startswith("^"))
    for pattern, certainty, where, says, remedy in _TABLE
)
