"""An out-of-memory message out of any text: which form it has, and every number in it.

    found = find_ooms(text)           # a log of megabytes, a pasted traceback, one line
    found.last.oom.requested, found.last.oom.capacity, found.last.line

The forms of all torch releases from 1.0 on are known, those of other backends, and errors of libraries that mean the
same without saying it. One tolerant pattern a clause, in any order, each of which may be missing: releases differ by
clauses. A size is an interval, for it was printed with two decimals; and what torch prints as the request is the
segment that it asked of the driver:

    2.00 MiB  was a request of at most 1 MiB         20.00 MiB  one of 1 to 10 MiB, or of 18 to 20 MiB
    X MiB     one of at most X, by less than 2 MiB   X GiB      the same, and half a hundredth more or less

The first two are segments that requests share, so they say nothing about the tensor.

Some errors mean 'out of memory' without its numbers: of libraries, of the driver, of the system. Most come up because
torch's allocator already holds the memory that something else needs. So the cure is to leave room, not a smaller
tensor: except on the host, where the process itself grew, and in programs that keep their own accounts.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Literal, TypeVar

from memfit.explaining.text import Excerpt, Passage, may_break_words, passages
from memfit.units import GiB, KiB, MiB

Certainty = Literal["certain", "likely", "possible"]
SUREST_FIRST: tuple[Certainty, ...] = ("certain", "likely", "possible")
Where = Literal["gpu", "host", "either"]
T = TypeVar("T")

MAX_MESSAGE = 4000
"""No message is longer, whatever follows it. One of an eight-GPU node with forty processes has 2,600 characters."""
MAX_FOUND = 2000
BEFORE_ALLOCATED = 600
"""So much of a message may stand before what is allocated, without its processes."""
NOT_AVAILABLE = 1 << 60
"""Sizes from here on are a driver's way to say that it does not know: WSL prints 2^64 bytes."""

UNITS = {
    "bytes": 1, "byte": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40,
}  # fmt: skip
"""Those without an i too: older MPS messages have them, and mean powers of two all the same."""
SIZE = r"(?<![\d.])(?<!\d )(?<!\d\. )(\d{1,20}(?:\.\d{1,6})?)\s?(bytes|byte|[KMGT]i?B|B)\b"
"""Not what is left of a number that a line break has cut in two: no message has a digit and a blank before a size."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a printed size can have been: between `low` and `high` bytes, both included."""

    text: str
    low: int
    high: int

    @property
    def middle(self) -> int:
        return (self.low + self.high) // 2

    @property
    def tolerance(self) -> int:
        return (self.high - self.low + 1) // 2

    def may_be(self, nbytes: int) -> bool:
        return self.low <= nbytes <= self.high


@dataclass(frozen=True, slots=True)
class ProcessUse:
    pid: int | None
    """None for the process that failed, where the message knows it."""
    used: Size | None
    """None where the driver did not know: the message then has 2^64 or 0 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Oom:
    form: str
    """The message's family: cuda, hip, xpu, npu, musa, mlu, mps, cpu, cuda-async, or `disguised`."""
    device: int | None = None
    requested: Size | None = None
    """What was asked of the driver: for CUDA the new segment, not the tensor."""
    capacity: Size | None = None
    free: Size | None = None
    allowed: Size | None = None
    allocated: Size | None = None
    reserved: Size | None = None
    unallocated: Size | None = None
    private_pools: Size | None = None
    other_allocations: Size | None = None
    """Of MPS: what the process has on the GPU beside torch's allocator."""
    processes: tuple[ProcessUse, ...] = ()
    requests_exactly: bool = False
    """Whether `requested` is the tensor's own size and not that of a segment."""
    over_an_exabyte: bool = False
    certainty: Certainty = "certain"
    """A library's error may have another cause."""
    where: Where = "gpu"
    says: str = ""
    """What a disguised one means."""
    remedy: str = ""
    cure: str = ""
    """What the remedy does, in two or three words."""
    message: str = ""
    unknown: dict[str, str] = field(default_factory=dict)
    """Of each size that is not known, why."""

    def sizes(self) -> dict[str, Size | None]:
        return {name: getattr(self, name) for name in SIZES}

    @property
    def known(self) -> int:
        """How many numbers it gives."""
        return sum(size is not None for size in (*self.sizes().values(), self.device)) + len(self.processes)


