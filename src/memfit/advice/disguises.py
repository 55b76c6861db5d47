"""Errors that mean 'out of memory' without its numbers: of libraries, of the driver, of the system.

Most come up because torch's allocator already holds the memory that something else needs. So the cure is to leave room,
not a smaller tensor: except on the host, where the process itself grew, and in programs that keep their own accounts.
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
    cure: str
    """What the remedy does, in two or three words."""
    by_line: bool = False
    """Looked for in lines, where a word alone on its line means something else than in a sentence."""


_ROOM = "torch.cuda.set_per_process_memory_fraction(0.9) before the first tensor keeps room outside torch"
_HANDLE = f"{_ROOM}; one small matrix product early on creates the handle while there is room"
_HOST = "fewer data loader workers, no second copy of the weights, streamed loading"
_NEED_LESS = "a smaller model, batch or context"


def _row(pattern: str, certainty: Certainty, where: Where, says: str, remedy: str, cure: str | None = None) -> Disguise:
    cure = cure or ("less on the host" if where == "host" else "leave room")
    found = re.compile(pattern, re.MULTILINE)
    return Disguise(found, certainty, where, says, remedy, cure, pattern.startswith("^"))


DISGUISES = (
    # -- engines and searches that keep their own accounts
    _row(r"No available memory for the cache blocks", "certain", "gpu",
     "no room was left for vLLM's KV cache beside the weights and a trial pass",
     "a higher gpu_memory_utilization where the card has more, smaller weights, a smaller max_num_batched_tokens, or "
     "more cards (tensor_parallel_size)", "make room for the cache"),
    _row(r"KV cache is needed, which is larger than the available KV cache memory", "certain", "gpu",
     "the KV cache of vLLM is too small for a single sequence of max_model_len",
     "max_model_len as the message estimates it, kv_cache_dtype='fp8', or a higher gpu_memory_utilization",
     "a shorter context"),
    _row(r"Free memory on device .{0,60}is less than desired GPU memory utilization", "certain", "gpu",
     "less is free than the share of the whole card that vLLM takes: something else is on it",
     "end what `nvidia-smi` lists there, or set gpu_memory_utilization below what is free of the whole",
     "ask for less of the card"),
    _row(r"No executable batch size found, reached zero", "likely", "gpu",
     "a search for a batch size ran out of memory at every size, 1 included, and kept the messages to itself",
     "a run with a fixed batch size of 1 shows the message; then memfit explain on that", "see the message"),
    # -- other backends
    _row(r"(?:UR|ZE)_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY", "certain", "either",
     "the driver of the Intel GPU refused memory", _NEED_LESS, "need less"),
    _row(r"(?:UR_RESULT|PI)_ERROR_OUT_OF_RESOURCES", "likely", "gpu",
     "the Intel GPU ran out of memory or of another resource of its driver", _NEED_LESS, "need less"),
    _row(r"can NOT allocate memory block with size larger than 4GB", "certain", "gpu",
     "one tensor was larger than the 4 GiB that this Intel GPU gives in one block",
     "fewer rows or shorter sequences: the tensor has to be smaller, not the whole", "a smaller tensor"),
    _row(r"kIOGPUCommandBufferCallbackErrorOutOfMemory|execution failed: Insufficient Memory", "certain", "either",
     "the memory that a Mac's GPU shares with everything else ran out", f"close other programs; {_NEED_LESS}",
     "need less"),
    _row(r"Invalid buffer size: \d{1,6}(?:\.\d{1,3})? [GT]i?B", "certain", "gpu",
     "one tensor was larger than Metal gives in one buffer",
     "fewer rows or shorter sequences: the tensor has to be smaller, not the whole", "a smaller tensor"),
    # -- not torch at all
    _row(r"RESOURCE_EXHAUSTED:.{0,80}(?:[Oo]ut of memory|allocat)|OOM when allocating tensor with shape|"
     r"cupy\.cuda\.memory\.OutOfMemoryError|cudaMalloc failed: out of memory|in function \w{1,40} at \S{0,200}ggml",
     "certain", "gpu", "a program without torch ran out of GPU memory: XLA, TensorFlow, CuPy or llama.cpp",
     f"{_NEED_LESS}; memfit knows torch's memory and can predict nothing here", "need less"),
    # -- libraries beside torch
    _row(r"NCCL WARN (?:.{0,40}Cuda failure (?:\d+ )?'out of memory'|"
     r".{0,40}Failed to CUDA (?:host )?[cm]alloc \d+ bytes)",
     "certain", "gpu", "NCCL found no room for its buffers, which lie outside torch's allocator",
     f"{_ROOM}; start the communicators (one small all-reduce) before the model is made"),
    _row(r"OOM trying to allocate workspace for cublaslt", "certain", "gpu", "cuBLASLt found no room for its workspace",
     _HANDLE),
    _row(r"CUBLAS_STATUS_ALLOC_FAILED", "certain", "gpu", "cuBLAS found no room for its context", _HANDLE),
    _row(r"CUDA driver error: out of memory", "certain", "gpu", "the driver refused memory to an expandable segment",
     _ROOM),
    _row(r"(?:CUDA error: out of memory|HIP error: out of memory|hipErrorOutOfMemory)", "certain", "either",
     "memory was refused outside torch's allocator: to a context, a library, or pinned host memory",
     f"{_ROOM}; if it is pinned host memory (pin_memory, offload), less of that"),
    _row(r"Error out of memory at line \d+ in file \S{0,300}(?:pythonInterface\.cp{0,2}|ops\.cu)", "certain", "either",
     "bitsandbytes found no room, on the GPU or, for its paged memory, on the host",
     f"{_ROOM}; with a paged optimizer look at host memory first"),
    _row(r"CUBLAS_STATUS_NOT_INITIALIZED", "likely", "gpu",
     "cuBLAS could not start: mostly for lack of room for its context, else a broken installation or an earlier "
     "error that surfaces late", f"{_HANDLE}; CUDA_LAUNCH_BLOCKING=1 shows an earlier error"),
    _row(r"(?:CUSPARSE_STATUS|CUSOLVER_STATUS|CUFFT|HIPBLAS_STATUS)_ALLOC_FAILED|rocblas_status_memory_error|"
     r"miopenStatusAllocFailed", "certain", "gpu", "a library of the GPU found no room for its workspace", _HANDLE),
    _row(r"[Uu]nable to find a valid cuDNN algorithm|unable to find an engine to execute this computation", "likely",
     "gpu", "no algorithm for a convolution found room for its workspace, or none knows this shape and type", _HANDLE),
    _row(r"CUDNN_STATUS_ALLOC_FAILED", "likely", "gpu", "cuDNN found no room for its workspace", _HANDLE),
    _row(r"CUDNN_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)", "likely", "gpu",
     "cuDNN found no room for its handle or workspace, or is not installed as torch expects it", _HANDLE),
    _row(r"cusolver error:.{0,80}cusolverDnCreate", "likely", "gpu",
     "the solver's handle found no room; that its hint speaks of NaN misleads", _HANDLE),
    _row(r"CUDNN_STATUS_NOT_SUPPORTED", "possible", "gpu",
     "no room for a workspace, or a shape that cuDNN does not support",
     f"{_ROOM}; if it stays the same on an empty GPU it is the shape"),
    _row(r"NCCL error.{0,200}(?:unhandled cuda error|internal error|unhandled system error)", "possible", "gpu",
     "NCCL failed, perhaps for lack of memory: its own warning above would say so",
     "run again with NCCL_DEBUG=WARN and look for the first rank that failed"),
    _row(r"(?:oom[-_]kill|OOM ?Killed|Out of memory: Killed process|task \d{1,6}: Out Of Memory|"
     r"Memory cgroup out of memory)", "certain", "host",
     "the system killed the process because host memory ran out", _HOST),
    _row(r"DataLoader worker \(pid(?:\(s\))? [\d, ]{1,60}\) (?:is killed by signal: Killed|exited unexpectedly)",
     "likely", "host", "a data loader's worker was killed, most often for lack of host memory", _HOST),
    _row(r"all available RAM|tried to allocate more memory than is available|node running low on memory|"
     r"killed due to memory pressure", "certain", "host",
     "the notebook or the cluster ended the process because host memory ran out", _HOST),
    _row(r"[Pp]aging file is too small|os error 1455", "certain", "host",
     "Windows refused memory to the process: its page file is too small for what the weights are loaded into",
     "a larger page file, or weights loaded one shard at a time", "a larger page file"),
    _row(r"java\.lang\.OutOfMemoryError", "certain", "host", "the heap of a Java process ran out, not the GPU",
     "more for it: spark.executor.memory, or -Xmx"),
    _row(r"insufficient shared memory \(shm\)", "certain", "host",
     "the shared memory between data loader workers ran out",
     "a larger /dev/shm (docker --shm-size), or fewer workers"),
    _row(r"(?:OSError: \[Errno 12\] Cannot allocate memory|\bMemoryError\b|std::bad_alloc|to mmap \d{1,20} bytes)",
     "certain", "host",
     "host memory ran out, not the GPU's", _HOST),
    _row(r"(?:exit (?:code|status):? 137|exitcode ?: ?-9|Signal 9 \(SIGKILL\)|returned non-zero exit status 137)",
     "likely", "host", "the process was killed from outside, most often for lack of host memory",
     f"`dmesg | grep -i oom` tells whether it was; then {_HOST}"),
    _row(r"^(?:\S{0,200}: line \d+:\s+)?(?:\d+ )?Killed(?: {2,}\S.{0,200})?$", "likely", "host",
     "the process was killed from outside, most often for lack of host memory",
     f"`dmesg | grep -i oom` tells whether it was; then {_HOST}"),
    # -- of another memory
    _row(r"out of resource: shared memory", "certain", "gpu",
     "this is not the card's memory: a kernel wants more shared memory on the chip than this GPU has",
     "smaller blocks or fewer stages for that kernel, or a version of it that is made for this GPU",
     "a smaller kernel"),
)  # fmt: skip
