"""The quick way to pair allocations and frees says what reading event by event says."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import as_measured, random_trace

from memfit.analysis.export import viewer_snapshot
from memfit.analysis.run import runs_of_snapshot
from memfit.snapshots import schema as snapshot_schema
from memfit.snapshots.file import ALLOC, COMPLETED, REQUESTED, pair_events
from memfit.snapshots.read import Snapshot, snapshot_of


def both_ways(raw: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Snapshot, Snapshot]:
    quick = snapshot_of(copy.deepcopy(raw))
    with monkeypatch.context() as patch:
        patch.setattr(snapshot_schema, "pair_events", lambda codes, addresses: None)
        return quick, snapshot_of(copy.deepcopy(raw))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 30), begin=st.integers(0, 200))
def test_a_well_kept_history_reads_the_same_both_ways(seed: int, begin: int) -> None:
    (run,) = runs_of_snapshot(as_measured(random_trace(seed, 300), begin=begin))
    raw = viewer_snapshot(run)

    with pytest.MonkeyPatch.context() as monkeypatch:
        quick, slow = both_ways(raw, monkeypatch)

    assert quick == slow


ACTIONS = ["alloc", "free_requested", "free_completed", "segment_alloc", "snapshot", "teleport", "oom"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3)), max_size=14))
def test_any_order_of_events_reads_the_same_both_ways(order: list[tuple[str, int]]) -> None:
    events = [
        {"action": action, "addr": 512 * place, "size": 100 * i, "stream": 0, "time_us": i}
        for i, (action, place) in enumerate(order)
    ]

    with pytest.MonkeyPatch.context() as monkeypatch:
        quick, slow = both_ways({"segments": [], "device_traces": [events]}, monkeypatch)

    assert quick == slow


def test_a_history_that_breaks_the_pattern_is_not_paired() -> None:
    def found(*codes: int) -> bool:
        return pair_events(np.array(codes, dtype=np.uint8), np.zeros(len(codes), dtype=np.uint64)) is not None

    assert found(ALLOC, REQUESTED, COMPLETED, ALLOC)
    assert found(REQUESTED, COMPLETED, ALLOC)  # it was there before
    assert not found(ALLOC, ALLOC)
    assert not found(ALLOC, COMPLETED)
    assert not found(COMPLETED)
    assert not found(REQUESTED, REQUESTED)
