"""Runs made up for tests: snapshots whose every block lies where an allocator put it, and pages in a browser."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

from memfit.events import Action, Trace
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.allocator import CachingAllocator
from memfit.replay.driver import Driver
from memfit.snapshots.read import Snapshot, snapshot_of
from memfit.snapshots.write import placed_snapshot

DATA = Path(__file__).parents[1] / "data"
MiB = 1 << 20
CONFIGS = ("", "expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:4")

Raw = dict[str, Any]
Frames = list[dict[str, Any]]


def frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def random_trace(seed: int, events: int = 400) -> Trace:
    """Allocations of all sizes on two streams, freed in any order, some of them late; the cache is emptied at times."""
    chance = random.Random(seed)
    trace, live, leaving = Trace(), [], []
    while len(trace) < events:
        dice = chance.random()
        if dice < 0.5 or not live:
            size = chance.choice([1, 600, 5000, 300_000, MiB, 3 * MiB // 2, 7 * MiB, 11 * MiB, 30 * MiB, 90 * MiB])
            live.append(trace.alloc(size + chance.randrange(3) * 512, stream=chance.choice([0, 0, 0, 7])))
        elif dice < 0.9:
            trace.free(live.pop(chance.randrange(len(live))))
        elif dice < 0.96:
            leaving.append(live.pop(chance.randrange(len(live))))
            trace.free_requested(leaving[-1])
        elif dice < 0.98 and leaving:
            trace.free_completed(leaving.pop(0))
        else:
            for block in leaving:
                trace.free_completed(block)
            leaving.clear()
            trace.empty_cache()
    return trace


def as_measured(trace: Trace, alloc_conf: str = "", begin: int = 0) -> Snapshot:
    """What a recording of it from event `begin` on would have been; nothing in it says that memfit made it."""
    raw = placed_snapshot(trace, AllocatorConfig.parse(alloc_conf), begin=begin, alloc_conf=alloc_conf)
    del raw["memfit"]
    raw["external_annotations"] = []
    for event in raw["device_traces"][0]:
        event["time_us"] += 1_000_000
    return snapshot_of(raw)


class Recorder:
    """A program run against the model of the allocator, written down as torch would."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.time = 1_700_000_000_000_000
        recorder = self

        class Noting(Driver):
            def gave(self, action: Action, address: int, size: int, stream: int) -> None:
                super().gave(action, address, size, stream)
                recorder._event("segment_alloc", address, size, [])

        self.allocator = CachingAllocator(driver=Noting())

    def alloc(self, size: int, frames: Frames) -> tuple[Any, int]:
        block = self.allocator.malloc(size)
        assert block is not None
        self._event("alloc", block.address, size, frames)
        return block, size

    def free(self, made: tuple[Any, int], frames: Frames) -> None:
        block, size = made
        address = block.address
        for action in ("free_requested", "free_completed"):
            self._event(action, address, size, frames)
        self.allocator.free(block)

    def out_of_memory(self, size: int, frames: Frames, device_free: int = 0) -> None:
        self._event("oom", 0, size, frames)
        self.events[-1]["device_free"] = device_free
        del self.events[-1]["addr"]

    def pause(self, microseconds: int) -> None:
        self.time += microseconds

    def _event(self, action: str, address: int, size: int, frames: Frames) -> None:
        self.time += 3
        self.events.append(
            {
                "action": action, "addr": address, "size": size, "stream": 0, "time_us": self.time,
                "compile_context": "N/A", "user_metadata": "", "frames": frames,
            }
        )  # fmt: skip

    def snapshot(self) -> Raw:
        segments = [
            {
                "device": 0, "address": record.address, "total_size": record.size, "stream": 0,
                "segment_type": "small" if record.small else "large", "segment_pool_id": (0, 0),
                "is_expandable": False, "frames": [],
                "blocks": [
                    {
                        "address": block.address, "size": block.size, "requested_size": block.requested,
                        "state": block.state, "frames": [],
                    }
                    for block in record.blocks
                ],
            }
            for record in self.allocator.layout()
        ]  # fmt: skip
        settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False, "max_split_size": -1}
        return {
            "segments": segments, "device_traces": [self.events], "allocator_settings": settings,
            "external_annotations": [],
        }  # fmt: skip


MAIN = [frame("train.py", 30, "train"), frame("train.py", 90, "<module>")]
OPTIMIZER = [frame("site-packages/torch/optim/adamw.py", 400, "adamw"), *MAIN]
LOADING = [frame("site-packages/torch/nn/modules/module.py", 900, "_apply"), *MAIN]


def training(events: int, *, layers: int = 60, depth: int = 23, leak: int = 0, seed: int = 1) -> Recorder:
    """Training steps of a model with layers, until there are so many events: forward, backward, optimizer, zero_grad.
    Each step keeps `leak` bytes for ever."""
    chance = random.Random(seed)
    recorder = Recorder()
    frames = [frame(f"site-packages/lib{i % 17}/mod_{i % 40}.py", i + 1, f"fn_{i}") for i in range(600)]
    stacks = [[*chance.sample(frames, depth), *MAIN] for _ in range(14 * layers)]
    weights = [recorder.alloc(size, LOADING) for _ in range(layers) for size in (4 * MiB, 16 * MiB, 8192)]
    state: list[tuple[Any, int]] = []
    while len(recorder.events) < events:
        kept = []
        for number, stack in enumerate(stacks):
            size = (3 * MiB, 12 * MiB, MiB, 4096, 65536, 6 * MiB, 512)[number % 7] + 512 * (number % 14 * 37 % 100)
            made = recorder.alloc(size, stack)
            if number % 3 == 0:
                recorder.free(made, stack)
            else:
                kept.append(made)
        if leak:
            recorder.alloc(leak, [frame("train.py", 44, "log_loss"), MAIN[1]])
        gradients = []
        for _ in range(layers):
            for size in (3 * MiB, 12 * MiB, 6 * MiB):
                recorder.free(recorder.alloc(size, []), [])
            for _ in range(min(9, len(kept))):
                recorder.free(kept.pop(), [])
            gradients += [recorder.alloc(size, []) for size in (4 * MiB, 16 * MiB, 8192)]
        for made in kept:
            recorder.free(made, [])
        state = state or [recorder.alloc(size, OPTIMIZER) for _, size in weights for _ in (0, 1)]
        for _, size in gradients:
            recorder.free(recorder.alloc(size, OPTIMIZER), OPTIMIZER)
        for made in gradients:
            recorder.free(made, MAIN)
        recorder.pause(20_000)
    return recorder


def save(raw: Any, path: Path) -> Path:
    path.write_bytes(pickle.dumps(raw, protocol=4))
    return path
