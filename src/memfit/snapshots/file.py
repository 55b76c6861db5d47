"""From a file that anyone may have written to plain dicts, lists, strings and numbers.

A torch memory snapshot is a pickle, and a pickle is a program. So nothing is loaded before it has been read as a
program: one pass of a regular expression over the opcodes, which knows only those that a snapshot needs. What the
pass refuses, and why each can hurt even where no import is possible:

    imports, calls, persistent ids      run code
    tuples of anything but two ints     as a dict key, nested tuples hash in exponential time or overflow the stack
    integers above 9 bytes              as dict keys, all can be made to collide
    memo slots beyond 2^24              one 5-byte opcode makes the unpickler allocate and fill 64 GiB
    bytes, bytearrays, 8-byte lengths   are allocated before the file is seen to be shorter

The pass costs about as much as the unpickling itself (a second for a million events). What comes out may still be
a few hundred bytes that unfold to 2^40 nodes (`l = [l, l]`), or nest two million deep: never walk it recursively.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from memfit.errors import InputError
from memfit.files import no_collector
from memfit.units import format_bytes

MAX_BYTES = 1 << 30  # of the file, and of what it inflates to; PyTorch's own viewer gives up at half of it
MAX_LOADED = 6 << 30  # in memory: a list is one byte in the file and 80 there
MAX_STRING = 1 << 20

_CUT_OFF = "it was probably cut off while being written or copied; compare the sizes, or record again"
_WRITERS = "memfit reads what torch.cuda.memory._dump_snapshot writes, as pickle or JSON, gzipped or not"
_RECORD_LESS = "record fewer events: _record_memory_history(max_entries=100000, stacks='python')"
_NOT_RUN = "nothing in it was run; ask its author for the snapshot as JSON"


def load_plain(path: str | Path, *, max_bytes: int = MAX_BYTES) -> Any:
    """The file's content, made of plain types only, or an `InputError`; nothing in the file can run."""
    data = _read(path, max_bytes)
    if data[:2] == b"\x1f\x8b":
        data = _inflate(path, data, max_bytes)
    try:
        with no_collector():
            if data[:1] == b"\x80":
                _check_opcodes(path, data)
                return _Plain(io.BytesIO(data)).load()
            if data[:1] == b"\xef" or data[:64].lstrip()[:1] in (b"{", b"["):
                return _parse_json(path, data)
    except InputError:
        raise
    except MemoryError:
        raise cannot_read(path, "it needs more memory than there is") from None
    except Exception as error:  # whatever a damaged pickle or JSON text makes the parser raise
        why = "it nests too deeply" if isinstance(error, RecursionError) else f"it is damaged ({_short(error)})"
        raise cannot_read(path, why, _CUT_OFF) from error
    if data.startswith(b"PK\x03\x04") and not zipfile.is_zipfile(io.BytesIO(data)):
        raise cannot_read(path, "it begins as a trace does (a zip), and its end is missing", _CUT_OFF)
    what = "it is empty" if not data else "it is neither a pickle (protocol 2 to 5) nor JSON"
    raise cannot_read(path, what, _WRITERS)