SIZES = tuple(each.name for each in fields(Oom) if each.type == "Size | None")


@dataclass(frozen=True, slots=True)
class LocatedOom:
    oom: Oom
    passage: Passage
    offset: int
    """In the passage's one line."""

    @property
    def line(self) -> int:
        """In the text, the first being 1."""
        return self.passage.line_at(self.offset)


@dataclass(frozen=True, slots=True)
class OomMessages:
    ooms: tuple[LocatedOom, ...]
    """In the order of the text. Disguised ones are in it only if there is no other."""
    requests: int = 0
    """How many the whole text has by a count of words: of very many only the first and the last ones are read."""

    @property
    def count(self) -> int:
        return max(len(self.ooms), self.requests if self.ooms and _plain(self.last) else 0)

    @property
    def first(self) -> LocatedOom:
        return self.ooms[0]

    @property
    def last(self) -> LocatedOom:
        return self.ooms[-1]

    def __bool__(self) -> bool:
        return bool(self.ooms)


def find_ooms(source: str | Excerpt) -> OomMessages:
    """All messages, each read as the text's line breaks make most sense; what came before the last one was survived."""
    text = source if isinstance(source, Excerpt) else Excerpt(source)
    found = _find(passages(text))
    if may_break_words(text.text):
        by_width = _find(passages(text, breaks_words=True))
        found = max(found, by_width, key=lambda each: sum(one.oom.known + 1 for one in each.ooms if _plain(one)))
    return replace(found, requests=text.requests)


def _plain(located: LocatedOom) -> bool:
    return located.oom.form != "disguised"


def _find(all_passages: Iterable[Passage]) -> OomMessages:
    plain: list[LocatedOom] = []
    disguised: list[LocatedOom] = []
    for passage in all_passages:
        here = [(at, oom) for reader in (_native, _async, _mps, _cpu) for at, oom in reader(passage.flat)]
        here.sort(key=lambda each: each[0])
        plain += [LocatedOom(oom, passage, at) for at, oom in here]
        if not plain:
            disguised += [LocatedOom(oom, passage, at) for at, oom in _without_words(passage)]
    return OomMessages(tuple(_ends(plain or disguised)))


def _without_words(passage: Passage) -> list[tuple[int, Oom]]:
    """Where nobody says that memory ran out: a sure disguise, the rest of a message, or whatever there is."""
    disguised = _disguised(passage)
    sure = disguised and disguised[0][1].certainty == "certain" and disguised[0][1].says != NAME_ONLY
    return disguised if sure else list(_headless(passage.flat)) or disguised


