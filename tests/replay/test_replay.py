"""A trace in, columns out."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.addresses import rising_addresses
from support.allocators import replay_from

from memfit.errors import InputError
from memfit.events import Action, Trace
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.blocks import BlockRecord, SegmentRecord
from memfit.replay.replay import DEFAULTS, Replays, replay
from memfit.replay.timeline import BEFORE, Ints
from memfit.units import GiB, MiB

EXPANDABLE = AllocatorConfig(expandable_segments=True)


def mib(column: Ints) -> list[int]:
    made: list[int] = (column // MiB).tolist()
    return made


def smallest_capacity(trace: Trace, config: AllocatorConfig = DEFAULTS) -> int:
    return Replays(trace, config).smallest_capacity()


# -- columns ---------------------------------------------------------------------------------------------------


def test_every_event_has_an_entry_in_both_columns() -> None:
    trace = Trace()
    trace.mark("forward", step=1)
    x = trace.alloc(3 * MiB)
    y = trace.alloc(30 * MiB)
    trace.free(x)
    trace.empty_cache()
    trace.free(y)
    timeline = replay(trace)
    assert mib(timeline.allocated) == [0, 3, 33, 30, 30, 0]
    assert mib(timeline.reserved) == [0, 20, 50, 50, 30, 30]


def test_a_block_has_the_size_that_it_took_not_the_one_requested() -> None:
    trace = Trace()
    trace.alloc(1)
    trace.alloc(11 * MiB + MiB // 2)
    assert replay(trace).size.tolist() == [512, 12 * MiB]


def test_nothing_is_placed_for_zero_bytes() -> None:
    trace = Trace()
    empty = trace.alloc(0)
    trace.free(empty)
    timeline = replay(trace)
    assert (timeline.size.tolist(), timeline.peak_reserved) == ([0], 0)


def test_peaks_name_the_first_event_that_reaches_them() -> None:
    trace = Trace()
    a = trace.alloc(30 * MiB)
    b = trace.alloc(40 * MiB)
    trace.free(a)
    trace.free(b)
    trace.alloc(40 * MiB)
    trace.alloc(30 * MiB)
    timeline = replay(trace)
    assert (timeline.peak_allocated, timeline.peak_event) == (70 * MiB, 1)
    assert (timeline.peak_reserved, timeline.reserved_peak_event) == (70 * MiB, 1)


def test_an_empty_trace_has_no_peak_event() -> None:
    timeline = replay(Trace())
    assert (timeline.peak_allocated, timeline.peak_event, timeline.segments) == (0, BEFORE, ())


def test_the_final_segments_are_plain_records() -> None:
    trace = Trace()
    trace.alloc(4 * MiB, stream=3)
    timeline = replay_from((), trace, addresses=rising_addresses(0x1000_0000))
    blocks = (
        BlockRecord(0x1000_0000, 4 * MiB, "active_allocated", 4 * MiB),
        BlockRecord(0x1000_0000 + 4 * MiB, 16 * MiB, "inactive", 0),
    )
    assert timeline.segments == (SegmentRecord(0x1000_0000, 20 * MiB, 3, False, False, blocks),)
    assert timeline.segments[0].allocated == 4 * MiB


def test_settings_reach_the_allocator() -> None:
    trace = Trace()
    trace.alloc(25 * MiB)
    assert replay(trace, EXPANDABLE).peak_reserved == 40 * MiB


def test_what_a_recording_saw_of_the_driver_is_not_obeyed() -> None:
    trace = Trace()
    trace.driver(Action.SEGMENT_ALLOC, address=0x1000, size=999 * MiB)
    trace.driver(Action.OOM, address=0, size=5)
    trace.alloc(4 * MiB)
    assert mib(replay(trace).reserved) == [0, 0, 20]


def test_freeing_what_is_not_allocated_is_refused() -> None:
    trace = Trace()
    block = trace.alloc(512)
    trace.free(block)
    trace.free(block)
    with pytest.raises(InputError, match="frees block 0 while it is not allocated"):
        replay(trace)


# -- other streams ---------------------------------------------------------------------------------------------


def test_a_requested_free_lowers_allocated_and_leaves_the_block_unusable_until_it_is_completed() -> None:
    trace = Trace()
    block = trace.alloc(30 * MiB)
    trace.free_requested(block)
    other = trace.alloc(30 * MiB)
    trace.free(other)
    trace.free_completed(block)
    timeline = replay(trace)
    assert mib(timeline.allocated) == [30, 0, 30, 0, 0]
    assert mib(timeline.reserved) == [30, 30, 60, 60, 60]


def test_a_completion_that_comes_after_a_wait_for_all_streams_is_history() -> None:
    trace = Trace()
    block = trace.alloc(30 * MiB)
    trace.free_requested(block)
    again = trace.alloc(30 * MiB)  # does not fit beside the pending one: the allocator waits and takes its place
    trace.free_requested(again)
    trace.free_completed(block)
    trace.alloc(10 * MiB)
    timeline = replay(trace, capacity=45 * MiB)
    assert mib(timeline.reserved) == [30, 30, 30, 30, 30, 40]
    assert timeline.stats.active == 40 * MiB


# -- what was there before -------------------------------------------------------------------------------------


def row_without_alloc(trace: Trace, nbytes: int, *, address: int = 0) -> int:
    block = trace.alloc(nbytes, address=address)
    trace.actions.pop()
    trace.subjects.pop()
    return block


def test_a_block_without_an_alloc_event_is_there_from_the_start() -> None:
    trace = Trace(origin="measured")
    block = row_without_alloc(trace, 30 * MiB)
    trace.mark("forward")
    trace.free(block)
    timeline = replay(trace)
    assert mib(timeline.allocated) == [30, 0]
    assert (timeline.peak_allocated, timeline.peak_event) == (30 * MiB, BEFORE)
    assert (timeline.peak_reserved, timeline.reserved_peak_event) == (30 * MiB, BEFORE)


def test_it_is_where_the_given_layout_has_it() -> None:
    blocks = (
        BlockRecord(0x1000_0000, 4 * MiB, "inactive", 0),
        BlockRecord(0x1000_0000 + 4 * MiB, 16 * MiB, "active_allocated", 16 * MiB - 100),
    )
    start = [SegmentRecord(0x1000_0000, 20 * MiB, 0, False, False, blocks)]
    trace = Trace(origin="measured")
    block = row_without_alloc(trace, 16 * MiB - 100, address=0x1000_0000 + 4 * MiB)
    trace.free(block)
    trace.alloc(20 * MiB)
    timeline = replay_from(start, trace)
    assert mib(timeline.allocated) == [0, 20]
    assert (timeline.peak_reserved, timeline.size[0]) == (20 * MiB, 16 * MiB)


def test_a_free_that_was_pending_at_the_start_can_be_completed() -> None:
    blocks = (BlockRecord(0x1000_0000, 20 * MiB, "active_pending_free", 20 * MiB),)
    start = [SegmentRecord(0x1000_0000, 20 * MiB, 0, False, False, blocks)]
    trace = Trace(origin="measured")
    block = row_without_alloc(trace, 20 * MiB, address=0x1000_0000)
    trace.free_completed(block)
    trace.alloc(20 * MiB)
    assert mib(replay_from(start, trace).reserved) == [20, 20]


def test_memory_can_run_out_before_the_first_event() -> None:
    trace = Trace(origin="measured")
    row_without_alloc(trace, 30 * MiB)
    trace.mark("forward")
    oom = replay(trace, capacity=20 * MiB).oom
    assert oom is not None
    assert (oom.event, oom.block) == (BEFORE, 0)


# -- out of memory ---------------------------------------------------------------------------------------------


def test_out_of_memory_stops_the_replay_and_says_where() -> None:
    trace = Trace()
    trace.alloc(30 * MiB)
    trace.mark("backward")
    failing = trace.alloc(14 * MiB + 5)
    trace.free(0)
    timeline = replay(trace, capacity=40 * MiB)
    oom = timeline.oom
    assert oom is not None
    assert (oom.event, oom.block, oom.requested) == (2, failing, 14 * MiB + 5)
    assert (oom.rounded, oom.alloc_size) == (14 * MiB + 512, 16 * MiB)
    assert (oom.allocated, oom.reserved) == (30 * MiB, 30 * MiB)
    assert mib(timeline.allocated) == [30, 30, 30, 30]
    assert timeline.size.tolist() == [30 * MiB, 0]


def test_a_job_that_fits_only_by_releasing_its_cache_counts_retries() -> None:
    trace = Trace()
    trace.free(trace.alloc(30 * MiB))
    trace.alloc(40 * MiB)
    timeline = replay(trace, capacity=60 * MiB)
    assert (timeline.oom, timeline.retries, timeline.peak_reserved) == (None, 1, 40 * MiB)


# -- the smallest capacity -------------------------------------------------------------------------------------


def test_the_smallest_capacity_can_be_below_the_peak_that_ample_memory_shows() -> None:
    trace = Trace()
    trace.free(trace.alloc(30 * MiB))
    trace.alloc(40 * MiB)
    assert replay(trace).peak_reserved == 70 * MiB
    assert smallest_capacity(trace) == 40 * MiB


def test_the_smallest_capacity_is_above_the_sum_of_sizes_where_memory_is_fragmented() -> None:
    trace = Trace()
    blocks = [trace.alloc(9 * MiB) for _ in range(4)]
    trace.free(blocks[0])
    trace.free(blocks[2])
    trace.alloc(12 * MiB)  # two holes of 11 MiB
    assert smallest_capacity(trace) == 52 * MiB


def test_nothing_needs_no_capacity() -> None:
    assert smallest_capacity(Trace()) == 0


row = st.tuples(st.integers(0, 48 * MiB), st.integers(0, 30), st.sampled_from([0, 0, 1]))
jobs = st.sampled_from([0, 8, 30]).flatmap(lambda least: st.lists(row, min_size=least, max_size=40))
configs = st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:24", "roundup_power2_divisions:4"])


def job(rows: list[tuple[int, int, int]]) -> Trace:
    """Each row allocates, and frees the block of that number if it is still there."""
    trace = Trace()
    live: list[int] = []
    for nbytes, victim, stream in rows:
        live.append(trace.alloc(nbytes, stream=stream))
        if victim < len(live):
            trace.free(live.pop(victim))
    return trace


@given(jobs, configs)
@settings(max_examples=60, deadline=None)
def test_the_smallest_capacity_suffices_and_2_mib_less_does_not(rows: list[tuple[int, int, int]], conf: str) -> None:
    trace, config = job(rows), AllocatorConfig.parse(conf)
    capacity = smallest_capacity(trace, config)
    assert capacity % (2 * MiB) == 0
    assert replay(trace, config, capacity=capacity).oom is None
    if capacity:
        assert replay(trace, config, capacity=capacity - 2 * MiB).oom is not None


@given(jobs, configs, st.integers(0, 80))
@settings(max_examples=60, deadline=None)
def test_a_prefix_is_the_same_job_so_far(rows: list[tuple[int, int, int]], conf: str, cut: int) -> None:
    trace, config = job(rows), AllocatorConfig.parse(conf)
    whole = replay(trace, config)
    cut = min(cut, len(trace))
    born = sum(action == Action.ALLOC for action in trace.actions[:cut])
    prefix = Trace()
    for action, subject in list(trace.events())[:cut]:
        if action == Action.ALLOC:
            prefix.alloc(trace.requested[subject], stream=trace.streams[subject])
        else:
            prefix.free(subject)
    part = replay(prefix, config)
    assert part.allocated.tolist() == whole.allocated[:cut].tolist()
    assert part.reserved.tolist() == whole.reserved[:cut].tolist()
    assert part.size.tolist() == whole.size[:born].tolist()
    assert part.peak_allocated <= whole.peak_allocated
    assert part.peak_reserved <= whole.peak_reserved


@given(jobs, configs, st.none() | st.integers(20, 200))
@settings(max_examples=60, deadline=None)
def test_allocated_never_passes_reserved_nor_reserved_capacity(
    rows: list[tuple[int, int, int]], conf: str, capacity: int | None
) -> None:
    bytes_there = None if capacity is None else capacity * MiB
    timeline = replay(job(rows), AllocatorConfig.parse(conf), capacity=bytes_there)
    assert all(a <= r for a, r in zip(timeline.allocated, timeline.reserved, strict=True))
    assert bytes_there is None or max(timeline.reserved, default=0) <= bytes_there


# -- many replays of one trace ---------------------------------------------------------------------------------


@given(jobs, configs, st.lists(st.integers(0, 1200), min_size=1, max_size=6), st.booleans())
@settings(max_examples=100, deadline=None)
def test_an_outcome_is_that_of_a_replay_of_its_own_whatever_was_played_before(
    rows: list[tuple[int, int, int]], conf: str, capacities: list[int], searches: bool
) -> None:
    trace, config = job(rows), AllocatorConfig.parse(conf)
    replays = Replays(trace, config)
    if searches:
        replays.smallest_capacity()
    for capacity in (each * MiB for each in capacities):
        alone = replay(trace, config, capacity=capacity)
        if alone.peak_reserved < replays.ample.peak_reserved or not config.expandable_segments:
            outcome = replays.outcome(capacity)
            assert (outcome.oom, outcome.reserved_peak, outcome.retries) == (
                alone.oom, alone.peak_reserved, alone.retries,
            )  # fmt: skip


def test_with_room_for_all_that_is_asked_for_nothing_is_played_again() -> None:
    trace = Trace()
    trace.free(trace.alloc(30 * MiB))
    replays = Replays(trace)
    assert replays.ample.peak_reserved == 30 * MiB
    assert replays.outcome(30 * MiB) is replays.outcome(999 * MiB)


def test_a_trace_that_allocates_a_block_twice_is_refused() -> None:
    trace = Trace()
    block = trace.alloc(512)
    trace.actions.append(Action.ALLOC)
    trace.subjects.append(block)
    with pytest.raises(InputError, match="allocates block 0 twice"):
        replay(trace)


def test_more_than_can_be_counted_is_refused() -> None:
    trace = Trace()
    for _ in range(3):
        trace.alloc(1 << 59)
    with pytest.raises(InputError, match="more than 2\\^60 bytes at once"):
        replay(trace)


def test_much_in_all_is_no_matter_if_it_is_not_there_at_once() -> None:
    trace = Trace()
    for _ in range(20):
        trace.free(trace.alloc(1 << 59))
    assert replay(trace).peak_allocated == 1 << 59


# -- speed -----------------------------------------------------------------------------------------------------


def training_like(events: int) -> Trace:
    """Layers forward, keeping most blocks, then backward, freeing them: the shape of a training step."""
    rng, trace = random.Random(0), Trace()
    shapes = [rng.choice([2048, 6144, 400_000, MiB, 3 * MiB, 12 * MiB, 33 * MiB]) for _ in range(400)]
    while len(trace) < events:
        kept = []
        for size in shapes:
            kept.append(trace.alloc(size))
            trace.free(trace.alloc(size // 2 + 100))
        for block in reversed(kept):
            gradient = trace.alloc(trace.requested[block])
            trace.free(block)
            trace.free(gradient)
    return trace


def test_150_000_events_take_well_under_two_seconds() -> None:
    trace = training_like(150_000)
    begin = time.process_time()  # of this process: a machine that is busy with others is not slower code
    timeline = replay(trace)
    assert time.process_time() - begin < 2
    assert len(timeline.reserved) == len(trace) >= 150_000
    assert timeline.peak_allocated < timeline.peak_reserved < 8 * GiB
