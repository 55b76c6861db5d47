"""A recording taken at its word gives what the allocator did, to the byte and after every event."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import CONFIGS, DATA, MiB, as_measured, random_trace, training
from support.quick import examples

from memfit.analysis.export import viewer_snapshot
from memfit.analysis.observed import observe
from memfit.analysis.run import runs_of_snapshot
from memfit.analysis.summary import idle_at
from memfit.events import Trace
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.replay import replay
from memfit.replay.timeline import Timeline
from memfit.snapshots.read import Snapshot, read_snapshot, snapshot_of
from memfit.units import GiB


def timeline_of(snapshot: Snapshot) -> Timeline:
    return observe(snapshot, 0, AllocatorConfig.from_snapshot(snapshot.settings))


def closes(timeline: Timeline, event: int) -> bool:
    """Live, waiting and free bytes, the free ones counted hole by hole, make up what is reserved."""
    idle = idle_at(timeline, event)
    assert idle is not None and timeline.address is not None
    held = timeline.lives.held_at(event)
    order = np.argsort(timeline.address[held])
    starts, sizes = timeline.address[held][order].astype(np.int64), timeline.size[held][order]
    assert (starts[1:] >= starts[:-1] + sizes[:-1]).all(), "two blocks overlap"
    ranges = list(timeline.ranges_at(event))
    inside = sum(int(sizes[(starts >= start) & (starts + sizes <= end)].sum()) for start, end, _ in ranges)
    assert inside == sizes.sum(), "a block lies outside the memory that is held"
    return idle.allocated_bytes + idle.waiting_bytes + idle.idle_bytes == idle.reserved_bytes and idle.idle_bytes >= 0


# -- real recordings -----------------------------------------------------------------------------------------------


def test_the_peak_of_a_real_training_step_is_what_torch_counted() -> None:
    timeline = timeline_of(read_snapshot(DATA / "snap-train.pickle"))

    assert timeline.peak_allocated == 2_569_738_240  # max_memory_allocated of that step
    assert timeline.reserved is not None
    assert int(timeline.reserved.max()) == 3_001_024_512
    assert timeline.doubts == 0


@pytest.mark.parametrize("name", ["snap-train", "snap-oom"])
def test_a_real_recording_closes_at_every_event(name: str) -> None:
    timeline = timeline_of(read_snapshot(DATA / f"{name}.pickle"))

    assert all(closes(timeline, event) for event in range(-1, len(timeline.trace), 1 if name == "snap-oom" else 7))


@pytest.mark.parametrize("name", ["snap-train", "snap-oom"])
def test_what_a_real_recording_ends_with_is_the_snapshots_final_state(name: str) -> None:
    snapshot = read_snapshot(DATA / f"{name}.pickle")
    timeline = timeline_of(snapshot)

    alive = timeline.lives.alive_at(len(timeline.trace) - 1)
    ours = {(int(timeline.address[block]), int(timeline.size[block])) for block in alive}
    blocks = [block for segment in snapshot.segments for block in segment.blocks]
    assert ours == {(block.address, block.size) for block in blocks if block.state == "active_allocated"}
    assert timeline.reserved is not None
    assert timeline.reserved[-1] == sum(segment.total_size for segment in snapshot.segments)


# -- made ones, against the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("alloc_conf", CONFIGS)
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_a_whole_recording_gives_the_models_own_figures(alloc_conf: str, seed: int) -> None:
    trace = random_trace(seed)
    config = AllocatorConfig.parse(alloc_conf)

    timeline = timeline_of(as_measured(trace, alloc_conf))

    model = replay(trace, config)
    assert timeline.doubts == 0
    assert timeline.size.tolist() == model.size.tolist()
    assert timeline.reserved is not None
    assert int(timeline.reserved.max()) == model.peak_reserved
    assert int(timeline.allocated.max()) == model.peak_allocated
    assert all(closes(timeline, event) for event in range(-1, len(timeline.trace), 5))


@pytest.mark.parametrize("alloc_conf", CONFIGS)
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 1 << 30), begin=st.integers(1, 399))
def test_a_recording_that_began_late_closes_too(alloc_conf: str, seed: int, begin: int) -> None:
    timeline = timeline_of(as_measured(random_trace(seed), alloc_conf, begin=begin))

    assert timeline.doubts == 0
    assert timeline.reserved is not None
    assert all(closes(timeline, event) for event in range(-1, len(timeline.trace), 7))


@pytest.mark.parametrize("alloc_conf", CONFIGS)
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 1 << 30), dropped=st.integers(1, 500))
def test_a_ring_buffer_that_dropped_its_oldest_entries_anywhere_closes_too(
    alloc_conf: str, seed: int, dropped: int
) -> None:
    """Even between the two halves of a free, or between a segment and the block it was made for."""
    (run,) = runs_of_snapshot(as_measured(random_trace(seed), alloc_conf))
    raw = viewer_snapshot(run)
    raw["device_traces"][0] = raw["device_traces"][0][dropped:]

    timeline = timeline_of(snapshot_of(raw))

    assert timeline.doubts == 0
    assert timeline.reserved is not None
    assert timeline.reserved[-1:].tolist() in ([], [sum(segment["total_size"] for segment in raw["segments"])])
    assert all(closes(timeline, event) for event in range(-1, len(timeline.trace), 7))


@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_a_replay_that_notes_places_gives_what_any_other_gives(seed: int) -> None:
    trace = random_trace(seed)

    noted, plain = replay(trace, places=True), replay(trace)

    assert noted.allocated.tolist() == plain.allocated.tolist()
    assert noted.reserved.tolist() == plain.reserved.tolist()
    assert noted.size.tolist() == plain.size.tolist()
    assert noted.segments == plain.segments
    assert noted.ranges_at(len(trace) - 1).total == plain.reserved[-1]


# -- contradictions --------------------------------------------------------------------------------------------------


def test_a_block_where_no_memory_is_held_counts_with_its_rounded_request() -> None:
    raw = {"segments": [], "device_traces": [[{"action": "alloc", "addr": 512, "size": 1000, "stream": 0}]]}

    timeline = timeline_of(snapshot_of(raw))

    assert (timeline.size.tolist(), timeline.doubts, timeline.reserved) == ([1024], 1, None)


def test_a_segment_that_goes_while_a_block_lives_in_it_is_a_doubt() -> None:
    raw = training(10, layers=1, depth=1).snapshot()
    first = next(event for event in raw["device_traces"][0] if event["action"] == "segment_alloc")
    raw["device_traces"][0].append({**first, "action": "segment_free"})

    assert timeline_of(snapshot_of(raw)).doubts > 0


def test_the_tail_of_a_block_that_was_there_before_and_freed_later_is_found() -> None:
    """A block of 11.5 MiB in a segment of 12: the half MiB behind it was too little to split off."""
    trace = Trace()
    old = trace.alloc(23 * MiB // 2)
    trace.alloc(30 * MiB)
    trace.free(old)

    timeline = timeline_of(as_measured(trace, begin=1))

    assert timeline.allocated_before == 12 * MiB
    assert timeline.allocated.tolist()[-1] == 30 * MiB


def test_the_real_error_is_where_5_76_gib_were_allocated() -> None:
    timeline = timeline_of(read_snapshot(DATA / "snap-oom.pickle"))

    assert f"{timeline.peak_allocated / GiB:.2f}" == "5.76"
