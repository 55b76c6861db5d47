"""The device that a benchmark runs on: waiting for it, what it held, a limit on it. On the CPU little is to be done."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from memfit.units import GiB, MiB


def left_behind(name: str, device: torch.device) -> None:
    """What a run should have let go of, said if there is any; then Python's collector is asked to help."""
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if held > 256 * MiB:
        print(f"{name}: {held / GiB:.3f} GiB still allocated after the run", flush=True)
        found = [t for t in gc.get_objects() if isinstance(t, Tensor) and t.is_cuda]
        for tensor in sorted(found, key=lambda t: -t.untyped_storage().nbytes())[:6]:
            who = [f"{type(r).__name__}{list(r)[:5] if isinstance(r, dict) else ''}" for r in gc.get_referrers(tensor)]
            print(f"    {tuple(tensor.shape)} {tensor.untyped_storage().nbytes() >> 20} MiB <- {who[:6]}", flush=True)
    gc.collect()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


@contextmanager
def capped(cap: int | None, device: torch.device) -> Iterator[None]:
    if cap is None or device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(device).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def profiled(wanted: bool, device: torch.device) -> Iterator[None]:
    if not wanted:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA] if device.type == "cuda" else [ProfilerActivity.CPU]
    with profile(activities=activities) as made:
        yield
    sort = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(made.key_averages().table(sort_by=sort, row_limit=32, max_name_column_width=90))
