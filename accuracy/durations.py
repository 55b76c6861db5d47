"""Run training steps on the GPU that is here and print what they took beside what memfit estimated.

    python -m accuracy.durations                        # a dozen jobs, each in a process of its own: some minutes
    python -m accuracy.durations --steps 10 --write accuracy/measured/durations.jsonl
    python -m accuracy.durations --only '{"kind": "train", "model": "gpt2", "seq_len": 1024, "batch_size": 8}'

The time of a step is the median of whole steps, the first four aside (two of them may be a probe), with the GPU waited
for only between steps. A row of what is written has the settings, `step_seconds`, and the estimate as `memfit plan
--json` has it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

STEPS, ASIDE = 8, 4
PATIENCE_SECONDS = 400

JOBS: tuple[dict[str, Any], ...] = (
    {"kind": "train", "model": "gpt2", "batch_size": 8, "seq_len": 1024},
    {"kind": "train", "model": "gpt2", "batch_size": 4, "seq_len": 1024, "precision": "fp32"},
    {"kind": "train", "model": "smollm2-135m", "batch_size": 8, "seq_len": 512, "loop": "memfit"},
    {"kind": "train", "model": "qwen2.5-0.5b", "batch_size": 4, "seq_len": 1024, "precision": "amp-bf16"},
    {"kind": "train", "model": "llama-3.2-1b", "batch_size": 2, "seq_len": 2048, "loop": "trainer"},
    {"kind": "train", "model": "qwen2.5-1.5b", "batch_size": 4, "seq_len": 4096, "grad_checkpointing": True},
    {"kind": "train", "model": "gsa-512m", "batch_size": 2, "seq_len": 1024, "precision": "amp-bf16", "grad_accum": 8,
     "grad_checkpointing": True, "loop": "memfit"},
    {"kind": "lora", "model": "smollm2-135m", "batch_size": 4, "seq_len": 512, "rank": 8},
    {"kind": "lora", "model": "llama-3.2-3b", "batch_size": 2, "seq_len": 2048, "rank": 16},
    {"kind": "lora", "model": "qwen2.5-7b", "batch_size": 1, "seq_len": 2048, "rank": 128, "grad_accum": 4,
     "grad_checkpointing": True, "loss": "chunked", "optimizer": "adamw-fused", "loop": "memfit"},
    {"kind": "lora", "model": "llama-3.1-8b", "batch_size": 4, "seq_len": 4096, "rank": 64, "grad_checkpointing": True},
    {"kind": "lora", "model": "llama-3.1-8b", "batch_size": 1, "seq_len": 1024, "rank": 16, "offload": ["weights"]},
)  # fmt: skip


class StepTimes:
    """When each step of the optimizer ended, in whatever loop; as phases it only sees to the weights."""

    def __init__(self, weights_are_there: Callable[[], None]) -> None:
        self.ended: list[float] = []
        self._weights_are_there = weights_are_there

    @contextmanager
    def __call__(self, name: str, step: int = 0) -> Iterator[None]:
        yield
        if name == "load":
            self._weights_are_there()

    @contextmanager
    def taken(self) -> Iterator[None]:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def stepped(*_: Any) -> None:
            torch.cuda.synchronize()
            self.ended.append(time.perf_counter())

        hook = register_optimizer_step_post_hook(stepped)
        try:
            yield
        finally:
            hook.remove()

    def median(self) -> float:
        return statistics.median(after - before for before, after in pairwise(self.ended[ASIDE:]))


def measure(spec: dict[str, Any], steps: int) -> dict[str, Any]:
    """One job, in this process."""
    import torch

    from accuracy.measure import MeasuredPhases, weights_left_alone
    from memfit.fitting.durations import estimate
    from memfit.gpus import find_gpu
    from memfit.jobs.build import prepare
    from memfit.jobs.run import run_job
    from memfit.jobs.workload import Workload

    work, card = Workload.from_mapping(spec), torch.cuda.get_device_name()
    told = estimate(work, find_gpu(card))
    with weights_left_alone():
        job = prepare(work)
    times = StepTimes(MeasuredPhases(job.model, work).weights_are_there)
    with times.taken():
        run_job(job, "cuda", times, steps=steps + ASIDE + 1)
    estimated = None if told is None else told.to_json()
    return {**spec, "step_seconds": round(times.median(), 5), "gpu": card, "estimated": estimated}


def run_apart(spec: dict[str, Any], steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "accuracy.durations", "--only", json.dumps(spec), "--steps", str(steps), "--here"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        return {**spec, "error": "timeout"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {**spec, "error": done.stderr[-400:]}
    return found


def line(row: dict[str, Any]) -> str:
    job = " ".join(f"{name}={value}" for name, value in row.items() if name not in NOT_SETTINGS)
    if "error" in row or row["estimated"] is None:
        return f"{'n/a':>8} {'n/a':>8} {'':>17}       {job}: {row.get('error', 'no estimate')}"
    span, took = row["estimated"]["step_seconds"], row["step_seconds"]
    inside = "in  " if span["least"] <= took <= span["most"] else "OUT "
    off = f"{span['likely'] / took - 1:+.0%}"
    within = f"{span['least']:.3f} to {span['most']:.3f}"
    paces = f"{took / row['estimated']['roofline_seconds']:.2f} x roofline, "
    paces += f"{1e6 * took / row['estimated']['kernels']:.0f} us a kernel"
    return f"{took:8.4f} {span['likely']:8.4f} {within:>17} {inside} {off:>5}  {job}  ({paces})"


NOT_SETTINGS = ("step_seconds", "gpu", "estimated", "error")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="that are measured, after four that are not")
    parser.add_argument("--only", metavar="JSON", help="this job instead of the list")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the rows, one JSON object a line")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    jobs = JOBS if asked.only is None else (json.loads(asked.only),)
    if asked.here:
        print(json.dumps(measure(jobs[0], asked.steps)), flush=True)
        return 0
    print(f"{'measured':>8} {'likely':>8} {'estimated range':>17}        off")
    rows = []
    for spec in jobs:
        rows.append(run_apart(spec, asked.steps))
        print(line(rows[-1]), flush=True)
        if asked.write is not None:
            asked.write.write_text("".join(json.dumps(row) + "\n" for row in rows))
    known = [row for row in rows if row.get("estimated")]
    spans = [(row["estimated"]["step_seconds"], row["step_seconds"]) for row in known]
    inside = sum(span["least"] <= took <= span["most"] for span, took in spans)
    print(f"{inside} of {len(known)} inside their range, {len(rows) - len(known)} without one")
    return 0 if inside == len(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
