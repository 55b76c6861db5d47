"""Processes beside the one that answers: one that traces for plans, one for what takes longer, one for each recording.

Equal questions about jobs share one answer while it is being made, and find it again afterwards, within bounds. Of a
client that asks anew before its turn has come only the newest question is worked on.

A large recording neither stops the server nor swells it. A process keeps what it has read, so that every further
question takes milliseconds. A few of them are kept; the one that was not asked for longest goes first.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from memfit.serving.worker import READ, WARM, receive, resident_bytes
from memfit.units import MiB

LANES = ("plan", "search")
"""A search for what fits takes its time; plans do not wait for it."""
MOST_KEPT_BYTES = 64 * MiB
MOST_WAITING = 200
LONGEST_SECONDS = 900.0
MOST_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class Answer:
    """As it goes to the browser."""

    status: int
    body: bytes

    def response(self) -> Response:
        packed = {"content-encoding": "gzip"} if self.body[:2] == b"\x1f\x8b" else None
        return Response(self.body, self.status, packed, media_type="application/json")


SUPERSEDED = Answer(409, b'{"error": "a newer question came before this one was answered", "hint": null}')
ENDING = Answer(503, b'{"error": "the server ends", "hint": null}')
TOO_MANY = Answer(503, b'{"error": "too many questions are waiting", "hint": "try again in a moment"}')


def said(status: int, message: str, hint: str | None = None) -> Answer:
    return Answer(status, json.dumps({"error": message, "hint": hint}).encode())


@dataclass(eq=False)
class Question:
    key: str
    answer: asyncio.Future[Answer]
    asking: set[str] = field(default_factory=set)
    """Clients; what nobody waits for any more is not begun."""


class Workers:
    def __init__(self) -> None:
        self.lanes = {name: WorkerQueue(warm=name == "plan") for name in LANES}
        self._kept: OrderedDict[str, Answer] = OrderedDict()
        self._kept_bytes = 0

    def start(self) -> None:
        for lane in self.lanes.values():
            lane.start()

    async def stop(self) -> None:
        await asyncio.gather(*(lane.stop() for lane in self.lanes.values()))

    async def ask(
        self, do: str, about: Mapping[str, Any], *, lane: str = "plan", client: str = "", keep: bool = True
    ) -> Answer:
        """What `memfit.serving.worker` answers to `do`; `client` says who asks, for whom only the newest counts."""
        key = json.dumps([do, about], sort_keys=True)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        answer = await self.lanes[lane].ask(key, client)
        if keep and answer.status == 200:
            self._keep(key, answer)
        return answer

    @property
    def made(self) -> int:
        """Answers that a process had to be asked for."""
        return sum(lane.made for lane in self.lanes.values())

    def _keep(self, key: str, answer: Answer) -> None:
        if key in self._kept:
            return
        self._kept[key] = answer
        self._kept_bytes += len(answer.body) + len(key)
        while self._kept_bytes > MOST_KEPT_BYTES:
            old, gone = self._kept.popitem(last=False)
            self._kept_bytes -= len(gone.body) + len(old)


class WorkerQueue:
    """One process and the questions that wait for it."""

    def __init__(self, *, warm: bool) -> None:
        self._warm, self.made = warm, 0
        self.waiting: deque[Question] = deque()
        self.open: dict[str, Question] = {}
        self._newest: dict[str, Question] = {}
        self._process: Process | None = None
        self._folder: TemporaryDirectory[str] | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        task, self._task = self._task, None
        while task is not None and not task.done():  # before Python 3.12 `wait_for` may swallow a cancel
            task.cancel()
            await asyncio.wait([task], timeout=1)
        for question in [*self.open.values()]:
            self._close(question, ENDING)
        self.waiting.clear()
        await self._discard(at_once=True)
        if self._folder is not None:
            self._folder.cleanup()

    async def ask(self, key: str, client: str) -> Answer:
        question = self.open.get(key)
        if question is None:
            if self._task is None:
                return ENDING
            if len(self.waiting) >= MOST_WAITING:
                return TOO_MANY
            question = Question(key, asyncio.get_running_loop().create_future())
            self.open[key] = question
            self.waiting.append(question)
            self.made += 1
            self._wake.set()
        if client:
            self._supersede(client, question)
        else:
            question.asking.add("")
        return await asyncio.shield(question.answer)

    def _supersede(self, client: str, question: Question) -> None:
        older = self._newest.get(client)
        question.asking.add(client)
        self._newest[client] = question
        if older is None or older is question:
            return
        older.asking.discard(client)
        if not older.asking and older in self.waiting:
            self.waiting.remove(older)
            self._close(older, SUPERSEDED)

    def _close(self, question: Question, answer: Answer) -> None:
        self.open.pop(question.key, None)
        for client in question.asking:
            if self._newest.get(client) is question:
                del self._newest[client]
        if not question.answer.done():
            question.answer.set_result(answer)

    async def _work(self) -> None:
        if self._warm:
            with suppress(OSError):
                await self._started()
        while True:
            while not self.waiting:
                self._wake.clear()
                await self._wake.wait()
            question = self.waiting.popleft()
            self._close(question, await self._answered(question))

    async def _answered(self, question: Question) -> Answer:
        for _ in range(2):
            try:
                return await asyncio.wait_for(self._exchange(question.key), LONGEST_SECONDS)
            except asyncio.TimeoutError:  # another one in Python 3.10
                await self._discard(at_once=True)
                return said(504, f"there was no answer within {LONGEST_SECONDS:.0f} seconds", "ask for less at once")
            except (asyncio.IncompleteReadError, ConnectionError, ValueError, OSError):
                if await self._discard() != 0:  # 0: it had grown too large, and another one is asked
                    break
        return said(500, "the process that works on this has ended", "it may have run out of host memory")

    async def _exchange(self, key: str) -> Answer:
        process = await self._started()
        assert process.stdin is not None
        process.stdin.write(key.encode() + b"\n")
        await process.stdin.drain()
        return await _message(process)

    async def _started(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            if self._folder is None:
                self._folder = TemporaryDirectory(prefix="memfit-serve-")  # empty: no name of a model is a path in it
            paths = os.pathsep.join(path for path in sys.path if os.path.isabs(path))
            self._process = await _started(*[WARM] * self._warm, cwd=self._folder.name, PYTHONPATH=paths)
        return self._process

    async def _discard(self, *, at_once: bool = False) -> int | None:
        """It is in a session of its own, so Ctrl-C in the terminal does not reach it; the end of its input does."""
        process, self._process = self._process, None
        if process is None:
            return None
        if not at_once:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), 1)
        return await end(process)


async def _started(*said: str, cwd: str | None = None, **variables: str) -> Process:
    """Of `memfit.serving.worker`, which is told what it is for."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "memfit.serving.worker", *said, stdin=PIPE, stdout=PIPE, limit=MOST_LINE_BYTES,
        start_new_session=True, cwd=cwd, env={**os.environ, **variables},
    )  # fmt: skip


