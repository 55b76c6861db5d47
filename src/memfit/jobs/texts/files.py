"""Files of text, as rows or as documents: plain text, JSON lines, JSON, Parquet; compressed with gzip or not."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from memfit.errors import InputError

PLAIN = (".txt", ".text", ".md", ".rst", ".raw")
KINDS = (*PLAIN, ".jsonl", ".json", ".parquet")
FIELD = "text"


def is_text_file(path: Path) -> bool:
    return _kind(path) in KINDS


def read_documents(path: Path) -> list[str]:
    """The texts of a structured file, or the whole of a plain one as a single document."""
    rows = _placed(path, (FIELD,))
    if _kind(path) == ".parquet":
        rows = ((place, row) for place, row in rows if row[FIELD] is not None)
    return [_text_of(row, f"'{path}', {place}") for place, row in rows]


def read_rows(path: Path) -> list[Any]:
    """The rows of a structured file as they are, most often dicts; a plain file is one row of text."""
    return [row for _, row in _placed(path, None)]


def _placed(path: Path, columns: tuple[str, ...] | None) -> Iterator[tuple[str, Any]]:
    """Where each row stands, in words, and the row."""
    kind = _kind(path)
    try:
        if kind == ".parquet":
            yield from _rows(_parquet(path, columns))
        elif kind == ".jsonl":
            yield from _json_lines(path)
        elif kind == ".json":
            yield from _json(path)
        else:
            yield "row 1", "".join(lines_of(path))
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror or error}") from error


def _rows(rows: list[Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))


def lines_of(path: Path) -> Iterator[str]:
    """Lines with their ends, parted at line feeds only: other separators are part of the text."""
    try:
        with _opened(path) as stream:
            yield from stream
    except UnicodeDecodeError as error:
        raise InputError(f"'{path}' is not UTF-8 text: byte {error.start:,} of a part of it") from error
    except (OSError, EOFError) as error:
        raise InputError(f"cannot read '{path}': {error}") from error


def _kind(path: Path) -> str:
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
    text = "".join(lines_of(path))
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        return _json_lines(path)  # C4 calls its JSON lines .json
    if isinstance(rows, dict) and isinstance(rows.get(FIELD), list):
        rows = rows[FIELD]
    if isinstance(rows, dict):
        rows = [rows]
    if not isinstance(rows, list):
        raise InputError(f"'{path}': not a list of rows with {FIELD!r}")
    return _rows(rows)


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
        raise InputError(f"'{path}': reading Parquet needs pyarrow: pip install pyarrow") from error
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
