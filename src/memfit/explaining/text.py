"""Text as people have it: wrapped, prefixed by loggers, escaped by JSON or HTML, coloured, megabytes long.

    for passage in passages(excerpt_of(open_file)):
        passage.flat                    # one line, as the program wrote it
        passage.line_at(offset)         # the number of the line in the text that this place of `flat` comes from

A message may be broken at any place by any of these. A terminal that wraps breaks words, a person who wraps breaks at
blanks: both ways of joining are offered, and the reader takes the one in which it finds more.

Some errors mean 'out of memory' without its numbers: of libraries, of the driver, of the system. Most come up because
torch's allocator already holds the memory that something else needs. So the cure is to leave room, not a smaller
tensor: except on the host, where the process itself grew, and in programs that keep their own accounts.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TextIO

SMALL_TEXT = 4 << 20
"""Texts up to here are looked at whole; of longer ones what lies around the words that all messages have."""
BEFORE, AFTER = 200 << 10, 16 << 10
"""Around such a word: a traceback comes before its message."""
MAX_ANCHORS = 24
"""Of each word: so many from the beginning of a text, and so many from its end."""
MAX_READ = 12 << 20
"""Of a long text: half from its beginning, half from its end."""
CHUNK = 256 << 10
"""More than BEFORE and AFTER: a word's neighbours lie in its own chunk and the two beside it."""
BEGINNING, FIRST_KEPT, LAST_KEPT, END = 4, 64, 128, SMALL_TEXT // CHUNK
"""Chunks that are kept of a text of any length: its beginning, the first and the last ones with a word, its end."""

ANCHORS = (
    "out of memory", "Out of memory", "Tried to allocate", "OutOfMemory", "MemoryError", "DefaultCPUAllocator",
    "would exceed allowed memory", "CUBLAS_STATUS", "CUDNN_STATUS", "cusolver error", "cublaslt", "NCCL WARN",
    "NCCL error", "oom-kill", "OOMKilled", "exit code: 137", "exit code 137", "exitcode: -9", "SIGKILL", "Killed",
    "annot allocate memory", "oom_kill", "OOM Killed", "Out Of Memory", "executable batch size", "cache blocks",
    "KV cache memory", "desired GPU memory", "RESOURCE_EXHAUSTED", "OOM when allocating", "ERROR_OUT_OF_",
    "ALLOC_FAILED", "status_memory_error", "StatusAllocFailed", "cuDNN algorithm", "find an engine", "available RAM",
    "than is available", "low on memory", "memory pressure", "aging file", "os error 1455", "bad_alloc", "to mmap",
    "Insufficient Memory", "Invalid buffer size", "larger than 4GB", "of resource: shared", "allocated by PyTorch",
)  # fmt: skip

_LEVEL = r"(?:ERROR|WARNING|WARN|INFO|CRITICAL|DEBUG)"
_PREFIX = re.compile(
    r"(?:\[(?:rank|default)\s?\d{1,5}\]:?\s?"
    r"|\[\d{1,4},\d{1,4}\]<std(?:err|out)>:\s?"
    r"|\d{1,4}:\s(?=\S)"
    r"|[>|│]\s?"
    r"|E {3}"
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d[\d:.,]{0,16}(?:Z|[+-]\d\d:?\d\d)?\]?\s{0,4}(?:- )?"
    r"|\[?(?:\d\d-\d\d )?\d\d:\d\d:\d\d[\d.,]{0,8}(?:\]\s?|\s)"
    r"|std(?:err|out) \| "
    r"|[A-Z][a-z]{2} {1,2}\d{1,2} \d\d:\d\d:\d\d [\w.-]{1,60} [\w./-]{1,40}(?:\[\d{1,9}\])?:\s"  # syslog
    r"|[\w.<>]{1,60}:[\w.<>]{1,60}:\d{1,6} - "  # loguru
    r"|[a-z][\w.]{0,40}[-\d][\w.-]{0,40}:\s(?=\S)"  # a host of several
    r"|\[?[EWIF]\d{4} [\d:.]{8,16}\s{1,8}\d{1,9} [\w./-]{1,80}:\d{1,6}\]\s?"
    r"|\[[\w./-]{1,60}:\d{1,6}\]\s?"
    r"|[\w.-]{1,40}-\d{1,3}\s{1,12}\|\s"
    r"|(?:[\w.]{1,60} - )?\[?" + _LEVEL + r"\]?(?:\s{1,4}[-|]\s|:[\w.]{1,60}:|[:\s]\s{0,2})"
    r"|\([\w.=, -]{1,60}pid=\d{1,9}(?:, ip=[\d.]{1,20})?\)\s)+"
)
_RANK = re.compile(r"\[(?:rank|default)\s?(\d{1,5})\]|^\[\d{1,4},(\d{1,4})\]<std|^(\d{1,4}):\s")
_COLOUR = re.compile(r"\x1b\[[0-9;?]{0,16}[A-Za-z]")
_ENTITY = re.compile(r"&(?:quot|nbsp|amp|lt|gt|apos|#x27|#\d{2,3});")
_TAG = re.compile(r"</?(?:a|b|br|code|div|em|i|li|p|pre|samp|span|strong|td|tr|u)(?:\s[^<>]{0,200})?/?>", re.IGNORECASE)
_UNICODE_ESCAPE = re.compile(r"\\u00([0-9a-fA-F]{2})")
_RAW_DEVICE = re.compile(r"GPU (?:([\x00-\x08\x0e-\x1b])|\\(?:x|u00)([0-9a-fA-F]{2})|\^([@A-Z])) has a total")
_NARROWEST, _FEW_LINES = 40, 200