async def _message(process: Process) -> Answer:
    assert process.stdout is not None
    return Answer(*await receive(process.stdout))


async def end(process: Process) -> int:
    """Its exit code, once it has ended and its pipes are closed: one that outlives the event loop never is."""
    assert process.stdin is not None and process.stdout is not None
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    process.stdin.close()
    with suppress(OSError, asyncio.TimeoutError):
        await asyncio.wait_for(process.stdin.wait_closed(), 1)
    with suppress(RuntimeError, asyncio.TimeoutError):  # someone else reads it, and will see its end
        await asyncio.wait_for(process.stdout.read(), 1)
    return await process.wait()


# -- recordings --------------------------------------------------------------------------------------------------------

MOST_OPEN = 3
LONGEST_READING, LONGEST_ANSWER = 900.0, 60.0
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
                return await asyncio.wait_for(_message(process), LONGEST_ANSWER)
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
        self._process = await _started(READ, str(self._path), self.title, OPENBLAS_NUM_THREADS="1")
        while True:
            answer = await _message(self._process)
            if answer.status == 200:
                return None
            body = gzip.decompress(answer.body)
            if answer.status != 102:
                return Answer(answer.status, body)
            self.progress = json.loads(body)

    async def _end(self) -> None:
        if self._process is not None:
            await end(self._process)
