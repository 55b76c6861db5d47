"""Processes that trace, beside the one that answers: one for plans, one for what takes longer.

Equal questions share one answer while it is being made, and find it again afterwards, within bounds. Of a client that
asks anew before its turn has come only the newest question is worked on.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

from starlette.responses import Response

from memfit.serving.worker import WARM, receive
from memfit.units import MiB

LANES = ("plan", "search")
"""A search for what fits takes its time; plans do not wait for it."""
MOST_KEPT_BYTES = 64 * MiB
MOST_WAITING = 200
LONGEST_SECONDS = 900.0
MOST_LINE_BYTES = 64 * MiB


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
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
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
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(key.encode() + b"\n")
        await process.stdin.drain()
        return Answer(*await receive(process.stdout))

    async def _started(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            if self._folder is None:
                self._folder = TemporaryDirectory(prefix="memfit-serve-")  # empty: no name of a model is a path in it
            command = [sys.executable, "-m", "memfit.serving.worker", *([WARM] if self._warm else [])]
            paths = [path for path in sys.path if os.path.isabs(path)]
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                limit=MOST_LINE_BYTES,
                start_new_session=True,
                cwd=self._folder.name,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
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