REQUEST = "Tried to allocate"
LONGEST_WORD = len(max(ANCHORS, key=len))


class _Chunk(NamedTuple):
    number: int
    lines_before: int
    text: str


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Of a text of any length, what can matter of it; a text up to SMALL_TEXT is all there."""

    text: str
    gaps: tuple[tuple[int, int], ...] = ()
    """Where lines are left out: the place in `text`, and how many before it in all."""
    requests: int = 0
    """How many messages the whole text has, by the words that each of them has."""

    def lines_before(self, at: int) -> int:
        """Of the whole text, before this place of the excerpt."""
        left_out = next((lines for place, lines in reversed(self.gaps) if place <= at), 0)
        return left_out + self.text.count("\n", 0, at)


def excerpt_of(source: TextIO) -> Excerpt:
    """Reads all of it, and never has more than a part in memory."""
    kept: dict[int, _Chunk] = {}
    last: dict[int, _Chunk] = {}
    recent: deque[_Chunk] = deque(maxlen=END)
    number = lines = requests = 0
    overlap, after_word = "", False
    while text := source.read(CHUNK):
        chunk = _Chunk(number, lines, text)
        seen = overlap + text
        has_word = any(word in seen for word in ANCHORS)
        before = [recent[-1]] if has_word and recent else []
        for each in (*before, *([chunk] if has_word or after_word or number < BEGINNING else [])):
            (kept if len(kept) < FIRST_KEPT or each.number in kept else last)[each.number] = each
        while len(last) > LAST_KEPT:
            last.pop(next(iter(last)))
        recent.append(chunk)
        requests += seen.count(REQUEST) - overlap.count(REQUEST)
        number, lines = number + 1, lines + text.count("\n")
        overlap, after_word = text[-LONGEST_WORD:], has_word
    return _joined([*kept.values(), *last.values(), *recent], requests=requests)


def _joined(chunks: Iterable[_Chunk], *, requests: int) -> Excerpt:
    parts: list[str] = []
    gaps: list[tuple[int, int]] = []
    at, newlines, following = 0, 0, 0
    for number, chunk in sorted({each.number: each for each in chunks}.items()):
        if number != following:
            parts.append("\n")
            at, newlines = at + 1, newlines + 1
            gaps.append((at, chunk.lines_before - newlines))
        parts.append(chunk.text)
        at, newlines, following = at + len(chunk.text), newlines + chunk.text.count("\n"), number + 1
    return Excerpt("".join(parts), tuple(gaps), requests)


@dataclass(frozen=True)
class Passage:
    """A stretch of a text, as lines without prefixes and as one line."""

    lines: tuple[str, ...]
    ranks: tuple[str | None, ...]
    first_line: int
    """The number of its first line in the whole text, the first being 1."""
    breaks_words: bool
    """Lines as long as the terminal is wide continue in the next one without a blank."""

    @cached_property
    def _joined(self) -> tuple[str, list[int]]:
        width = _width(self.lines) if self.breaks_words else 0
        parts: list[str] = []
        starts: list[int] = []
        at = 0
        for number, line in enumerate(self.lines):
            starts.append(at)
            whole = width and len(line) == width and number + 1 < len(self.lines)
            blank = " " if width and line[:1].isspace() else ""  # the one at which the terminal broke
            part = line if whole else f"{blank}{' '.join(line.split())} "
            parts.append(part)
            at += len(part)
        return "".join(parts), starts

    @property
    def flat(self) -> str:
        return self._joined[0]

    def index_at(self, offset: int) -> int:
        return max(bisect_right(self._joined[1], offset) - 1, 0)

    def offset_of(self, index: int) -> int:
        """Where a line of the passage begins in `flat`."""
        return self._joined[1][index]

    def line_at(self, offset: int) -> int:
        return self.first_line + self.index_at(offset)


def passages(excerpt: Excerpt, *, breaks_words: bool = False) -> Iterator[Passage]:
    """All of a short text, or what matters of a long one, in order. Linear in the length of the text."""
    for window in _windows(excerpt.text):
        for begin, end in _split(window, excerpt.gaps):
            yield _passage(excerpt.text[begin:end], excerpt.lines_before(begin) + 1, breaks_words)


def _split(window: tuple[int, int], gaps: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    begin, end = window
    for at, _ in gaps:
        if begin < at < end:
            yield begin, at
            begin = at
    yield begin, end


def may_break_words(text: str) -> bool:
    """Whether the text has lines of one width, as a terminal that wraps makes them."""
    return any(_width(_raw_lines(text[begin:end])) for begin, end in _windows(text))


def _passage(text: str, first_line: int, breaks_words: bool) -> Passage:
    raw = _raw_lines(text)
    if breaks_words:
        return Passage(_without_margin(raw), (None,) * len(raw), first_line, True)
    ranks = tuple(_rank(line) for line in raw)
    return Passage(tuple(_without_prefix(line) for line in raw), ranks, first_line, False)


def _without_margin(lines: tuple[str, ...]) -> tuple[str, ...]:
    """What a quotation is indented by is not part of it."""
    margin = min((len(line) - len(line.lstrip()) for line in lines if line), default=0)
    return tuple(line[margin:] for line in lines) if margin else lines


def _raw_lines(text: str) -> tuple[str, ...]:
    return tuple(line.rstrip() for line in _unescaped(text).split("\n"))


def _unescaped(text: str) -> str:
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    text = _RAW_DEVICE.sub(_device_number, text)
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", " ")
    if "\\" in text:
        text = text.replace("\\\\n", "\n").replace("\\n", "\n").replace('\\"', '"').replace("\\t", " ")
        text = _UNICODE_ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)
        text = _COLOUR.sub("", text)
    return _without_html(text).replace("\u00a0", " ")


def _without_html(text: str) -> str:
    """`<module>` and `<ipython-input-3>` are Python's own and stay."""
    if "</" in text or "<br" in text:
        text = _TAG.sub(lambda found: "\n" if found[0][1:3].lower() == "br" else "", text)
    return _ENTITY.sub(lambda found: html.unescape(found[0]), text) if "&" in text else text


