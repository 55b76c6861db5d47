"""Fit the guides' jobs here and write down what a GPU has to show of each answer.

    python -m accuracy.fits SPECS.jsonl [JOB ...]
    python -m accuracy.run SPECS.jsonl RESULTS.jsonl --by accuracy.capped --card 125

Each answer becomes a job that has to run with no more memory than its card would give it (`-fits`), and jobs that have
to fail there: the answer without its last change (`-less`) and with the next weaker one in its place (`-back`). Pruning
streams blocks and fits as it is; beside it stands the public code with the whole model on the card (`-whole`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit.fitting.fit import Fitted, fit

PRUNED = {"1b": "llama-3.2-1b", "3b": "llama-3.2-3b", "7b": "llama-2-7b", "13b": "llama-2-13b"}
CARDS = (8, 12, 16, 24, 40)
SHORT_PRUNING = 6
"""Blocks that are pruned, of all that the model has, where the whole of it is not run: each does the same."""
WHOLLY_PRUNED = ("prune7b8", "prune13b16")
QWEN = {"kind": "lora", "model": "qwen2.5-7b", "rank": 128, "seq_len": 2048, "global_batch": 16}
GSA = {"kind": "train", "model": "gsa-512m-gather", "batch_size": 4, "seq_len": 1024, "precision": "amp-bf16", "global_batch": 16}  # noqa: E501  # fmt: skip
FULL = {"kind": "train", "model": "llama-3.1-8b", "gpu": "80GiB"}
JOBS: dict[str, dict[str, Any]] = {
    "qwen24": {**QWEN, "gpu": "24GiB"},
    "qwen16": {**QWEN, "gpu": "16GiB", "keep": ["seq_len", "rank", "adapter_dtype"]},
    "llama8b80": {**FULL, "batch_size": 8, "global_batch": 8, "margin": 0.0},
    "llama8b80long": {**FULL, "seq_len": 8192, "batch_size": 1, "global_batch": 4},
    "gsa44": {**GSA, "gpu": "44GiB", "keep": ["model"]},
    "gsa44free": {**GSA, "gpu": "44GiB"},
    "lora3b12": {"kind": "lora", "model": "llama-3.2-3b", "rank": 64, "seq_len": 2048, "batch_size": 4,
                 "global_batch": 8, "gpu": "12GiB"},
    "train1b24": {"kind": "train", "model": "llama-3.2-1b", "seq_len": 2048, "batch_size": 8, "global_batch": 8,
                  "precision": "fp32", "gpu": "24GiB"},
    "gpt2eager": {"kind": "train", "model": "gpt2", "seq_len": 1024, "batch_size": 16, "global_batch": 32,
                  "precision": "fp32", "attention": "eager", "gpu": "24GiB"},
    "generate8": {"kind": "generate", "model": "llama-3.2-1b", "batch_size": 64, "seq_len": 2048, "new_tokens": 32,
                  "gpu": "8GiB"},
    "forward24": {"kind": "forward", "model": "llama-3.1-8b", "batch_size": 32, "seq_len": 2048, "gpu": "24GiB"},
    **{f"prune{size}{card}": {"kind": "prune", "model": model, "gpu": f"{card}GiB"}
       for size, model in PRUNED.items() for card in CARDS},
}  # fmt: skip


def main(target: Path, wanted: list[str]) -> None:
    with target.open("w", encoding="utf-8") as out:
        for name, job in JOBS.items():
            if wanted and name not in wanted:
                continue
            started = time.perf_counter()
            fitted = fit(**job)
            print(_line(name, fitted, time.perf_counter() - started), flush=True)
            for spec in _specs(name, job["gpu"], fitted):
                out.write(json.dumps(spec) + "\n")
                out.flush()


def _specs(name: str, gpu: str, fitted: Fitted) -> Iterator[dict[str, Any]]:
    capacity = fitted.gpu.capacity_bytes

    def spec(tag: str, workload: dict[str, Any], context: int, device: int, verdict: str) -> dict[str, Any]:
        short = fitted.workload.kind == "prune" and name not in WHOLLY_PRUNED
        return {
            "id": f"{name}-{tag}", "gpu": gpu, "cap_bytes": capacity - context,
            "expect": "fails" if verdict == "fails" else "runs", "gb": round(min(capacity, device) / 1e9 + 1, 1),
            **({"blocks": SHORT_PRUNING} if short else {}), "workload": workload,
        }  # fmt: skip

    after, less, back, whole = fitted.after, fitted.without_last, fitted.one_step_back, fitted.whole_model
    kept = fitted.fitted.settings()
    yield spec("fits", kept, after.context_bytes, after.device_bytes, after.verdict)
    if less is not None:
        yield spec("less", less.workload.settings(), less.context_bytes, less.device_bytes, less.verdict)
    if back is not None:
        forecast = back[1]
        yield spec(
            "back", forecast.workload.settings(), forecast.context_bytes, forecast.device_bytes, forecast.verdict
        )
    if whole is not None:
        peak = whole.plan.peak
        yield spec("whole", kept, peak.context_bytes, peak.device_bytes, whole.plan.verdict)


def _line(name: str, fitted: Fitted, seconds: float) -> str:
    changes = ", ".join(change.lever.name for change in fitted.changes) or "as it is"
    before, after = fitted.before.device_bytes / 2**30, fitted.after.device_bytes / 2**30
    less, whole = fitted.without_last, fitted.whole_model
    proofs = [
        f"without the last: {less.verdict}, {less.device_bytes / 2**30:.2f}" if less is not None else "",
        f"whole model: {whole.plan.verdict}, {whole.plan.peak.device_bytes / 2**30:.2f}" if whole is not None else "",
    ]
    said = "; ".join(proof for proof in proofs if proof)
    return f"{name:14} {fitted.answer}: {changes}; {before:.2f} -> {after:.2f} GiB; {said} ({seconds:.1f} s)"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
