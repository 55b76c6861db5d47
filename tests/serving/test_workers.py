"""Equal questions share one answer, only the newest of a client is worked on, and what is kept is bounded."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Coroutine
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="memfit[web] is not installed")
from memfit.serving import workers as module
from memfit.serving.workers import SUPERSEDED, TOO_MANY, Answer, Workers


class Slow(Workers):
    """Answers when it is told to, by the order of the questions."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[Any] = []
        self.free = asyncio.Event()
        for lane in self.lanes.values():
            lane._exchange = self._exchange  # type: ignore[method-assign]
            lane._warm = False

    async def _exchange(self, line: bytes) -> Answer:
        _, about = json.loads(line)
        self.begun.append(about["n"])
        await self.free.wait()
        return Answer(about.get("status", 200), line)


def with_workers(test: Callable[[Slow], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        workers = Slow()
        workers.start()
        try:
            await asyncio.wait_for(test(workers), 60)
        finally:
            await workers.stop()

    asyncio.run(run())


async def let_it_begin() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_equal_questions_are_asked_once() -> None:
    async def test(workers: Slow) -> None:
        asked = [asyncio.ensure_future(workers.ask("plan", {"n": 1, "x": i % 1}, client=f"c{i}")) for i in range(50)]
        await let_it_begin()
        workers.free.set()
        answers = await asyncio.gather(*asked)
        assert len({answer.body for answer in answers}) == 1
        assert workers.begun == [1] and workers.made == 1
        await workers.ask("plan", {"x": 0, "n": 1})
        assert workers.made == 1

    with_workers(test)


def test_of_one_client_s_questions_only_the_newest_is_begun() -> None:
    async def test(workers: Slow) -> None:
        asked = []
        for n in range(6):
            asked.append(asyncio.ensure_future(workers.ask("plan", {"n": n}, client="slider")))
            await let_it_begin()
        workers.free.set()
        answers = await asyncio.gather(*asked)
        assert workers.begun == [0, 5]
        assert [answer is SUPERSEDED for answer in answers] == [False, True, True, True, True, False]

    with_workers(test)


def test_what_somebody_else_waits_for_is_still_begun() -> None:
    async def test(workers: Slow) -> None:
        first = asyncio.ensure_future(workers.ask("plan", {"n": 0}, client="other"))
        await let_it_begin()
        shared = [asyncio.ensure_future(workers.ask("plan", {"n": 1}, client=name)) for name in ("a", "b")]
        await let_it_begin()
        newer = asyncio.ensure_future(workers.ask("plan", {"n": 2}, client="a"))
        await let_it_begin()
        workers.free.set()
        await asyncio.gather(first, *shared, newer)
        assert workers.begun == [0, 1, 2]

    with_workers(test)


def test_a_search_does_not_keep_plans_waiting() -> None:
    async def test(workers: Slow) -> None:
        search = asyncio.ensure_future(workers.ask("fit", {"n": "fit"}, lane="search"))
        plan = asyncio.ensure_future(workers.ask("plan", {"n": "plan"}))
        await let_it_begin()
        assert sorted(workers.begun) == ["fit", "plan"]
        workers.free.set()
        await asyncio.gather(search, plan)

    with_workers(test)


def test_what_is_kept_is_bounded_and_errors_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEPT_BYTES", 2000)

    async def test(workers: Slow) -> None:
        workers.free.set()
        for n in range(100):
            await workers.ask("plan", {"n": n, "text": "x" * 100})
        assert workers._kept_bytes <= 2000
        assert 0 < len(workers._kept) < 20
        await workers.ask("plan", {"n": "wrong", "status": 422})
        await workers.ask("plan", {"n": "wrong", "status": 422})
        assert workers.begun[-2:] == ["wrong", "wrong"]

    with_workers(test)


def test_a_queue_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 3)

    async def test(workers: Slow) -> None:
        asked = [asyncio.ensure_future(workers.ask("plan", {"n": n})) for n in range(8)]
        await let_it_begin()
        workers.free.set()
        answers = await asyncio.gather(*asked)
        assert sum(answer is TOO_MANY for answer in answers) >= 4

    with_workers(test)


def test_a_process_that_ends_is_an_answer_and_the_next_question_starts_another() -> None:
    async def run() -> None:
        workers = Workers()
        workers.start()
        try:
            lane = workers.lanes["search"]
            process = await lane._started()
            asked = asyncio.ensure_future(workers.ask("explain", {"text": "x", "job": {}, "gpu": None}, lane="search"))
            await asyncio.sleep(0.05)
            process.kill()
            assert (await asked).status == 500
            assert (await lane._started()).pid != process.pid
        finally:
            await workers.stop()
        assert lane._process is None

    asyncio.run(run())


def test_a_process_ends_when_its_server_was_killed_though_it_could_still_be_asked() -> None:
    starts = (
        "import subprocess, sys; "
        "print(subprocess.Popen([sys.executable, '-m', 'memfit.serving.worker']).pid, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", starts], stdin=PIPE, stdout=PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        worker = int(server.stdout.readline())
        time.sleep(2)  # it looks once a second
        os.kill(worker, 0)
        server.kill()
        server.wait()
        for _ in range(1000):
            if not is_alive(worker):
                return
            time.sleep(0.1)
        os.kill(worker, signal.SIGKILL)
        pytest.fail("it goes on")


def is_alive(process: int) -> bool:
    """One that has ended and that nobody has asked about is not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_an_ended_process_leaves_no_pipe_to_an_event_loop_that_is_gone() -> None:
    async def run() -> int:
        held_longer = ["sh", "-c", "sleep 0.3 & exit 3"]
        process = await asyncio.create_subprocess_exec(*held_longer, stdin=PIPE, stdout=PIPE)
        while process.returncode is None:
            await asyncio.sleep(0.01)
        return await module.end(process)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert asyncio.run(run()) == 3
        gc.collect()
    assert not [each for each in told if issubclass(each.category, ResourceWarning)]