def _device_number(found: re.Match[str]) -> str:
    """torch 2.3 prints the number of the device as a byte (pytorch#126766)."""
    raw, escaped, caret = found.groups()
    number = ord(raw) if raw else int(escaped, 16) if escaped else ord(caret) - ord("@")
    return f"GPU {number} has a total"


def _without_prefix(line: str) -> str:
    line = line.lstrip().removesuffix("│").rstrip()
    found = _PREFIX.match(line)
    return line[found.end() :] if found else line


def _rank(line: str) -> str | None:
    found = _RANK.search(line[:80])
    return next((group for group in found.groups() if group is not None), None) if found else None


def _width(lines: Sequence[str]) -> int:
    """The longest line, if it can be a full one: several have that very length, or there are few lines."""
    counts = Counter(map(len, lines))
    longest = max(counts, default=0)
    return longest if longest >= _NARROWEST and (counts[longest] > 1 or len(lines) < _FEW_LINES) else 0


def _windows(text: str) -> list[tuple[int, int]]:
    if len(text) <= SMALL_TEXT:
        return [(0, len(text))]
    found = _merged([(max(at - BEFORE, 0), at + AFTER) for at in _anchors(text)])
    if not found:
        return [(len(text) - SMALL_TEXT, len(text))]
    if sum(end - begin for begin, end in found) <= MAX_READ:
        return found
    return _merged([*_first(found), *_mirrored(_first(_mirrored(found)))])


def _first(windows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """As many of them as may be read from one end."""
    kept, room = [], MAX_READ // 2
    for begin, end in windows:
        if room <= 0:
            break
        kept.append((begin, min(end, begin + room)))
        room -= end - begin
    return kept


def _mirrored(windows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(-end, -begin) for begin, end in reversed(windows)]


def _anchors(text: str) -> list[int]:
    """Where the words stand, as many as can matter: the first ones and the last ones of each."""
    places: set[int] = set()
    for word in ANCHORS:
        at = -1
        for _ in range(MAX_ANCHORS):
            at = text.find(word, at + 1)
            if at < 0:
                break
            places.add(at)
        at = len(text)
        for _ in range(MAX_ANCHORS):
            at = text.rfind(word, 0, max(at, 0))
            if at < 0:
                break
            places.add(at)
    return sorted(places)


def _merged(windows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    for begin, end in windows:
        if made and begin <= made[-1][1]:
            made[-1] = made[-1][0], max(end, made[-1][1])
        else:
            made.append((begin, end))
    return made


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
