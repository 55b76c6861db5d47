"""Columns of a made-up data set that its name does not tell: the program asks for them, and is run again with them.

What a column holds, its own name tells.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from memfit.errors import TraceError
from memfit.scripts.made_up_rows import FEW_WORDS, PICTURE, PICTURE_FILE, SOUND, TALK, WORDS, picture
from memfit.scripts.watched import path_for_a_file

MadeUp = dict[str, tuple[str, ...]]
"""Columns of the data sets that were made up, and the size of tokenizers, by the names that the program asked for."""
MOST = 6
"""So many columns are added, each in a run of its own."""
_OF_COLUMNS = re.compile(r"column|feature|field|key|split|label|vocab|tokenizer", re.IGNORECASE)
_QUOTED = re.compile(r"""['"`]([a-z_][a-z0-9_]*)['"`]""")
_NO_COLUMN = re.compile(r"""\bcolumn ['"`]([a-z_][a-z0-9_]*)['"`]""", re.IGNORECASE)
_NOT_FOUND = re.compile(
    r"""['"`]([a-z_][a-z0-9_]*)['"`]\s+(?:(?:is|was|does)\s+)?(?:not (?:found|in\b|present|exist)|needs to be one of)"""
)
_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_FEW = "word " * FEW_WORDS
BY_NAME: tuple[tuple[str, Any], ...] = (
    (r"(image|img|picture|photo).*(path|file)|file_?name", PICTURE_FILE),
    (r"image|img|picture|photo|pixel", PICTURE),
    (r"mask|annotation|segmentation", "{mask}"),
    (r"audio|speech|wav", SOUND),
    (r"messages|conversation|chat|^turns$", [{**each, "content": "word " * (WORDS // 2)} for each in TALK]),
    (r"label|class|idx|ids?$|stars|rating|score", 0),
    (r"title|summary|highlight|headline|caption|name|keyword|question", _FEW),
    (r"", "word " * WORDS),
)
"""The last holds for all others: what bounds a long text is the program's own truncation."""
Made = TypeVar("Made")


class ColumnLacks(TraceError):
    """A program that may go on if a made-up data set has one more column."""

    def __init__(self, error: TraceError, hint: str, column: str) -> None:
        super().__init__(error.message, hint=hint)
        self.column = column


def with_columns_asked_for(once: Callable[..., Made]) -> Made:
    """`once(more_columns=...)`, again and again with one more, as long as that is what it fails for."""
    more: tuple[str, ...] = ()
    while True:
        try:
            return once(more_columns=more)
        except ColumnLacks as error:
            if error.column in more or len(more) == MOST:
                raise
            more = (*more, error.column)


def columns_asked_for(names: Sequence[str], row: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a row has not."""
    found = {}
    for name in names:
        if name not in row:
            value = next(value for words, value in BY_NAME if re.search(words, name, re.IGNORECASE))
            found[name] = _picture_on_disk() if value == PICTURE_FILE else value
    return found


def _picture_on_disk() -> str:
    path = path_for_a_file("made-up.png")
    path.write_bytes(picture(PICTURE))
    return str(path)


@contextmanager
def columns_are_made_up(made_up: MadeUp, words: Sequence[str] = ()) -> Iterator[None]:
    """Where a job fails for a column that it does not find, or for few rows, that need not be its own fault.
    `words`: of its command."""
    try:
        yield
    except TraceError as error:
        cause = error.__cause__
        of_column = isinstance(cause, (KeyError, ZeroDivisionError)) or (
            isinstance(cause, ValueError) and _OF_COLUMNS.search(str(cause))
        )
        if not made_up or not of_column:
            raise
        told = "; ".join(f"{name} has {', '.join(columns)}" for name, columns in made_up.items())
        other = "the real one may have other columns, splits or tokens, and more rows"
        hint = f"{error.hint}\ndata made up by --synthetic-data: {told}; {other}"
        column = _column_of(cause, made_up, words)
        raise TraceError(error.message, hint=hint) if column is None else ColumnLacks(error, hint, column) from cause


def _column_of(cause: BaseException | None, made_up: MadeUp, words: Sequence[str]) -> str | None:
    """The key that is not found; of a text, the quoted word that the command has too, or that it calls a column."""
    known = {column for columns in made_up.values() for column in columns}
    if isinstance(cause, KeyError):
        asked = [str(each) for each in cause.args[:1] if isinstance(each, str) and _NAME.fullmatch(each)]
    else:
        typed = {part for word in words for part in (word, word.rpartition("=")[2])}
        asked = [each for each in _QUOTED.findall(str(cause)) if each in typed]
        asked += _NO_COLUMN.findall(str(cause)) + _NOT_FOUND.findall(str(cause))
    return next((each for each in asked if each not in known), None)
