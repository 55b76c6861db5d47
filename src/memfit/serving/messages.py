"""What goes between the server and its processes: lines of JSON in, a status, a length and a document out."""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import StreamReader


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
