"""Texts on this machine: files of any usual kind, and the reference that Python itself carries.

Files are read as rows or as documents: plain text, JSON lines, JSON, Parquet; compressed with gzip or not. The
reference is 0.7 MB of English on every machine, a quarter of it kept for tests.
"""

from __future__ import annotations

import gzip
import json
import platform
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from memfit.errors import InputError
from memfit.recording.machine import host_memory
from memfit.units import format_bytes

HELD_OUT = 4
"""One topic of so many is for evaluation."""


def builtin_documents(*, held_out: bool = False) -> list[str]:
    """The topics, or those of them that are kept for tests."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise InputError(
            "this Python comes without pydoc_data, which is the text called builtin",
            hint="give the path of a text file",
        ) from error
    whole = list(_without_repetition([topics[name] for name in sorted(topics)]))
    return [text for i, text in enumerate(whole) if (i % HELD_OUT == 0) == held_out]


def builtin_origin() -> str:
    return f"pydoc_data.topics of Python {platform.python_version()}"


def _without_repetition(documents: list[str]) -> Iterator[str]:
    """Topics contain one another: a paragraph stays where it stands first, so that none is in both parts."""
    seen: set[str] = set()
    for document in documents:
        fresh = [paragraph for paragraph in document.split("\n\n") if paragraph not in seen]
        seen.update(fresh)
        if fresh:
            yield "\n\n".join(fresh)


PLAIN = (".txt", ".text", ".md", ".rst", ".raw")
KINDS = (*PLAIN, ".jsonl", ".json", ".parquet")
FIELD = "text"
PIECE = 1 << 20
LONGEST_LINE = 1 << 28
"""Characters in a line of JSON; no row of text is as long."""
SPECIAL = (
    (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"),
)  # fmt: skip
PARQUET_HINT = "pip install 'memfit[data]' brings it"


def is_text_file(path: Path) -> bool:
    return kind_of(path) in KINDS


def read_documents(path: Path) -> list[str]:
    """The texts of a structured file, or the whole of a plain one as a single document."""
    rows = _placed(path, (FIELD,))
    if kind_of(path) == ".parquet":
        rows = ((place, row) for place, row in rows if row[FIELD] is not None)
    return [_text_of(row, f"'{path}', {place}") for place, row in rows]


def read_rows(path: Path) -> list[Any]:
    """The rows of a structured file as they are, most often dicts; a plain file is one row of text."""
    return [row for _, row in _placed(path, None)]


def _placed(path: Path, columns: tuple[str, ...] | None) -> Iterator[tuple[str, Any]]:
    """Where each row stands, in words, and the row."""
    kind = kind_of(path)
    check_plain_file(path)
    try:
        if kind == ".parquet":
            yield from _rows(_parquet(path, columns))
        elif kind == ".jsonl":
            yield from _json_lines(path)
        elif kind == ".json":
            yield from _json(path)
        else:
            yield "row 1", "".join(_pieces(path))
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror or error}") from error
    except MemoryError as error:
        raise _too_large(path) from error


def _rows(rows: list[Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))


def check_plain_file(path: Path) -> None:
    """A device never ends, and a pipe gives its text to one reader only: a run has several."""
    try:
        found = path.stat()
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror or error}") from error
    for is_kind, word in SPECIAL:
        if is_kind(found.st_mode):
            raise InputError(f"'{path}' is {word}, not a file of text", hint="write its text to a file, and name that")
    if found.st_size > host_memory()["total_bytes"]:
        raise _too_large(path)


def _too_large(path: Path) -> InputError:
    memory = format_bytes(host_memory()["total_bytes"])
    return InputError(
        f"'{path}' holds more text than the memory of this machine, {memory}, which it is read into",
        hint="name a part of it",
    )


def lines_of(path: Path) -> Iterator[str]:
    """Lines with their ends, parted at line feeds only: other separators are part of the text."""
    line = ""
    for piece in _pieces(path, by_line=True):
        line += piece
        if line.endswith("\n"):
            yield line
            line = ""
        elif len(line) > LONGEST_LINE:
            raise InputError(f"'{path}' has a line of more than {LONGEST_LINE:,} characters, which is no row of text")
    if line:
        yield line


def _pieces(path: Path, *, by_line: bool = False) -> Iterator[str]:
    """Of bounded size, none of them past the end of a line if so wanted."""
    left = host_memory()["total_bytes"]
    try:
        with _opened(path) as stream:
            while piece := stream.readline(PIECE) if by_line else stream.read(PIECE):
                if "\0" in piece:
                    raise InputError(
                        f"'{path}' is not text: it holds zero bytes", hint="binary, or UTF-16: text is read as UTF-8"
                    )
                left -= len(piece)
                if left < 0:  # compressed, it looked small
                    raise _too_large(path)
                yield piece
    except UnicodeDecodeError as error:
        raise InputError(f"'{path}' is not UTF-8 text: byte {error.start:,} of a part of it") from error
    except (OSError, EOFError) as error:
        raise InputError(f"cannot read '{path}': {error}") from error


def kind_of(path: Path) -> str:
    """How the name ends, whether or not it is compressed."""
    name = path.name.lower()
    name = name.removesuffix(".gz")
    return Path(name).suffix


def _opened(path: Path) -> IO[str]:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8", newline="\n")
    return path.open(encoding="utf-8", newline="\n")


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines_of(path), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"'{path}', line {number}: not JSON ({error})") from error
            yield f"line {number}", row


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    lines = _pieces(path, by_line=True)
    if _is_object(next(lines, "")) and next(lines, "").strip():
        return _json_lines(path)  # C4 calls its JSON lines .json
    text = "".join(_pieces(path))
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        return _json_lines(path)  # says which line is wrong
    if isinstance(rows, dict) and isinstance(rows.get(FIELD), list):
        rows = rows[FIELD]
    if isinstance(rows, dict):
        rows = [rows]
    if not isinstance(rows, list):
        raise InputError(f"'{path}': not a list of rows with {FIELD!r}")
    return _rows(rows)


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _text_of(row: Any, where: str) -> str:
    if isinstance(row, str):
        return row
    if not isinstance(row, dict) or not isinstance(row.get(FIELD), str):
        keys = f"; it has {', '.join(map(repr, list(row)[:6]))}" if isinstance(row, dict) else ""
        raise InputError(f"{where}: no {FIELD!r} in it{keys}")
    return str(row[FIELD])


def _parquet(path: Path, columns: tuple[str, ...] | None) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise InputError(f"'{path}': reading Parquet needs the package pyarrow", hint=PARQUET_HINT) from error
    try:
        rows: list[dict[str, Any]] = parquet.read_table(
            path, columns=None if columns is None else list(columns)
        ).to_pylist()
    except (ArrowException, KeyError, ValueError) as error:
        wanted = "rows" if columns is None else f"column {columns[0]!r}"
        raise InputError(f"'{path}': no {wanted} can be read from it ({type(error).__name__})") from error
    if columns is not None and rows and columns[0] not in rows[0]:  # pyarrow leaves out a column that is not there
        raise InputError(f"'{path}': no column {columns[0]!r} in it")
    return rows
