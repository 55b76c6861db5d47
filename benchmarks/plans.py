"""Plans in one warm process: the time of each, and what of it is spent on the events themselves."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ROUNDS = 3
SLOW_SECONDS = 2.0
"""A case whose first call takes longer is timed once more, not three times."""
MODELS = (
    "llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "gemma-2-27b", "gemma-3-1b", "qwen3-30b-a3b",
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "forward": {"kind": "forward"},
    "lora": {"kind": "lora"},
    "lora, checkpointed": {"kind": "lora", "grad_checkpointing": True},
    "train": {"kind": "train"},
}
LIMITS = {"forward": 0.7, "lora": 1.5, "lora, checkpointed": 1.5, "train": 2.0}
LONG_PERIOD, LONGER = ("gemma-3-1b",), 3.0
EXPERTS = ("qwen3-30b-a3b",)
SEEN_TWICE = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b")
"""Adapters with and without checkpointing; of the others only with, the longer of the two."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    model: str
    settings: dict[str, Any]
    limit_seconds: float | None = None
    """What it should stay below; None where there is no such aim."""


def cases() -> list[Case]:
    """Batch 1 and 2,048 tokens; sizes of tensors do not change the time."""
    made = [
        Case(name=name, model=model, settings=settings, limit_seconds=_limit(name, model))
        for model in MODELS
        for name, settings in KINDS.items()
        if name != "lora" or model in SEEN_TWICE
    ]
    trainer = {"kind": "lora", "loop": "trainer", "precision": "amp-bf16"}
    made.append(Case(name="lora, trainer, amp", model="llama-3.1-8b", settings=trainer, limit_seconds=LONGER))
    made.append(Case(name="generate 32", model="qwen2.5-7b", settings={"kind": "generate", "new_tokens": 32}))
    return made


def _limit(name: str, model: str) -> float | None:
    return None if model in EXPERTS else LONGER if model in LONG_PERIOD else LIMITS[name]


@dataclass(frozen=True, kw_only=True)
class Timed:
    name: str
    model: str
    first_seconds: float
    """The first call: as the others, and the full model is built once without memory to see whether blocks repeat."""
    best_seconds: float
    median_seconds: float
    rounds: int
    limit_seconds: float | None
    events: int
    replay_events_per_second: float
    after_trace_seconds: float
    """Of this, what comes after the trace: its replays, the search for the smallest card, the report."""
    host_peak_bytes: int
    """Of this process, so far."""


def measured(case: Case) -> Timed:
    from memfit.planning.predict import Plan, assess, predict
    from memfit.replay.alloc_config import AllocatorConfig
    from memfit.replay.replay import replay

    def plan() -> Plan:
        return predict(model=case.model, trace_cache=False, **case.settings)

    kept: list[Plan] = []
    first = _seconds(lambda: kept.append(plan()))
    trace = kept.pop().trace

    def replays_and_report() -> Plan:
        return assess(
            trace, AllocatorConfig(), None, 0, started=0.0, notes=(), workload={}, model="", parameters=0,
            trainable_parameters=0,
        )  # fmt: skip

    rounds = [_seconds(plan) for _ in range(ROUNDS if first <= SLOW_SECONDS else 1)]
    return Timed(
        name=case.name, model=case.model, first_seconds=first, best_seconds=min(rounds),
        median_seconds=statistics.median(rounds), rounds=len(rounds), limit_seconds=case.limit_seconds,
        events=len(trace), replay_events_per_second=len(trace) / min(_seconds(lambda: replay(trace)) for _ in range(2)),
        after_trace_seconds=min(_seconds(replays_and_report) for _ in range(3)), host_peak_bytes=host_peak(),
    )  # fmt: skip


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def host_peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def ratios(timed: list[Timed]) -> dict[str, float]:
    """How much longer 70B takes than 8B, by kind of job."""
    best = {(each.name, each.model): each.best_seconds for each in timed}
    pairs = {name: (best.get((name, "llama-3.1-70b")), best.get((name, "llama-3.1-8b"))) for name in KINDS}
    return {name: large / small for name, (large, small) in pairs.items() if large and small}
