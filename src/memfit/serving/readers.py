"""Recordings that are looked at, each in a process of its own: a large one neither stops the server nor swells it.

A process keeps what it has read, so that every further question takes milliseconds. A few of them are kept; the one
that was not asked for longest goes first.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from memfit.serving.worker import receive, resident_bytes
from memfit.serving.workers import Answer, end, said

MOST_OPEN = 3
LONGEST_READING, LONGEST_ANSWER = 900.0, 60.0
MOST_LINE_BYTES = 1 << 16
GONE = "this file is no longer open here: others were opened since"


class Readers:
    def __init__(self) -> None:
        self._open: OrderedDict[str, OpenedFile] = OrderedDict()
        self._opening = asyncio.Lock()
        self.receiving = 0
        """Files that are on their way here."""

    async def open(self, key: str, path: Path, title: str, *, temporary: bool = False) -> OpenedFile:
        """`temporary`: the file goes as soon as it is read."""
        async with self._opening:
            reader = self._open.get(key)
            if reader is None or reader.refused is not None:
                await self.close(key)
                while len(self._open) >= MOST_OPEN:
                    await self.close(next(iter(self._open)))
                reader = self._open[key] = OpenedFile(path, title, temporary)
            self._open.move_to_end(key)
            return reader

    def find(self, key: str) -> OpenedFile:
        if key not in self._open:
            raise HTTPException(410, GONE)
        self._open.move_to_end(key)
        return self._open[key]

    async def close(self, key: str) -> None:
        if key in self._open:
            await self._open.pop(key).close()

    async def stop(self) -> None:
        for key in list(self._open):
            await self.close(key)


class OpenedFile:
    """One file: `state` says how far it is, `ask` waits until it is read."""

    def __init__(self, path: Path, title: str, temporary: bool) -> None:
        self.title, self._path, self._temporary = title, path, temporary
        self.progress: dict[str, Any] = {"stage": "starting"}
        self.refused: Answer | None = None
        self._began = time.monotonic()
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self._reading = asyncio.create_task(self._read())

    @property
    def state(self) -> dict[str, Any]:
        if self.refused is not None:
            return {"title": self.title, "state": "refused", **json.loads(self.refused.body)}
        state = "ready" if self._reading.done() else "reading"
        return {
            "title": self.title, "state": state, **self.progress, "seconds": time.monotonic() - self._began,
            "resident_bytes": None if self._process is None else resident_bytes(self._process.pid),
        }  # fmt: skip

    async def ask(self, do: str, asked: Mapping[str, Any]) -> Answer:
        """A document is gzipped."""
        await asyncio.shield(self._reading)
        if self.refused is not None:
            return self.refused
        async with self._lock:
            try:
                process = self._process
                assert process is not None and process.stdin is not None
                process.stdin.write(json.dumps([do, dict(asked)]).encode() + b"\n")
                return await asyncio.wait_for(self._message(process), LONGEST_ANSWER)
            except (asyncio.IncompleteReadError, asyncio.TimeoutError, ConnectionError, ValueError):
                await self._end()
                self.refused = said(410, "the process that read this file has ended", "open it again")
                return self.refused

    async def close(self) -> None:
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading
        await self._end()

    async def _read(self) -> None:
        try:
            self.refused = await asyncio.wait_for(self._read_messages(), LONGEST_READING)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, OSError):
            self.refused = said(500, "the process that read it has ended", "it may have run out of host memory")
        except asyncio.TimeoutError:
            self.refused = said(504, f"it could not be read within {LONGEST_READING:.0f} seconds")
        finally:
            if self._temporary:
                self._path.unlink(missing_ok=True)
            if self.refused is not None:
                await self._end()

    async def _read_messages(self) -> Answer | None:
        """None once it is read."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "memfit.serving.reading", str(self._path), self.title,
            stdin=PIPE, stdout=PIPE, limit=MOST_LINE_BYTES, start_new_session=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        while True:
            answer = await self._message(self._process)
            if answer.status == 200:
                return None
            body = gzip.decompress(answer.body)
            if answer.status != 102:
                return Answer(answer.status, body)
            self.progress = json.loads(body)

    async def _message(self, process: Process) -> Answer:
        assert process.stdout is not None
        return Answer(*await receive(process.stdout))

    async def _end(self) -> None:
        if self._process is not None:
            await end(self._process)
