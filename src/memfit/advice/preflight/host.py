"""The host: memory for loading and offload, shared memory for data workers, what may be locked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit.advice.preflight.finding import CannotTell, Finding, Line
from memfit.advice.preflight.situation import Situation
from memfit.advice.preflight.sizes import loading_bytes, state_bytes
from memfit.planning.host_facts import HOST, WORDS
from memfit.recording.machine import host_memory
from memfit.units import MiB, format_bytes, gib

MEMORY, SHARED, LOCKED = Line("machine", "host memory"), Line("machine", "/dev/shm"), Line("machine", "ulimit -l")
SHM = Path("/dev/shm")
DOCKER_DEFAULT = 64 * MiB
"""What a container gets of /dev/shm if nobody asks for more."""
BYTES_A_TOKEN = 16
"""input_ids and labels of a sample, eight bytes each."""
PREFETCHED = 2
"""Batches that each worker of a DataLoader holds ready."""


def memory(situation: Situation) -> Iterator[Finding]:
    host = host_memory()
    unused = host["total_bytes"] - host["used_bytes"]
    found = f"{gib(unused)} of {gib(host['total_bytes'])} free"
    needs = {} if not situation.asked.trains else _needs(situation)
    wanted = sum(needs.values())
    details: dict[str, Any] = {**host, "needed_bytes": needs}
    if not needs:
        yield MEMORY.ok(found, **details)
        return
    said = ", ".join(f"{gib(size)} for {what}" for what, size in needs.items())
    if wanted > unused:
        offloads = situation.config.memory.offload
        advice = "offload less" if offloads else "close other programs; a machine with more memory"
        short = f"{found}, and the job takes {gib(wanted)}: {said}"
        yield (MEMORY.failed if situation.runs_here else MEMORY.warning)(short, advice, **details)
        return
    yield MEMORY.ok(f"{found}; the job takes {said}", **details)


def _needs(situation: Situation) -> dict[str, int]:
    model, config = situation.shapes.needed(), situation.config
    processes = situation.asked.world_size
    needs = {"weights while they load": loading_bytes(model) * processes}
    if config.memory.offload:
        host: dict[str, int] = situation.plans.needed()[0].plan.trace.facts.get(HOST, {})
        needs |= {WORDS[what]: size * processes for what, size in host.items()}
        if "optimizer" in config.memory.offload:
            needs["the optimizer's state"] = state_bytes(model, config.optimizer.name) * processes
    return needs


def shared(situation: Situation) -> Iterator[Finding]:
    if not SHM.is_dir():
        raise CannotTell("this system has no /dev/shm")
    total, unused = (getattr(shutil.disk_usage(SHM), name) for name in ("total", "free"))
    config, processes = situation.asked.config, situation.asked.world_size
    workers = 0 if config is None else config.data.num_workers
    needed = 0
    if config is not None and workers:
        rows = situation.batch.needed().rows_per_process
        needed = processes * workers * PREFETCHED * rows * config.data.max_seq_len * BYTES_A_TOKEN
    found = f"{format_bytes(unused)} free"
    details: dict[str, Any] = {"free_bytes": unused, "needed_bytes": needed}
    advice = "docker run --shm-size=8g, or --ipc=host; or num_workers: 0"
    if needed > unused:
        yield SHARED.failed(f"{found}, and {workers} data workers keep {format_bytes(needed)} there", advice, **details)
    elif total <= DOCKER_DEFAULT and (processes > 1 or workers):
        who = "NCCL and data workers" if processes > 1 and workers else "NCCL" if processes > 1 else "data workers"
        yield SHARED.warning(f"{found}, as Docker gives by default; {who} share memory there", advice, **details)
    else:
        yield SHARED.ok(found + (f"; data workers keep {format_bytes(needed)} there" if needed else ""), **details)


def locked(situation: Situation) -> Iterator[Finding]:
    """CUDA pins memory through its driver, which this limit does not bind; InfiniBand registers it as anybody else."""
    try:
        import resource
    except ImportError as error:
        raise CannotTell("this system has no such limit") from error
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        yield LOCKED.ok("unlimited")
        return
    yield LOCKED.ok(
        f"{format_bytes(limit)}: pinned memory of CUDA is not bound by it, NCCL over InfiniBand is",
        "over InfiniBand: ulimit -l unlimited (docker run --ulimit memlock=-1)", limit_bytes=limit,
    )  # fmt: skip
