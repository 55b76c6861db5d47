"""Which GPUs are here, how much of them is free, and who holds the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from memfit.advice.preflight.finding import Finding, Line
from memfit.advice.preflight.situation import VISIBLE, Situation
from memfit.planning.card_here import NOTICEABLE
from memfit.recording.nvml import GpuProcess, GpuState
from memfit.units import GiB, gib

PRESENT, FREE = Line("machine", "GPU"), Line("machine", "GPU memory")
KEPT_BY_DRIVER = 1 * GiB
"""Of a card that nobody uses the driver keeps less than this for itself: 0.60 GiB of an H200."""
SHOWN = 4
LONGEST_NAME = 60


def present(situation: Situation) -> Iterator[Finding]:
    gpus, wanted = situation.gpus.get(), situation.asked.world_size
    shown = os.environ.get(VISIBLE)
    by = "" if shown is None else f" ({VISIBLE}={shown})"
    if not gpus:
        advice = "nvidia-smi -L lists those that the driver sees" if shown is None else f"unset {VISIBLE}"
        yield PRESENT.failed(f"torch would see no GPU{by}", advice, gpus=0)
        return
    names = ", ".join(f"{gpu.name} ({gib(gpu.total_bytes)})" for gpu in gpus)
    found = f"{len(gpus)}: {names}{by}"
    if len(gpus) < wanted:
        yield PRESENT.failed(
            f"{found}, and {wanted} processes are to train", f"torchrun --nproc_per_node={len(gpus)}", gpus=len(gpus)
        )
        return
    yield PRESENT.ok(found, gpus=len(gpus))


def free(situation: Situation) -> Iterator[Finding]:
    gpus = situation.gpus_here()
    for gpu in gpus:
        yield of_gpu(gpu, alone=len(gpus) == 1)


def of_gpu(gpu: GpuState, *, alone: bool = False) -> Finding:
    """`alone`: there is no other GPU to go to."""
    found = f"GPU {gpu.index}: {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free"
    details: dict[str, Any] = {
        "gpu": gpu.index, "free_bytes": gpu.free_bytes, "total_bytes": gpu.total_bytes,
        "processes": [asdict(process) for process in gpu.processes],
    }  # fmt: skip
    known = sum(process.used_bytes or 0 for process in gpu.processes)
    unknown = any(process.used_bytes is None for process in gpu.processes)
    if known < NOTICEABLE and not unknown and gpu.used_bytes <= KEPT_BY_DRIVER:
        return FREE.ok(f"{found}, nobody holds any", **details)
    if not gpu.processes:
        return FREE.warning(
            f"{found}; the driver does not say who holds the rest, as it does inside a container",
            "nvidia-smi on the host names the processes", **details,
        )  # fmt: skip
    holders = "; ".join(_holder(process) for process in gpu.processes[:SHOWN])
    more = f"; and {len(gpu.processes) - SHOWN} more" if len(gpu.processes) > SHOWN else ""
    pids = " ".join(str(process.pid) for process in gpu.processes[:SHOWN] if process.name is not None)
    advice = f"if they are yours and not needed: kill {pids}; " if pids else ""
    elsewhere = "the line `fits` counts on what they leave" if alone else f"another GPU: {VISIBLE}=N"
    return FREE.warning(f"{found}; held by {holders}{more}", advice + elsewhere, **details)


def _holder(process: GpuProcess) -> str:
    size = "an unknown size" if process.used_bytes is None else gib(process.used_bytes)
    name = "of another container, or ended" if process.name is None else _short(process.name)
    return f"process {process.pid} ({name}): {size}"


def _short(command: str) -> str:
    """The program without its folder, and as much of the rest as tells it from others."""
    program, space, rest = command.partition(" ")
    short = f"{program.rpartition('/')[2]}{space}{rest}"
    return short if len(short) <= LONGEST_NAME else f"{short[: LONGEST_NAME - 3]}..."
