"""Four kinds of growth, told apart by what rises and what does not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from memfit.recording.growth import GrowthWatch, MemoryGrowth, StepReading, growth_of

MIB, GIB = 1 << 20, 1 << 30
HOST = 64 * GIB


def verdict(steps: int = 60, **of: Callable[[int], int]) -> MemoryGrowth:
    """Of a job with a floor of 4 GiB, a peak of 8 and 9 reserved, but for what is given by step."""
    usual: dict[str, Callable[[int], int]] = {
        "allocated_bytes": lambda _: 4 * GIB, "peak_bytes": lambda _: 8 * GIB, "reserved_bytes": lambda _: 9 * GIB,
        "host_bytes": lambda _: 2 * GIB, "longest": lambda _: 1024,
    }  # fmt: skip
    made = [StepReading(step=n, **{name: get(n) for name, get in (usual | of).items()}) for n in range(1, steps + 1)]
    return growth_of(made, capacity_bytes=24 * GIB, host_bytes=HOST)


def test_a_floor_that_rises_is_a_leak_and_its_end_is_known() -> None:
    found = verdict(allocated_bytes=lambda n: 4 * GIB + n * 10 * MIB, peak_bytes=lambda n: 8 * GIB + n * 10 * MIB)
    assert (found.kind, found.bytes_per_step) == ("leak", 10 * MIB)
    assert found.runs_out_at_step == 60 + (16 * GIB - 600 * MIB) // (10 * MIB)
    assert "rises by 10.00 MiB a step and runs out at about step 1,638" in found.text


def test_a_peak_that_follows_the_length_is_long_batches_and_no_leak() -> None:
    lengths = [random.Random(n).randint(100, 2000) for n in range(100)]
    highest = [max(lengths[: n + 1]) for n in range(100)]
    found = verdict(
        longest=lambda n: lengths[n], peak_bytes=lambda n: 5 * GIB + lengths[n] * MIB,
        reserved_bytes=lambda n: 6 * GIB + highest[n] * MIB,
    )  # fmt: skip
    assert found.kind == "long-batches"
    assert found.runs_out_at_step is None


def test_batches_that_grow_longer_and_longer_are_no_fragmentation() -> None:
    found = verdict(
        longest=lambda n: 100 * n, peak_bytes=lambda n: 5 * GIB + 100 * n * MIB,
        reserved_bytes=lambda n: 6 * GIB + 100 * n * MIB,
    )  # fmt: skip
    assert found.kind == "long-batches"


def test_what_is_reserved_beyond_the_peak_is_fragmentation() -> None:
    found = verdict(reserved_bytes=lambda n: 9 * GIB + n * 20 * MIB)
    assert (found.kind, found.bytes_per_step) == ("fragmentation", 20 * MIB)
    assert "expandable_segments" in found.text


def test_a_process_that_grows_on_the_host_is_neither() -> None:
    found = verdict(host_bytes=lambda n: 2 * GIB + n * 8 * MIB)
    assert (found.kind, found.bytes_per_step) == ("host-growth", 8 * MIB)
    assert found.runs_out_at_step == 60 + (62 * GIB - 480 * MIB) // (8 * MIB)


def test_a_steady_job_with_noise_grows_not() -> None:
    chance = random.Random(0)
    found = verdict(host_bytes=lambda _: 2 * GIB + chance.randint(0, 300 * MIB))
    assert found.kind == "none"


def test_a_cache_that_fills_up_and_stays_is_no_leak() -> None:
    assert verdict(allocated_bytes=lambda n: 4 * GIB + min(n, 25) * 10 * MIB).kind == "none"


def test_a_single_odd_step_moves_nothing() -> None:
    found = verdict(allocated_bytes=lambda n: (4 * GIB) + (n == 40) * GIB)
    assert found.kind == "none"


def test_a_few_steps_tell_nothing() -> None:
    assert "too few" in verdict(steps=10, allocated_bytes=lambda n: n * GIB).text


def test_without_a_gpu_only_the_host_is_watched() -> None:
    watch = GrowthWatch(gpu=False)
    sample = watch.sample(1, tokens=8, longest=8)
    assert sample.allocated_bytes is None
    assert sample.host_bytes > 0
    assert (watch.peak_bytes, watch.verdict().kind) == (None, "none")


def test_a_list_of_tensors_that_grows_is_seen_on_the_host() -> None:
    import torch

    watch, kept = GrowthWatch(gpu=False), []
    for step in range(40):
        kept.append(torch.ones(1 << 20))  # 4 MiB
        watch.sample(step)
    found = watch.verdict()
    assert found.kind == "host-growth"
    assert found.bytes_per_step == pytest.approx(4 * MIB, rel=0.2)
