"""Measure many jobs, each in a process of its own, several at once where they fit together on the card.

    python -m accuracy.run SPECS.jsonl RESULTS.jsonl [--events FOLDER] [--seconds 500] [--at-once 4] [--card 130]
        [--by accuracy.capped]

A spec is a workload with an `id`; `gb` says roughly what it needs, so that they do not push each other out.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


class Card:
    def __init__(self, gigabytes: float) -> None:
        self.free = gigabytes
        self.changed = threading.Condition()

    def take(self, gigabytes: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.free >= gigabytes)
            self.free -= gigabytes

    def give(self, gigabytes: float) -> None:
        with self.changed:
            self.free += gigabytes
            self.changed.notify_all()


def run_one(spec: dict[str, Any], events: Path | None, by: str) -> dict[str, Any]:
    command = [sys.executable, "-m", by, json.dumps(spec), *(["--events", str(events)] if events else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired:
        return {**spec, "error": "timeout"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(lines[-1][7:]) if lines else {**spec, "error": done.stderr[-500:]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--events", type=Path)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--card", type=float, default=130, help="GB of the card that jobs may share")
    parser.add_argument("--by", default="accuracy.measure", help="the module that runs one job")
    options = parser.parse_args()
    waiting: queue.Queue[dict[str, Any]] = queue.Queue()
    for line in options.specs.read_text().splitlines():
        if line.strip():
            waiting.put(json.loads(line))
    card, lock, deadline = Card(options.card), threading.Lock(), time.time() + options.seconds
    if options.events:
        options.events.mkdir(parents=True, exist_ok=True)

    def work() -> None:
        while True:
            try:
                spec = waiting.get_nowait()
            except queue.Empty:
                return
            need = spec.get("gb", 30)
            card.take(need)
            late = time.time() > deadline
            result = {**spec, "error": "no time left"} if late else run_one(spec, options.events, options.by)
            card.give(need)
            with lock, options.results.open("a") as out:
                out.write(json.dumps(result) + "\n")
                print(_line(result), flush=True)

    threads = [threading.Thread(target=work) for _ in range(options.at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _line(result: dict[str, Any]) -> str:
    allocated, reserved = ((result.get(k) or 0) >> 20 for k in ("peak_allocated", "peak_reserved"))
    trouble = str(result.get("oom") or result.get("error") or "").replace("\n", " ")[-160:]
    return f"{result['id']} {allocated} {reserved} {result.get('wall_s')} s {trouble}"


if __name__ == "__main__":
    main()
