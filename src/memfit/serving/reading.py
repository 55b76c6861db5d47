"""A process that reads one recording, keeps it, and answers what a viewer asks about it.

    python -m memfit.serving.reading FILE TITLE

A message is a status as in HTTP, a length, and gzipped JSON. Until the file is read they tell how far that is (102);
then comes 200, or why it cannot be read. From then on a line of JSON comes in for each document that goes out.
"""

from __future__ import annotations

import gzip
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from memfit.analysis.report import report_file
from memfit.analysis.viewing import RunView
from memfit.errors import MemfitError
from memfit.serving.worker import answers_pipe, send
from memfit.snapshots.schema import clean
from memfit.units import GiB, format_bytes

MOST_BYTES = 8 * GiB
"""Of address space: what would unfold to more ends in a message, and takes nobody's memory."""


def main(path: str, title: str) -> None:
    answers = answers_pipe()
    _bound()
    try:
        viewed = RunView(_report(path, title, answers))
        _send(answers, 200, {})
    except (MemfitError, MemoryError) as error:
        _send(answers, 422, _refusal(error, path, title))
        return
    _give_back()
    for line in sys.stdin.buffer:
        do, asked = json.loads(line)
        _send(answers, *_answer(viewed, do, asked))


def _report(path: str, title: str, answers: IO[bytes]) -> Any:
    _send(answers, 102, {"stage": "reading", "bytes": Path(path).stat().st_size})
    reported = report_file(path, on_read=lambda events: _send(answers, 102, {"stage": "placing", "events": events}))
    reported.document["source"]["path"] = clean(title)
    return reported


def _answer(viewed: RunView, do: str, asked: dict[str, Any]) -> tuple[int, Any]:
    try:
        if do == "page":
            return 200, viewed.page()
        return 200, {"whole": viewed.whole, "stretch": viewed.stretch, "sums": viewed.sums}[do](asked)
    except (MemfitError, MemoryError) as error:
        return 422, _refusal(error)


def _refusal(error: Exception, path: str = "", title: str = "") -> dict[str, Any]:
    if not isinstance(error, MemfitError):
        return {"error": f"it needs more than {format_bytes(MOST_BYTES)} of memory", "hint": None}
    return {"error": error.message.replace(repr(path), repr(clean(title))), "hint": error.hint}


def _send(answers: IO[bytes], status: int, document: Any) -> None:
    send(answers, status, gzip.compress(json.dumps(document, separators=(",", ":"), allow_nan=False).encode(), 1))


def _bound() -> None:
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))


def _give_back() -> None:
    """What reading took beyond what is kept."""
    with suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