def _read(path: str | Path, max_bytes: int) -> bytes:
    try:
        info = os.stat(path)  # before open: to open a named pipe is to wait for its writer
        if not stat.S_ISREG(info.st_mode):
            kind = "a folder" if stat.S_ISDIR(info.st_mode) else "not a file"
            raise cannot_read(path, f"it is {kind}", _WRITERS)
        if info.st_size > max_bytes:
            _too_large(path, format_bytes(info.st_size), max_bytes)
        with open(path, "rb") as source:
            return source.read(max_bytes)
    except FileNotFoundError:
        raise InputError(f"no file {str(path)!r}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise cannot_read(path, _short(error)) from error


def _inflate(path: str | Path, data: bytes, max_bytes: int) -> bytes:
    """The first gzip member, up to the limit and not a byte more."""
    stream = zlib.decompressobj(wbits=31)
    try:
        plain = stream.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise cannot_read(path, "its gzip is damaged", _CUT_OFF) from error
    if len(plain) > max_bytes:
        _too_large(path, "larger when unpacked", max_bytes)
    if not stream.eof:
        raise cannot_read(path, "its gzip ends too early", _CUT_OFF)
    return plain


def _parse_json(path: str | Path, data: bytes) -> Any:
    _check_weight(path, data, {b"{": 368, b"[": 80, b'"': 24, b",": 40})
    return json.loads(data.decode("utf-8-sig"), parse_constant=_no_constant)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


# -- pickle ----------------------------------------------------------------------------------------------------


class _Plain(pickle.Unpickler):
    """The second lock: the opcodes that lead here were refused already."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"import of {module}.{name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("persistent id")


def _sized(opcode: bytes, sizes: Iterator[int] | range, zeros: bytes = b"") -> bytes:
    """An opcode whose argument says how long it is: one alternative a length, for a regex cannot count."""
    return opcode + b"(?:" + b"|".join(re.escape(bytes([n])) + zeros + b".{%d}" % n for n in sizes) + b")"


_INT = rb"(?:K.|M..|J.{4}|" + _sized(rb"\x8a", range(10)) + rb")"
_ALLOWED = re.compile(
    b"(?:"
    + b"|".join(
        (
            rb"h.|j.{4}",  # from the memo
            rb"[(\]}aesuN\x88\x89\x94]+",  # mark, containers and what fills them, constants, memoize
            _INT + b"(?:" + _INT + rb"\x86)?",  # numbers; a pair of them is a pool id
            _sized(rb"\x8c", range(256)),
            _sized(b"X", range(256), rb"\0\0\0"),
            rb"q.|r...\0",  # to the memo, below 2^24
            rb"G.{8}|\x95.{8}",  # float, frame
        )
    )
    + b"){1,4096}",  # in runs, so that the regex engine's stack stays small
    re.DOTALL,
)
_STRINGS = re.compile(rb"\x8c.([\x20-\x7e]{1,255})\x94?\x8c.([\x20-\x7e]{1,255})\x94?\Z", re.DOTALL)


def _check_opcodes(path: str | Path, data: bytes) -> None:
    protocol = data[1] if len(data) > 1 else 0
    if not 2 <= protocol <= 5:
        raise cannot_read(path, f"no pickle has protocol {protocol}", _WRITERS)
    _check_weight(path, data, _WEIGHTS)
    at, end = 2, len(data)
    while at < end:
        run = _ALLOWED.match(data, at)
        if run:
            at = run.end()
        elif data[at] == 0x2E:  # STOP
            return
        elif data[at] == 0x58 and end - at > 4:  # BINUNICODE of 256 bytes or more
            size = int.from_bytes(data[at + 1 : at + 5], "little")
            if size > MAX_STRING and at + 5 + size <= end:
                _refuse(path, f"it holds a string of {format_bytes(size)}, which no memory snapshot needs")
            at += 5 + size
        else:
            _refuse_opcode(path, data, at)
    _cut_off(path, end)


def _refuse_opcode(path: str | Path, data: bytes, at: int) -> NoReturn:
    """Why the opcode at this byte is not allowed, in words; or that the file ends inside it."""
    code = data[at : at + 1]
    if code in (b"c", b"i"):
        target = data[at + 1 : at + 200].split(b"\n")[:2]
        _refuse(path, f"it asks Python to import {_printable(b'.'.join(target))}, which no memory snapshot needs")
    if code == b"\x93":
        names = _STRINGS.search(data, max(0, at - 520), at)
        what = _printable(names[1] + b"." + names[2]) if names else "something"
        _refuse(path, f"it asks Python to import {what}, which no memory snapshot needs")
    name = next((known.name for known in pickletools.opcodes if known.code == code.decode("latin-1")), None)
    if name is None:
        raise cannot_read(path, f"it is damaged at byte {at:,}", _CUT_OFF)
    if code == b"\x8a" and data[at + 1 : at + 2] > b"\x09":
        _refuse(path, f"it holds a number of {data[at + 1]} bytes, which no memory snapshot needs")
    if code == b"r" and len(data) - at > 4:
        slot = int.from_bytes(data[at + 1 : at + 5], "little")
        _refuse(path, f"it asks for a memo table of {slot:,} entries")
    if name in _ALLOWED_NAMES:
        _cut_off(path, len(data))
    _refuse(path, f"it uses the pickle opcode {name} at byte {at:,}, which no memory snapshot needs")


_ALLOWED_NAMES = {
    "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "SHORT_BINUNICODE", "BINUNICODE", "FRAME",
}  # fmt: skip


_WEIGHTS = {
    b"}": 368, b"]": 80, b"\x8c": 72, b"X": 72, b"M": 40, b"J": 40, b"\x8a": 48, b"G": 32,
    b"(": 8, b"\x94": 16, b"N": 16,
}  # fmt: skip


def _check_weight(path: str | Path, data: bytes, weights: dict[bytes, int]) -> None:
    """What loading will take, at most: some of the bytes counted are text. A million events come to half a GiB."""
    if sum(data.count(code) * weight for code, weight in weights.items()) > MAX_LOADED:
        raise InputError(
            f"refused to open {str(path)!r}: it would unfold to more than {format_bytes(MAX_LOADED)} in memory",
            hint=_RECORD_LESS,
        )


# -- words -----------------------------------------------------------------------------------------------------


def cannot_read(path: str | Path, why: str, hint: str | None = None) -> InputError:
    return InputError(f"cannot read snapshot {str(path)!r}: {why}", hint=hint)


def _refuse(path: str | Path, why: str) -> NoReturn:
    raise InputError(f"refused to open {str(path)!r}: {why}", hint=_NOT_RUN)


def _cut_off(path: str | Path, end: int) -> NoReturn:
    raise cannot_read(path, f"it ends at byte {end:,} in the middle of a value", _CUT_OFF)


def _too_large(path: str | Path, size: str, max_bytes: int) -> NoReturn:
    raise InputError(
        f"refused to open {str(path)!r}: it is {size}, and the limit is {format_bytes(max_bytes)}",
        hint=_RECORD_LESS,
    )


def _printable(raw: bytes) -> str:
    return "".join(c if c.isprintable() else "?" for c in raw.decode("utf-8", "replace"))[:80]


def _short(error: BaseException) -> str:
    return _printable(str(error).encode("utf-8", "replace")) or type(error).__name__
