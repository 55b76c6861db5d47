"""Where in the program memory ran out: the traceback's frames, the phase of the job, and what the lines work on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memfit.advice.explaining.signs import (
    COLLECTING,
    ENGINES,
    INNERMOST,
    LIBRARIES,
    RECOMPUTING,
    CodeFrame,
    hints_of,
    pass_within,
    phase_of,
)  # fmt: skip
from memfit.advice.oom_message import Located
from memfit.core.stack_reading import short_path

MAX_LINES_BACK = 3000
MAX_FRAMES = 400
MAX_CODE, MAX_AROUND = 160, 2000

_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(
    r'File "([^"]{1,400})", line (\d{1,7}), in (<?[\w.]{1,120}>?)'  # CPython
    r"|File \[?([^\s:\"\[\]]{1,400}\.py):(\d{1,7})(?:\]\(\S{1,400}\))?, in ([\w.<>]{1,120})"  # IPython
    r"|(?<![~/\w.-])([~/\w.-]{1,400}\.py):(\d{1,7}) in (<?[\w.]{1,120}>?)"  # rich
    r"|(?<![~/\w.-])([~/\w.-]{1,400}\.py|<ipython-input-[\w-]{1,60}>)() in (<?[\w.: ]{1,120}>?)\("  # notebooks
)
_ARROW = re.compile(r"(?:-+>|❱) ?(\d{1,7})\b[ │]*(.*)")
"""The failing line among its neighbours, each with its number."""
_BUFFER = re.compile(r"empty_strided_\w{2,8}\(\((\d{1,12}(?:, \d{1,12}){0,7}),?\), \([\d, ]{0,80}\), torch\.(\w{3,16})")
"""Of compiled code."""
ITEMSIZES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
_MARKS = re.compile(r"[~^]{2,}|\.\.\.<\d+ lines>\.\.\.")
_ERROR = re.compile(r"\b[\w.]{1,80}(?:Error|Exception)\b(?::|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`frames` is outermost first; phase None where nothing tells it."""

    frames: tuple[CodeFrame, ...] = ()
    phase: str | None = None
    because: CodeFrame | None = None
    """The frame that the phase was read from."""
    detail: str = ""
    shown: CodeFrame | None = None
    """Where a person would look: the innermost line outside torch."""
    hints: frozenset[str] = frozenset()
    written: tuple[tuple[int, ...], int] | None = None
    """The shape that the failing line asks for and the bytes of an element, where it spells them out."""


def frame_text(frame: CodeFrame) -> str:
    return f"{short_path(frame.path)}:{frame.line} {frame.function}".strip()


def place_of(located: Located) -> Place:
    return place_from(frames_before(located))


def frames_before(located: Located) -> tuple[CodeFrame, ...]:
    """The frames of the traceback that ends in this message. Lines of other ranks do not count."""
    passage = located.passage
    at = passage.index_at(located.offset)
    rank, first = passage.ranks[at], max(at - MAX_LINES_BACK, 0)
    kept: list[str] = []
    for number in range(at, first - 1, -1):
        if passage.ranks[number] != rank:
            continue
        kept.append(passage.lines[number])
        if _TRACEBACK in passage.lines[number]:
            break
    text = ("" if passage.breaks_words else " ").join(reversed(kept))
    if passage.breaks_words:
        text = passage.flat[passage.offset_of(max(at - len(kept) + 1, 0)) : located.offset]
    return tuple(_frames(text[: _end_of_frames(text, located)]))


def _end_of_frames(text: str, located: Located) -> int:
    found = text.rfind(located.oom.message[:24]) if located.oom.message else -1
    return found if found >= 0 else len(text)


def _frames(text: str) -> Iterator[CodeFrame]:
    found = list(_FRAME.finditer(text))[-MAX_FRAMES:]
    for each, following in zip(found, [*found[1:], None], strict=False):
        path, line, function = next(each.groups()[i : i + 3] for i in (0, 3, 6, 9) if each.group(i + 1))
        code = text[each.end() : following.start() if following else len(text)][:MAX_AROUND]
        arrow = _ARROW.search(code)
        if arrow:
            line, code = arrow[1], arrow[2].partition(f" {int(arrow[1]) + 1} ")[0]
        yield CodeFrame(path, int(line or 0), function, _code(code))


def _code(text: str) -> str:
    text = " ".join(_MARKS.sub(" ", text).split())
    error = _ERROR.search(text)
    return (text[: error.start()] if error else text)[:MAX_CODE].strip(" │")


def frames_of_stack(lines: Sequence[str]) -> tuple[CodeFrame, ...]:
    """From a snapshot's report: `path.py:12 name`, innermost first."""
    made = []
    for line in lines:
        found = re.match(r"(.{1,400}?):(\d{1,7}) (.{0,120})$", line)
        if found and found[1].endswith((".py", ".pyx", ".pyi", ">")):
            made.append(CodeFrame(found[1], int(found[2]), found[3]))
    return tuple(reversed(made))


# -- what was going on -----------------------------------------------------------------------------------------------

_AROUND = ("evaluation", "generation", "calibration")


def place_from(frames: Sequence[CodeFrame]) -> Place:
    """Frames are outermost first, as Python prints them."""
    if not frames:
        return Place()
    inner = list(reversed(frames))
    phase, because = phase_of(inner)
    return Place(
        frames=tuple(frames), phase=phase, because=because, detail=_detail(inner, phase),
        shown=next((frame for frame in inner if not LIBRARIES.at(frame)), inner[0]), hints=hints_of(inner, phase),
        written=_written(inner[0].code),
    )  # fmt: skip


def _written(code: str) -> tuple[tuple[int, ...], int] | None:
    found = _BUFFER.search(code)
    if found is None or found[2] not in ITEMSIZES:
        return None
    return tuple(int(side) for side in found[1].split(",")), ITEMSIZES[found[2]]


def _detail(inner: Sequence[CodeFrame], phase: str | None) -> str:
    if phase in ("backward", "forward") and any(map(RECOMPUTING.at, inner)):
        return "computing a checkpointed block again" if phase == "backward" else "in a checkpointed block"
    if phase == "loss" and any("lm_head(" in frame.code for frame in inner[:INNERMOST]):
        return "making the logits"
    if phase in _AROUND:
        return {"loss": "in its loss", "forward": "in its forward pass"}.get(pass_within(inner) or "", "")
    return ""


def of_another_engine(place: Place) -> bool:
    return any(map(ENGINES.at, place.frames))


def collects(place: Place) -> bool:
    """Whether the tensor grows from batch to batch."""
    return any(map(COLLECTING.at, place.frames))


def checkpointed(place: Place) -> bool:
    return any(map(RECOMPUTING.at, place.frames))
