"""Processes beside the server: how they talk with it, one that answers questions about jobs, one for a recording.

    python -m memfit.serving.worker                     # a question is a line of JSON, ["plan", {...}]
    python -m memfit.serving.worker --read FILE TITLE   # ["stretch", {...}]

An answer is a status as in HTTP, a length, and a document of JSON, gzipped where it is of a recording. Until that is
read its process tells how far it is (102); then comes 200, or why it cannot be read.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from memfit.errors import MemfitError, TraceError
from memfit.snapshots.schema import clean
from memfit.units import GiB, format_bytes

if TYPE_CHECKING:
    from asyncio import StreamReader

    from memfit.analysis.page import RunView


DOES = {
    "plan": "planned:plan_job", "timeline": "planned:draw_job", "duration": "planned:time_job",
    "fit": "planned:fit_job", "explain": "planned:explain_text", "table": "planned:table_of",
}  # fmt: skip
"""By file of this room and function: from the settings that were asked about to a document."""
WARM, READ = "--warm", "--read"
IDLE_SECONDS = 2.0
LOOK_SECONDS = 1.0
PAUSE_SECONDS = 0.3
"""Somebody who moves a slider asks again sooner."""
MOST_BYTES = 3 * GiB
"""A process that has grown so large ends after its answer; the next question starts another."""


def main() -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = answers_pipe()
    sys.stdout = sys.stderr  # what a model's own code prints is no answer
    while line := _next_line():
        do, about = json.loads(line)
        status, document = answer(do, about)
        body = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
        send(answers, status, body)
        if (resident_bytes() or 0) > MOST_BYTES:
            return


def _end_with(server: int) -> None:
    """A server that was killed closes no question: nobody would read the answer."""
    while os.getppid() == server:
        time.sleep(LOOK_SECONDS)
    os._exit(1)


def _next_line() -> bytes:
    """While nobody asks, what takes seconds to import is imported: not before a question that can do without it."""
    if WARM in sys.argv and "peft" not in sys.modules and _is_idle(IDLE_SECONDS):
        import_module("memfit.serving.planned").warm()
    planned = sys.modules.get("memfit.serving.planned")
    while planned is not None and _is_idle(PAUSE_SECONDS) and planned.use_idle_time():
        pass
    return sys.stdin.buffer.readline()


def _is_idle(seconds: float) -> bool:
    import select

    return not select.select([0], [], [], seconds)[0]


def answer(do: str, about: dict[str, Any]) -> tuple[int, Any]:
    file, _, name = DOES[do].partition(":")
    try:
        return 200, getattr(import_module(f"memfit.serving.{file}"), name)(**about)
    except MemfitError as error:
        return (501 if isinstance(error, TraceError) else 422), {"error": error.message, "hint": error.hint}
    except Exception as error:
        import traceback

        traceback.print_exc()
        return 500, {"error": f"{type(error).__name__}: {error}", "hint": "this is a bug in memfit, please report it"}


def answers_pipe() -> IO[bytes]:
    """Of a process, for its answers alone: what else it prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def send(answers: IO[bytes], status: int, body: bytes) -> None:
    """A status as in HTTP."""
    answers.write(b"%d %d\n" % (status, len(body)) + body)
    answers.flush()


async def receive(answers: StreamReader) -> tuple[int, bytes]:
    status, length = (await answers.readuntil(b"\n")).split()
    return int(status), await answers.readexactly(int(length))


def resident_bytes(process: int | str = "self") -> int | None:
    try:
        with open(f"/proc/{process}/statm", encoding="ascii") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


# -- a recording ------------------------------------------------------------------------------------------------------

MOST_READ_BYTES = 8 * GiB
"""Of address space: what would unfold to more ends in a message, and takes nobody's memory."""


def read_recording(path: str, title: str) -> None:
    from memfit.analysis.page import RunView

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
        _send(answers, *_answer_of(viewed, do, asked))


def _report(path: str, title: str, answers: IO[bytes]) -> Any:
    from memfit.analysis.report import report_file

    _send(answers, 102, {"stage": "reading", "bytes": Path(path).stat().st_size})
    reported = report_file(path, on_read=lambda events: _send(answers, 102, {"stage": "placing", "events": events}))
    reported.document["source"]["path"] = clean(title)
    return reported


def _answer_of(viewed: RunView, do: str, asked: dict[str, Any]) -> tuple[int, Any]:
    try:
        if do == "page":
            return 200, viewed.page()
        return 200, {"whole": viewed.whole, "stretch": viewed.stretch, "sums": viewed.sums}[do](asked)
    except (MemfitError, MemoryError) as error:
        return 422, _refusal(error)


def _refusal(error: Exception, path: str = "", title: str = "") -> dict[str, Any]:
    if not isinstance(error, MemfitError):
        return {"error": f"it needs more than {format_bytes(MOST_READ_BYTES)} of memory", "hint": None}
    return {"error": error.message.replace(repr(path), repr(clean(title))), "hint": error.hint}


def _send(answers: IO[bytes], status: int, document: Any) -> None:
    send(answers, status, gzip.compress(json.dumps(document, separators=(",", ":"), allow_nan=False).encode(), 1))


def _bound() -> None:
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_READ_BYTES, MOST_READ_BYTES))


def _give_back() -> None:
    """What reading took beyond what is kept."""
    with suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    read_recording(*sys.argv[2:]) if READ in sys.argv[1:2] else main()
