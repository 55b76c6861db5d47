"""The command as a person runs it: a process of its own, with the caches as they are found."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

BATCH_LINES, ALL_LINES = 100, 1000
BATCHES: dict[str, dict[str, Any]] = {
    "lora, checkpointed": {"kind": "lora", "model": "llama-3.2-1b", "grad_checkpointing": True},
    "lora of 7B, checkpointed": {"kind": "lora", "model": "qwen2.5-7b", "grad_checkpointing": True},
    "train": {"kind": "train", "model": "llama-3.2-1b"},
    "forward, two windows": {"kind": "forward", "model": "gemma-2-9b"},
    "generate 64": {"kind": "generate", "model": "llama-3.2-1b", "new_tokens": 64},
}
"""One job each, asked at as many batch sizes and lengths as there are lines."""
BATCH_LIMIT_SECONDS = 120.0
CACHED_LIMIT_SECONDS = 0.4
PLAN = (
    "plan", "lora", "--model", "llama-3.1-8b", "--batch-size", "1", "--seq-len", "2048", "--grad-checkpointing",
    "--gpu", "H100", "--json",
)  # fmt: skip
SAME_CLASS = ("--gpu", "H200", "--alloc-conf", "expandable_segments:True")


def run(*arguments: str, cache: str, stdin: str | None = None) -> float:
    """Seconds of `memfit ARGUMENTS`; its output is read and dropped."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "memfit", *arguments], input=stdin, capture_output=True, text=True, env=_env(cache),
        check=False,
    )  # fmt: skip
    if done.returncode not in (0, 1):
        raise RuntimeError(f"memfit {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
    return time.perf_counter() - started


def _env(cache: str) -> dict[str, str]:
    source = str(Path(__file__).parents[1] / "src")
    return {**os.environ, "MEMFIT_CACHE": cache, "PYTHONPATH": source}


def one_plan(rounds: int = 3) -> dict[str, float]:
    """From the shell: without a trace of the job, with one, and for another card of its class."""
    with TemporaryDirectory() as folder:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        bare = time.perf_counter() - started
        cold = run(*PLAN, cache=folder)
        cached = min(run(*PLAN, cache=folder) for _ in range(rounds))
        other = min(run(*PLAN[:-3], *SAME_CLASS, "--json", cache=folder) for _ in range(rounds))
        help_ = min(run("--help", cache=folder) for _ in range(rounds))
    return {
        "python_seconds": bare, "help_seconds": help_, "cold_seconds": cold, "cached_seconds": cached,
        "cached_other_card_seconds": other,
    }  # fmt: skip


def batch(workload: dict[str, Any], lines: int) -> dict[str, Any]:
    """`plan batch` over one job, no batch size and no sequence length twice; the trace cache starts empty. Processor
    time counts, because other processes do not lengthen it."""
    with TemporaryDirectory() as folder:
        peak: int | None = None
        before = _processor_seconds()
        arrived, started = [], time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "memfit", "plan", "batch", _file(workload, lines, folder)], stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=_env(str(Path(folder, "cache"))), text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for answer in process.stdout:
            if json.loads(answer)["schema"] != "memfit.plan/1":
                raise RuntimeError(f"a line failed: {answer}")
            arrived.append(time.perf_counter() - started)
            peak = _host_peak(process.pid) or peak
        if process.wait() or len(arrived) != lines:
            raise RuntimeError(f"plan batch ended with {process.returncode} after {len(arrived)} of {lines} lines")
        total = time.perf_counter() - started
    later = arrived[lines // 2 - 1 :]
    a_line = (later[-1] - later[0]) / (len(later) - 1)
    return {
        "workload": workload, "lines": lines, "seconds": total, "processor_seconds": _processor_seconds() - before,
        "first_line_seconds": arrived[0], "seconds_a_line_in_second_half": a_line,
        "seconds_for_1000": total if lines == ALL_LINES else total + (ALL_LINES - lines) * a_line,
        "measured": lines == ALL_LINES, "host_peak_bytes": peak,
    }  # fmt: skip


def _processor_seconds() -> float:
    """Of all processes that were started from here and have ended."""
    spent = os.times()
    return spent.children_user + spent.children_system


def _host_peak(pid: int) -> int | None:
    """Of another process that still runs; Linux tells, others do not."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    peak = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), None)
    return None if peak is None else int(peak) * 1024


def _file(workload: dict[str, Any], lines: int, folder: str) -> str:
    order = random.Random(0)
    batches, lengths = list(range(1, lines + 1)), [128 + 8 * i for i in range(lines)]
    order.shuffle(batches)
    order.shuffle(lengths)
    path = Path(folder, "lines.jsonl")
    pairs = zip(batches, lengths, strict=True)
    path.write_text(
        "".join(json.dumps({**workload, "batch_size": size, "seq_len": length}) + "\n" for size, length in pairs)
    )
    return str(path)