def _ends(found: list[T]) -> list[T]:
    """Of very many the first ones and the last ones."""
    return found if len(found) <= MAX_FOUND else [*found[: MAX_FOUND // 2], *found[-MAX_FOUND // 2 :]]


def parse_size(number: str, unit: str) -> Size | None:
    """None for a number that means 'not available'."""
    scale = UNITS[unit.lower()]
    decimals = len(number.partition(".")[2])
    value, half = float(number) * scale, 0.5 * 10**-decimals * scale if decimals else 0.0
    if value >= NOT_AVAILABLE:
        return None
    return Size(f"{number} {unit}", max(int(value - half) + (half > 0), 0), int(value + half))


# -- the sizes that a tensor can have had -----------------------------------------------------------------------------

SMALL_SEGMENT, LARGE_SEGMENT, SEGMENT_ROUNDING = 2 * MiB, 20 * MiB, 2 * MiB
"""c10/core/AllocatorConfig.h: kSmallBuffer, kLargeBuffer, kRoundLarge."""
BLOCK = 512

Interval = tuple[int, int]
"""In bytes, both ends included."""


def request_intervals(oom: Oom) -> tuple[Interval, ...]:
    """The sizes that the tensor itself can have had."""
    if oom.requested is None:
        return ()
    if oom.requests_exactly:
        return ((oom.requested.low, oom.requested.high),)
    return segment_intervals(oom.requested)


def segment_intervals(printed: Size) -> tuple[Interval, ...]:
    """A printed segment is what a request was rounded up to."""
    if printed.high <= KiB:
        return ((printed.low, printed.high),)
    if printed.may_be(SMALL_SEGMENT) and printed.high < SMALL_SEGMENT + MiB:
        return ((1, MiB),)
    if printed.may_be(LARGE_SEGMENT) and printed.high < LARGE_SEGMENT + MiB:
        return ((MiB + 1, 10 * MiB - 1), (18 * MiB + 1, LARGE_SEGMENT))
    if printed.low <= GiB:  # a whole number of 2 MiB; in the first releases of 128 KiB
        multiple = round(printed.middle / SEGMENT_ROUNDING) * SEGMENT_ROUNDING
        top = multiple if printed.may_be(multiple) else printed.high
        return ((max(top - SEGMENT_ROUNDING + 1, 1), top),)
    return ((max(printed.low - SEGMENT_ROUNDING + 1, 1), printed.high),)


def exact_interval(requested_bytes: int) -> tuple[Interval, ...]:
    """A recorded request, which the allocator has rounded up to its blocks."""
    return ((max(requested_bytes - BLOCK + 1, 1), requested_bytes),)


# -- the native allocators of CUDA, HIP, XPU and their likes -----------------------------------------------------

_START = re.compile(r"[Oo]ut of memory\b(?:\. ?Tried to allocate (?:" + SIZE + r"|(more than 1EB))?)?")
_NAMED = re.compile(r"\b(CUDA|HIP|XPU|NPU|MUSA|MLU) $")
_OF_TORCH_0 = re.compile(r"(?i:cuda) runtime error \(2\) ?: $")
_CLAUSES = {
    name: tuple(re.compile(pattern) for pattern in patterns)
    for name, patterns in {
        "capacity": (r"total capaci?ty of " + SIZE, SIZE + r" total capacity"),
        "free": (r"of which " + SIZE + r" is free", SIZE + r" free;"),
        "allowed": (SIZE + r" allowed;",),
        "allocated": (SIZE + r" is allocated by PyTorch", SIZE + r" already allocated"),
        "reserved": (SIZE + r" reserved in total by PyTorch", SIZE + r" cached\)"),
        "unallocated": (SIZE + r" is reserved by PyTorch but unallocated",),
        "private_pools": (r"with " + SIZE + r" allocated in private pools",),
    }.items()
}
_DEVICE = re.compile(r"(?:GPU|XPU|NPU|MUSA|MLU) {1,2}(\d{1,3})\b")
_OWN = re.compile(r"this process has " + SIZE + r" memory in use")
_OTHER = re.compile(r"Process (\d{1,10}) has " + SIZE + r" memory in use")
_END = re.compile(r"but unallocated\.?|reserved in total by PyTorch\)|cached\)|memory in use\.|is free\.|allowed;")


def _native(line: str) -> Iterator[tuple[int, Oom]]:
    starts = _ends([each for each in _START.finditer(line) if _is_message(line, each)])
    for start, following in zip(starts, [*starts[1:], None], strict=False):
        end = min(start.end() + MAX_MESSAGE, len(line) if following is None else following.start())
        named = _NAMED.search(line[max(start.start() - 6, 0) : start.start()])
        at = start.start() - (len(named[0]) if named else 0)
        yield at, _read_native(line[at : start.end()], start, line[start.end() : end], named)


def _is_message(line: str, start: re.Match[str]) -> bool:
    """`Tried to allocate` makes it one, and so does the device's name before it. In MPS messages and in library errors
    the words stand after others."""
    before = line[max(start.start() - 30, 0) : start.start()]
    named = _NAMED.search(before) or _OF_TORCH_0.search(before)
    return not before.endswith("backend ") and ("Tried" in start[0] or named is not None)


def _read_native(head: str, start: re.Match[str], rest: str, named: re.Match[str] | None) -> Oom:
    form = (named[1] if named else "cuda").lower()
    if start[3] is not None:
        says = "a size of 2^60 bytes or more: a corrupt or negative size, never a real need"
        unknown = dict.fromkeys(SIZES, "this message gives no numbers")
        return Oom(form=form, says=says, message=head, over_an_exabyte=True, unknown=unknown)
    return _by_clauses(form, head, parse_size(start[1], start[2]) if start[1] else None, rest)


def _headless(line: str) -> Iterator[tuple[int, Oom]]:
    """A message whose beginning is lost. The text may begin inside a number: its first word does not count."""
    found = next((each for pattern in _CLAUSES["allocated"] if (each := pattern.search(line, line.find(" ")))), None)
    if found:
        at = max(found.start() - BEFORE_ALLOCATED, line.find(" ") + 1)
        yield at, _by_clauses("cuda", "", None, line[at : at + MAX_MESSAGE])


def _by_clauses(form: str, head: str, requested: Size | None, rest: str) -> Oom:
    sizes: dict[str, Any] = {"requested": requested}
    unknown = {} if requested else {"requested": "the message is cut off before it"}
    for name, patterns in _CLAUSES.items():
        sizes[name], why = _clause(rest, patterns)
        if sizes[name] is None:
            unknown[name] = why or _why_missing(name, rest)
    unknown["other_allocations"] = "only MPS prints it"
    device = _DEVICE.search(rest)
    return Oom(
        form=form,
        device=int(device[1]) if device else None,
        processes=tuple(_processes(rest)),
        message=head + rest[: max((m.end() for m in _END.finditer(rest)), default=0)],
        unknown=unknown,
        **sizes,
    )


def _clause(text: str, patterns: Iterable[re.Pattern[str]]) -> tuple[Size | None, str | None]:
    """The size, or why a clause that is there has none."""
    for pattern in patterns:
        found = pattern.search(text)
        if found:
            size = parse_size(found[1], found[2])
            return size, None if size else f"{found[1]} {found[2]} means that the driver did not know"
    return None, None


def _why_missing(name: str, rest: str) -> str:
    if name == "private_pools":
        return "printed only where private pools hold something"
    if name == "allowed":
        return "printed only where a memory fraction is set, and by torch 2.1 to 2.4 not even then"
    old = "total capacity;" in rest
    if (name == "unallocated" and old) or (name == "reserved" and "total capac" in rest and not old):
        return "this form of the message does not have it"
    return "the message is cut off before it, or does not have it"


def _processes(rest: str) -> Iterator[ProcessUse]:
    own = _OWN.search(rest)
    if own:
        yield ProcessUse(None, _use(own[1], own[2]))
    for other in _OTHER.finditer(rest):
        yield ProcessUse(int(other[1]), _use(other[2], other[3]))


def _use(number: str, unit: str) -> Size | None:
    """A process that holds nothing is not listed: 0 bytes is a driver that does not know, as 2^64 is."""
    size = parse_size(number, unit)
    return size if size is not None and size.high > 0 else None


# -- other backends ------------------------------------------------------------------------------------------------

_ASYNC = re.compile(
    r"Allocation on device (\d{1,3}) would exceed allowed memory\.?(?: \(out of memory\))?"
    r"|(?<=OutOfMemoryError: )Allocation on device\b(?! \d)"  # as ComfyUI shows it
)
_ASYNC_CLAUSES = {
    "requested": re.compile(r"Requested ?: ?" + SIZE),
    "allocated": re.compile(r"Currently allocated ?: ?" + SIZE),
    "capacity": re.compile(r"Device limit ?: ?" + SIZE),
    "free": re.compile(r"Free \(according to CUDA\) ?: ?" + SIZE),
    "allowed": re.compile(r"memory fraction\) ?: ?" + SIZE),
}
_MPS = re.compile(r"MPS backend out of memory \(MPS allocated: " + SIZE)
_MPS_CLAUSES = {
    "requested": re.compile(r"Tried to allocate " + SIZE),
    "allocated": re.compile(r"MPS allocated: " + SIZE),
    "allowed": re.compile(r"max allowed: " + SIZE),
    "other_allocations": re.compile(r"other allocations: " + SIZE),
}
_CPU = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate (\d{1,20}) bytes"
    r"\.?(?: Error code \d+ \([\w ]{1,60}\))?"
)


def _async(line: str) -> Iterator[tuple[int, Oom]]:
    for start in _ASYNC.finditer(line):
        sizes, unknown = _sizes(line[start.end() : start.end() + 1000], _ASYNC_CLAUSES)
        device = int(start[1]) if start[1] else None
        made = Oom(form="cuda-async", device=device, requests_exactly=True, message=start[0], unknown=unknown, **sizes)
        yield start.start(), made


def _mps(line: str) -> Iterator[tuple[int, Oom]]:
    for start in _MPS.finditer(line):
        rest = line[start.start() : start.start() + 600]
        end = re.search(r"(?:shared|private) pool\.", rest)
        sizes, unknown = _sizes(rest, _MPS_CLAUSES)
        message = rest[: end.end()] if end else start[0]
        yield start.start(), Oom(form="mps", requests_exactly=True, message=message, unknown=unknown, **sizes)


def _cpu(line: str) -> Iterator[tuple[int, Oom]]:
    unknown = dict.fromkeys((name for name in SIZES if name != "requested"), "host memory: no GPU is in it")
    said = "host memory ran out, not the GPU's"
    for start in _CPU.finditer(line):
        asked = parse_size(start[1], "bytes")
        made = Oom(form="cpu", requested=asked, message=start[0], where="host", says=said, unknown=unknown)
        yield start.start(), replace(made, requests_exactly=True)


def _sizes(text: str, clauses: dict[str, re.Pattern[str]]) -> tuple[dict[str, Any], dict[str, str]]:
    sizes: dict[str, Any] = {}
    unknown = dict.fromkeys(SIZES, "this backend does not print it")
    for name, pattern in clauses.items():
        sizes[name], why = _clause(text, (pattern,))
        if sizes[name] is None:
            unknown[name] = why or "the message is cut off before it, or does not have it"
        else:
            unknown.pop(name)
    return sizes, unknown


# -- out of memory in disguise --------------------------------------------------------------------------------------


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


def _disguised(passage: Passage) -> list[tuple[int, Oom]]:
    """All places of the surest kind; of equally sure ones that which says most, which stands first in the table."""
    lines = "\n".join(passage.lines)
    for disguise in sorted(DISGUISES, key=lambda each: SUREST_FIRST.index(each.certainty)):
        text = lines if disguise.by_line else passage.flat
        places = _ends([(each.start(), each[0]) for each in disguise.pattern.finditer(text)])
        if places:
            said = {name: getattr(disguise, name) for name in ("certainty", "where", "says", "remedy", "cure")}
            unknown = dict.fromkeys(SIZES, "this message gives no numbers")
            oom = Oom(form="disguised", message=places[-1][1].strip(), unknown=unknown, **said)
            begins = list(accumulate((len(line) + 1 for line in passage.lines), initial=0)) if disguise.by_line else []
            return [(passage.offset_of(bisect_right(begins, at) - 1) if begins else at, oom) for at, _ in places]
    return _bare(passage)


NAME_ONLY = "the name of the error without its message"
_BARE = re.compile(r"\b(?:torch\.cuda\.|torch\.)?OutOfMemoryError\b|\bCUDA OOM\b|\bCUDA_ERROR_OUT_OF_MEMORY\b")


def _bare(passage: Passage) -> list[tuple[int, Oom]]:
    unknown = dict.fromkeys(SIZES, "the text has only the name of the error")
    remedy = "the whole message, which follows this name, has the numbers"
    oom = Oom(form="disguised", says=NAME_ONLY, unknown=unknown, cure="find the message", remedy=remedy)
    return [(each.start(), replace(oom, message=each[0])) for each in _BARE.finditer(passage.flat)]
