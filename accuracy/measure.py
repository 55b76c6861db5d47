"""Run memfit's own job on a GPU and write down what torch counted.

    python -m accuracy.measure '{"id": "a01", "kind": "train", "model": "gpt2", "seq_len": 512}' [--events FOLDER]

One JSON line comes out: the settings, `loaded` [allocated, reserved] after the weights are on the GPU, `phases` (for
each phase a list over its occurrences of [peak allocated, peak reserved], the counter reset before each), the peaks,
`context_bytes` and the device's use at the end. `cap_bytes` limits the allocator as a smaller card would. With
--events the allocator's whole history is saved beside it, to be compared event by event with a prediction.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ACTIONS = {
    "alloc": 0, "free_requested": 2, "free_completed": 3, "segment_alloc": 6, "segment_free": 7, "segment_map": 8,
    "segment_unmap": 9, "oom": 10, "snapshot": 11,
}  # fmt: skip


class PhasePeaks:
    """The most that was allocated and reserved in each phase, each time that it came."""

    def __init__(self) -> None:
        self.peaks: dict[str, list[list[int]]] = {}
        self.marks: list[tuple[int, str]] = []

    @contextmanager
    def __call__(self, name: str, step: int = 0) -> Iterator[None]:
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.marks.append((time.time_ns() // 1000, f"{name}:{step}"))
        yield
        torch.cuda.synchronize()
        self.peaks.setdefault(name, []).append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
        if name == "load":
            self.weights_are_there()

    def weights_are_there(self) -> None:
        """No part of any phase."""


class MeasuredPhases(PhasePeaks):
    """Weights get random values once they are on the GPU: what was in memory before may be NaN, and an
    optimizer behind a gradient scaler then never steps. What was sharded before it had memory gets its buffers too."""

    def __init__(self, model: Any, work: Any) -> None:
        super().__init__()
        self.model = model
        self.work = work
        self.loaded: list[int] | None = None

    def weights_are_there(self) -> None:
        import torch

        from memfit.jobs.training.parallel import is_made_without_memory

        with torch.no_grad():
            for parameter in self.model.parameters() if next(self.model.parameters()).is_cuda else ():
                getattr(parameter, "_local_tensor", parameter).normal_(0, 0.02)
            for buffer in self.model.buffers() if is_made_without_memory(self.work) else ():
                buffer.fill_(0.1)
        torch.cuda.synchronize()
        self.loaded = [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]


def measure(spec: dict[str, Any], events: Path | None) -> dict[str, Any]:
    settings = {k: v for k, v in spec.items() if k not in ("id", "cap_bytes", "expect", "gb", "group")}
    if settings.get("alloc_conf"):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings["alloc_conf"]
    import torch

    from memfit.jobs.build import prepare
    from memfit.jobs.run import run_job
    from memfit.jobs.workload import Workload

    cuda, result = torch.cuda, dict(spec)
    cuda.init()
    if events:
        cuda.memory._record_memory_history(max_entries=3_000_000, context="alloc", stacks="python")
    torch.zeros(1, device="cuda")
    cuda.synchronize()
    free, total = cuda.mem_get_info()
    result["context_bytes"] = total - free - cuda.memory_reserved()
    cuda.empty_cache()
    if spec.get("cap_bytes"):
        cuda.set_per_process_memory_fraction(spec["cap_bytes"] / cuda.get_device_properties(0).total_memory)
    with weights_left_alone():
        job = prepare(Workload.from_mapping(settings))
    phases = MeasuredPhases(job.model, job.workload)
    try:
        run_job(job, "cuda", phases)
    except torch.OutOfMemoryError as error:
        result["oom"] = str(error)[:300]
    peaks = [peak for found in phases.peaks.values() for peak in found]
    free, total = cuda.mem_get_info()
    result |= {
        "loaded": phases.loaded, "phases": phases.peaks,
        "peak_allocated": max((a for a, _ in peaks), default=None),
        "peak_reserved": max((r for _, r in peaks), default=None),
        "device_used_end": total - free, "reserved_end": cuda.memory_reserved(),
        "retries": cuda.memory_stats().get("num_alloc_retries", 0), "parameters": job.parameters,
        "machine": {"gpu": cuda.get_device_name(), "torch": torch.__version__, "total_memory": total},
    }  # fmt: skip
    if events:
        save_events(events / f"{spec['id']}.npz", phases.marks)
    return result


@contextmanager
def weights_left_alone() -> Iterator[None]:
    """Initial values on the host take longer than the whole measurement, and are replaced on the GPU anyway."""
    from unittest import mock

    import torch

    with mock.patch.object(torch.nn.init, "trunc_normal_", lambda tensor, **_: tensor):
        yield


def save_events(path: Path, marks: list[tuple[int, str]]) -> None:
    import numpy as np
    import torch

    names: dict[str, int] = {"": 0}
    rows: list[tuple[int, int, int, int, int]] = []
    waiting = list(marks)
    for event in torch.cuda.memory._snapshot()["device_traces"][0]:
        while waiting and event["time_us"] >= waiting[0][0]:
            rows.append((5, 0, names.setdefault("@" + waiting.pop(0)[1], len(names)), 0, 0))
        action = ACTIONS[event["action"]]
        label = names.setdefault(_place(event.get("frames")), len(names)) if action == 0 else 0
        rows.append((action, event.get("addr", 0), event["size"], label, event.get("stream", 0)))
    action, address, size, name, stream = (np.array(column, dtype=np.uint64) for column in zip(*rows, strict=True))
    text = np.frombuffer(json.dumps(list(names)).encode(), np.uint8)
    columns = {"a": action.astype(np.uint8), "p": address, "z": size.astype(np.int64), "n": name, "s": stream}
    np.savez_compressed(path, names=text, **columns)


def _place(frames: list[dict[str, Any]] | None) -> str:
    for frame in frames or []:
        file = frame["filename"]
        if "/torch/" not in file or "optim" in file or "checkpoint" in file:
            return f"{'/'.join(file.split('/')[-2:])}:{frame['line']}:{frame['name']}"
    return ""


def tell(argv: list[str], measured: Callable[[dict[str, Any], Path | None], dict[str, Any]]) -> None:
    """What came of the spec on the command line, as the one line that `accuracy.run` looks for."""
    spec = json.loads(argv[0])
    events = Path(argv[2]) if len(argv) > 2 and argv[1] == "--events" else None
    started = time.time()
    try:
        result = measured(spec, events)
    except Exception as error:
        result = {**spec, "error": f"{type(error).__name__}: {error}"[-600:]}
    result["wall_s"] = round(time.time() - started, 1)
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    tell(sys.argv[1:], measure)
