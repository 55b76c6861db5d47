"""Which lines of a person's own files made what is alive at a moment: libraries below them are not where they look."""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from memfit.analysis.labels import Labels
from memfit.events import FrameRow
from memfit.replay.timeline import Ints, Timeline

BACKWARD_OF = "backward of "
SHOWN = 12
_LIBRARY = re.compile(
    r"^<(?!cell>|stdin>|ipython-input)|[/\\](?:site-packages|dist-packages|lib[/\\]python\d[\d.]*)[/\\]"
)
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class OwnLine:
    """Blocks of one category that one line has made, by itself or in the backward pass of what it did."""

    file: str
    line: int
    code: str
    backward: bool
    category: str
    count: int
    allocated_bytes: int


def is_own(file: str) -> bool:
    """
    >>> is_own("/home/me/train.py"), is_own("/usr/lib/python3.12/runpy.py"), is_own("<frozen runpy>"), is_own("<cell>")
    (True, False, False, True)
    """
    return not _LIBRARY.search(file) and not any(
        file.startswith(folder) and _holds_packages(folder) for folder in sys.path[1:] if folder
    )


@lru_cache
def _holds_packages(folder: str) -> bool:
    """As `pip install --target` fills one, for PYTHONPATH."""
    return any(Path(folder).glob("*.dist-info"))


def lines_alive(timeline: Timeline, labels: Labels, blocks: Ints) -> tuple[OwnLine, ...]:
    """The largest first. What no line of their own has made, a library's workspace for one, is not there."""
    trace = timeline.trace
    if not trace.frames:
        return ()
    places = [_place([trace.frames[i] for i in stack]) for stack in trace.stacks]
    sums: dict[tuple[FrameRow, bool, int], tuple[int, int]] = {}
    column = np.frombuffer(trace.stack_of, dtype=np.int32)
    for block in blocks[blocks < len(column)].tolist():
        frame, backward = places[column[block]]
        if frame is not None:
            key = (frame, backward, int(labels.category[block]))
            count, total = sums.get(key, (0, 0))
            sums[key] = count + 1, total + int(timeline.size[block])
    order = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))[:SHOWN]
    return tuple(
        OwnLine(file, line, code_at(file, line), backward, labels.categories[category], count, total)
        for ((file, line, _), backward, category), (count, total) in order
    )


def _place(frames: Sequence[FrameRow]) -> tuple[FrameRow | None, bool]:
    backward = any(name.startswith(BACKWARD_OF) for _, _, name in frames)
    own = next((frame for frame in frames if is_own(frame[0])), None)
    return (None if own is None else (own[0], first_line(own[0], own[1]), "")), backward


def first_line(file: str, line: int) -> int:
    """Of the statement to which the line belongs, where the file is here."""
    if Path(file).suffix != ".py":
        return line
    linecache.checkcache(file)
    return _first_lines("".join(linecache.getlines(file))).get(line, line)


@lru_cache(maxsize=16)
def _first_lines(text: str) -> dict[int, int]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, int] = {}
    for node in ast.walk(tree):  # from the outside in: an inner statement has the last word
        if isinstance(node, ast.stmt):
            inner = getattr(node, "body", None)
            end = inner[0].lineno - 1 if inner else node.end_lineno or node.lineno
            found |= dict.fromkeys(range(node.lineno, end + 1), node.lineno)
    return found


def code_at(file: str, line: int) -> str:
    """As it stands in the file now; nothing where that is not here."""
    if Path(file).suffix != ".py":
        return ""
    linecache.checkcache(file)
    return linecache.getline(file, line).strip()[:_LONGEST]
