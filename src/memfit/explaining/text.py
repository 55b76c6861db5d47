"""Text as people have it: wrapped, prefixed by loggers, escaped by JSON or HTML, coloured, megabytes long.

    for passage in passages(excerpt_of(open_file)):
        passage.flat                    # one line, as the program wrote it
        passage.line_at(offset)         # the number of the line in the text that this place of `flat` comes from

A message may be broken at any place by any of these. A terminal that wraps breaks words, a person who wraps breaks at
blanks: both ways of joining are offered, and the reader takes the one in which it finds more.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TextIO

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
