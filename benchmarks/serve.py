"""`memfit serve` under load and at its first look: 50 clients for a minute, memory, weight of the page.

    python benchmarks/serve.py [--seconds 60] [--clients 50]

Every client asks for plans one after the other, of eight jobs whose traces are known, over one connection of its own.
The answers must be whole, the processes of the server no larger afterwards, and 19 of 20 answers must come within
150 ms. The page is opened in Chromium, where there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from statistics import median, quantiles
from urllib.parse import urlsplit

import psutil

JOBS = [
    {"kind": "train", "model": "gpt2", "batch_size": batch, "seq_len": length}
    for batch, length in itertools.product((1, 2, 4, 8), (256, 512))
]
CARD = "8GB"


class Client:
    """One connection, kept open; no more of HTTP than this server speaks."""

    def __init__(self, host: str, port: int, token: str, name: str) -> None:
        self.host, self.port, self.token, self.name = host, port, token, name

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port)

    async def ask(self, job: dict[str, object]) -> tuple[int, bytes]:
        body = json.dumps({"job": job, "gpu": CARD, "client": self.name}).encode()
        head = (
            f"POST /api/plan HTTP/1.1\r\nhost: {self.host}:{self.port}\r\nauthorization: Bearer {self.token}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)
        answer = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = re.search(r"content-length: (\d+)", answer)
        assert length is not None
        return int(answer.split()[1]), await self.reader.readexactly(int(length[1]))


async def load(address: str, clients: int, seconds: float) -> list[float]:
    parts = urlsplit(address)
    host, port, token = str(parts.hostname), int(parts.port or 0), parts.query.removeprefix("token=")
    times: list[float] = []
    known: dict[int, bytes] = {}

    async def one(number: int, until: float) -> None:
        client = Client(host, port, token, str(number))
        await client.connect()
        for turn in itertools.count(number):
            began = time.perf_counter()
            status, body = await client.ask(JOBS[turn % len(JOBS)])
            times.append(time.perf_counter() - began)
            assert status == 200, (status, body[:200])
            assert known.setdefault(turn % len(JOBS), body) == body, "two answers to one question"
            if time.perf_counter() > until:
                client.writer.close()
                return

    await asyncio.gather(*(one(number, time.perf_counter() + seconds) for number in range(clients)))
    return times


def resident(process: psutil.Process) -> dict[str, int]:
    children = [each.memory_info().rss for each in process.children(recursive=True)]
    return {"server": process.memory_info().rss >> 20, "workers": sum(children) >> 20}


def settle(process: psutil.Process) -> None:
    """A process that traces imports torch while nobody asks."""
    seen, now = {}, resident(process)
    while seen != now:
        time.sleep(4)
        seen, now = now, resident(process)


def first_look(address: str) -> dict[str, float] | None:
    browser = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
    if browser is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        page = started.new_page()
        weights: list[int] = []
        page.on("response", lambda answer: weights.append(int(answer.headers.get("content-length", "0"))))
        page.goto(address)
        page.wait_for_selector("html[data-ready]", state="attached")
        paint = page.evaluate("() => performance.getEntriesByType('paint').map((each) => each.startTime)")
        assets = [each for each in weights if each]
        started.close()
    return {"first paint ms": round(max(paint)), "page kB": round(sum(assets) / 1000), "files": len(assets)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=50)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "memfit", "serve", "--port", "0", "--no-browser", "--dir", folder]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            process = psutil.Process(server.pid)
            asyncio.run(load(address, 1, 0.1))
            for _ in range(len(JOBS)):
                asyncio.run(load(address, asked.clients, 0.5))  # every job traced, every connection seen once
            settle(process)
            before, used = resident(process), sum(process.cpu_times()[:2])
            times = asyncio.run(load(address, asked.clients, asked.seconds))
            after, used = resident(process), sum(process.cpu_times()[:2]) - used
            cuts = quantiles(times, n=100)
            print(f"{len(times):,} answers to {asked.clients} clients in {asked.seconds:.0f} s, no error")
            print(f"median {1000 * median(times):.0f} ms, p95 {1000 * cuts[94]:.0f} ms, p99 {1000 * cuts[98]:.0f} ms")
            print(f"{1000 * used / len(times):.2f} ms of the server's CPU an answer")
            print(f"MiB before {before}, after {after}")
            print(first_look(address))
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(20)


if __name__ == "__main__":
    main()
