"""An out-of-memory message out of any text: which form it has, and every number in it.

    found = find_oom(text)            # a log of megabytes, a pasted traceback, one line
    found.requested, found.capacity, found.allocated

The forms of all torch releases from 1.0 on are known, those of other backends, and errors of libraries that mean the
same without saying it. Texts come wrapped by terminals, prefixed by loggers and escaped by JSON, so the text is made
into one line before it is matched. A size is an interval, for it was printed with two decimals.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_TEXT = 64 << 20
MAX_MESSAGE = 4000
"""No message is longer, whatever follows it."""
NOT_AVAILABLE = 1 << 60
"""Sizes from here on are a driver's way to say that it does not know: WSL prints 2^64 bytes."""

UNITS = {"bytes": 1, "byte": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
SIZE = r"(\d{1,20}(?:\.\d{1,6})?)\s{0,4}(bytes|byte|[KMGT]iB|B)\b"


@dataclass(frozen=True, slots=True)
class Size:
    """What a printed size can have been: between `low` and `high` bytes, both included."""

    text: str
    low: int
    high: int

    @property
    def middle(self) -> int:
        return (self.low + self.high) // 2

    def may_be(self, nbytes: int) -> bool:
        return self.low <= nbytes <= self.high


@dataclass(frozen=True, slots=True)
class ProcessUse:
    pid: int | None
    """None for the process that failed, where the message knows it."""
    used: Size | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Oom:
    form: str
    """The message's family: cuda, hip, xpu, mps, cpu, cuda-async, or `disguised`."""
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
    processes: tuple[ProcessUse, ...] = ()
    requests_exactly: bool = False
    """Whether `requested` is the tensor's own size and not that of a segment."""
    certainty: str = "certain"
    """certain, likely or possible: a library's error may have another cause."""
    says: str = ""
    """What a disguised one means."""
    message: str = ""


def find_oom(text: str) -> Oom | None:
    """The last message in the text, for what came before it was survived. A plain one goes before a disguised one."""
    line = one_line(text[-MAX_TEXT:])
    plain = [oom for reader in (_native, _async, _mps, _cpu) for oom in reader(line)]
    if plain:
        return max(plain, key=lambda found: found[0])[1]
    return next(_disguised(line), None)


def one_line(text: str) -> str:
    """Line breaks, logger prefixes and escapes away: a message may be broken at any place by all of them."""
    text = text.replace("\\\\n", " ").replace("\\n", " ").replace('\\"', '"').replace("\u00a0", " ")
    lines = (_PREFIX.sub("", line.strip()) for line in text.splitlines())
    return re.sub(r"\s+", " ", " ".join(lines))


_PREFIX = re.compile(
    r"^(?:\[(?:rank|default)\s?\d+\]:?\s?|\d{1,4}:\s(?=\S)|>\s|\|\s|\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?\s+"
    r"|(?:ERROR|WARNING|INFO|CRITICAL)[:\s]\s?|\([\w.-]+ pid=\d+(?:, ip=[\d.]+)?\)\s)+"
)


def parse_size(number: str, unit: str) -> Size | None:
    """None for a number that means 'not available'."""
    scale = UNITS[unit.lower()]
    decimals = len(number.partition(".")[2])
    value, half = float(number) * scale, 0.5 * 10**-decimals * scale if decimals else 0.0
    if value >= NOT_AVAILABLE:
        return None
    return Size(f"{number} {unit}", max(int(value - half) + (half > 0), 0), int(value + half))


# -- the native allocators of CUDA, HIP and XPU ------------------------------------------------------------------

_START = re.compile(r"(?:\b(CUDA|HIP|XPU) )?[Oo]ut of memory\. ?Tried to allocate (?:" + SIZE + r"|more than 1EB)")


def _native(line: str) -> Iterator[tuple[int, Oom]]:
    for start in _START.finditer(line):
        rest = line[start.end() : start.end() + MAX_MESSAGE]
        rest = rest[: next((m.start() for m in _START.finditer(rest)), len(rest))]
        form = (start[1] or "cuda").lower()
        if start[2] is None:
            says = "a size of 2^60 bytes or more: a corrupt or negative size, never a real need"
            yield start.start(), Oom(form=form, says=says, message=start[0])
            continue
        yield start.start(), Oom(
            form=form, device=_device(rest), requested=parse_size(start[2], start[3]),
            capacity=_first(rest, r"total capac(?:i)?ty of " + SIZE, SIZE + r" total capacity"),
            free=_first(rest, r"of which " + SIZE + r" is free", SIZE + r" free\b"),
            allowed=_first(rest, SIZE + r" allowed;"),
            allocated=_first(rest, SIZE + r" is allocated by PyTorch", SIZE + r" already allocated"),
            reserved=_first(rest, SIZE + r" reserved in total by PyTorch", SIZE + r" cached\)"),
            unallocated=_first(rest, SIZE + r" is reserved by PyTorch but unallocated"),
            private_pools=_first(rest, r"with " + SIZE + r" allocated in private pools"),
            processes=tuple(_processes(rest)), message=_message(start[0], rest),
        )  # fmt: skip


def _device(rest: str) -> int | None:
    found = re.search(r"GPU (\d{1,3})\b", rest)
    return int(found[1]) if found else None


def _first(text: str, *patterns: str) -> Size | None:
    for pattern in patterns:
        found = re.search(pattern, text)
        if found:
            return parse_size(found[1], found[2])
    return None


def _processes(rest: str) -> Iterator[ProcessUse]:
    own = re.search(r"this process has " + SIZE + r" memory in use", rest)
    if own:
        yield ProcessUse(None, parse_size(own[1], own[2]))
    for other in re.finditer(r"Process (\d{1,10}) has " + SIZE + r" memory in use", rest):
        yield ProcessUse(int(other[1]), parse_size(other[2], other[3]))


_END = re.compile(
    r"max_split_size_mb|PYTORCH_(?:CUDA_)?ALLOC_CONF|but unallocated|reserved in total by PyTorch\)|cached\)|is free\."
)


def _message(start: str, rest: str) -> str:
    last = max((m.end() for m in _END.finditer(rest)), default=0)
    return start + rest[:last]


# -- other backends ------------------------------------------------------------------------------------------------


def _async(line: str) -> Iterator[tuple[int, Oom]]:
    for start in re.finditer(r"Allocation on device (\d{1,3}) would exceed allowed memory", line):
        rest = line[start.end() : start.end() + 1000]
        yield start.start(), Oom(
            form="cuda-async", device=int(start[1]), requested=_first(rest, r"Requested ?: ?" + SIZE),
            allocated=_first(rest, r"Currently allocated ?: ?" + SIZE),
            capacity=_first(rest, r"Device limit ?: ?" + SIZE),
            free=_first(rest, r"Free \(according to CUDA\) ?: ?" + SIZE),
            allowed=_first(rest, r"memory fraction\) ?: ?" + SIZE), requests_exactly=True, message=start[0],
        )  # fmt: skip


def _mps(line: str) -> Iterator[tuple[int, Oom]]:
    for start in re.finditer(r"MPS backend out of memory \(MPS allocated: " + SIZE, line):
        rest = line[start.start() : start.start() + 600]
        yield start.start(), Oom(
            form="mps", allocated=parse_size(start[1], start[2]), allowed=_first(rest, r"max allowed: " + SIZE),
            requested=_first(rest, r"Tried to allocate " + SIZE), requests_exactly=True, message=rest[:200],
        )  # fmt: skip


def _cpu(line: str) -> Iterator[tuple[int, Oom]]:
    pattern = (
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate (\d{1,20}) bytes"
    )
    for start in re.finditer(pattern, line):
        yield start.start(), Oom(
            form="cpu", requested=parse_size(start[1], "bytes"), requests_exactly=True, message=start[0],
            says="host memory ran out, not the GPU's",
        )  # fmt: skip


# -- out of memory in disguise --------------------------------------------------------------------------------------

_DISGUISES: tuple[tuple[str, str, str], ...] = (
    (r"NCCL WARN (?:Cuda failure 'out of memory'|Failed to CUDA calloc \d+ bytes)", "certain",
     "NCCL found no room for its buffers, which lie outside torch's allocator"),
    (r"OOM trying to allocate workspace for cublaslt", "certain", "cuBLAS found no room for its workspace"),
    (r"CUBLAS_STATUS_ALLOC_FAILED", "certain", "cuBLAS found no room for its context"),
    (r"CUDA driver error: out of memory", "certain", "the driver refused memory to an expandable segment"),
    (r"CUDA error: out of memory", "certain",
     "memory was refused outside torch's allocator: a context, a library, or pinned host memory"),
    (r"Error out of memory at line \d+ in file \S*(?:pythonInterface\.c|ops\.cu)", "certain",
     "bitsandbytes found no room, perhaps on the host"),
    (r"CUBLAS_STATUS_NOT_INITIALIZED", "likely",
     "cuBLAS could not start: mostly no room for its context, else a broken installation"),
    (r"CUDNN_STATUS_(?:NOT_INITIALIZED|ALLOC_FAILED|INTERNAL_ERROR)", "likely",
     "cuDNN found no room for its workspace"),
    (r"cusolver error:.{0,80}cusolverDnCreate", "likely", "the solver's handle found no room"),
    (r"CUDNN_STATUS_NOT_SUPPORTED", "possible", "no room for a workspace, or a shape that cuDNN does not support"),
    (r"NCCL error.{0,200}(?:unhandled cuda error|internal error)", "possible",
     "NCCL failed, perhaps for lack of memory: its own warning above says so or not"),
    (r"(?:oom-kill|Out of memory: Killed process|OOMKilled)", "certain", "the system killed the process: host memory"),
    (r"(?:exit code:? 137|exitcode ?: ?-9|Signal 9 \(SIGKILL\)|\bKilled\b)", "likely",
     "the process was killed from outside, most often for lack of host memory"),
)  # fmt: skip


def _disguised(line: str) -> Iterator[Oom]:
    for pattern, certainty, says in _DISGUISES:
        found = re.search(pattern, line)
        if found:
            yield Oom(form="disguised", certainty=certainty, says=says, message=found[0])
