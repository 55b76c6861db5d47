"""Growth, told at the first sample that it can be, from what is left of the run, and against the right peak."""

from __future__ import annotations

from typing import Any

import pytest
from test_growth import GIB, MIB, verdict

from memfit.recording.growth import GrowthWatch


def test_22_samples_are_too_few_and_23_are_enough_for_the_first_three_do_not_count() -> None:
    def floor(step: int) -> int:
        return 4 * GIB + step * 10 * MIB

    assert "22 steps are too few" in verdict(steps=22, allocated_bytes=floor).text
    assert verdict(steps=23, allocated_bytes=floor).kind == "leak"


def test_what_the_first_three_steps_take_is_no_growth() -> None:
    """They make the optimizer's state; over the rest of a short run nothing rises."""
    found = verdict(steps=23, allocated_bytes=lambda step: min(step, 3) * 4 * GIB)
    assert found.kind == "none"


def test_peaks_that_alternate_are_no_fragmentation() -> None:
    """After the second step nothing is reserved beyond the highest peak so far, however low this step's own is."""
    found = verdict(
        peak_bytes=lambda step: (14 if step == 4 else 8) * GIB - step * 30 * MIB,
        reserved_bytes=lambda step: 15 * GIB,
    )  # fmt: skip
    assert found.kind == "none"


def test_a_leak_runs_out_where_the_room_above_the_highest_peak_ends() -> None:
    found = verdict(allocated_bytes=lambda step: 4 * GIB + step * 16 * MIB)
    assert found.runs_out_at_step == 60 + (24 * GIB - 8 * GIB) // (16 * MIB)


def test_a_leak_is_told_before_growth_of_the_host() -> None:
    found = verdict(
        allocated_bytes=lambda step: 4 * GIB + step * 16 * MIB, host_bytes=lambda step: 2 * GIB + step * 64 * MIB
    )
    assert found.kind == "leak"


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """torch's own counters of a GPU that is not here."""
    import torch

    now = {"allocated": GIB, "peak": 2 * GIB, "reserved": 3 * GIB}

    def stats(_: object) -> dict[str, Any]:
        reserved = {"all": {"current": now["reserved"], "peak": now["reserved"]}}
        return {
            "allocated_bytes": {"all": {"current": now["allocated"], "peak": now["peak"]}},
            "reserved_bytes": reserved, "num_alloc_retries": 0,
        }  # fmt: skip

    class Card:
        total_memory = 24 * GIB

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Card)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return now


def test_a_peak_that_someone_else_read_counts_for_the_next_sample_and_no_further(counters: dict[str, int]) -> None:
    watch = GrowthWatch(gpu=True)
    watch.counter_was_read(5 * GIB, 6 * GIB)
    first = watch.sample(1)
    second = watch.sample(2)
    assert (first.peak_bytes, second.peak_bytes) == (5 * GIB, 2 * GIB)
    assert (watch.peak_bytes, watch.reserved_bytes, watch.capacity_bytes) == (5 * GIB, 6 * GIB, 24 * GIB)
