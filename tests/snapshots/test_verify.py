"""Recordings made by the model itself, with a fault put in: `verify` must find each, and `rewind` the start."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.addresses import rising_addresses
from support.allocators import holding
from support.quick import examples
from support.verify import rewind, verify

from memfit.errors import InputError
from memfit.events import Action, Trace
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.allocator import OutOfMemory
from memfit.replay.blocks import Block, BlockRecord, SegmentRecord
from memfit.replay.driver import Driver
from memfit.units import GiB, MiB

BASE = 0x1000_0000


class Recorder(Driver):
    """Runs calls through an allocator and writes the trace that a recording of them would be."""

    def __init__(
        self,
        conf: str = "",
        *,
        capacity: int | None = None,
        start: Sequence[SegmentRecord] = (),
    ) -> None:
        super().__init__(capacity)
        self.trace = Trace(origin="measured")
        self.config = AllocatorConfig.parse(conf)
        self.allocator = holding(start, self.config, self)
        self.rows: dict[Block, int] = {}
        self.held: list[Block] = []
        self._calls: list[tuple[Action, int, int, int]] = []
        for block in self.allocator.blocks():
            if block.requested:
                self._hold(block)
                self.trace.actions.pop()
                self.trace.subjects.pop()

    def gave(self, action: Action, address: int, size: int, stream: int) -> None:
        super().gave(action, address, size, stream)
        self._calls.append((action, address, size, stream))

    def took_back(self, action: Action, address: int, size: int, stream: int) -> None:
        super().took_back(action, address, size, stream)
        self._calls.append((action, address, size, stream))

    def malloc(self, requested: int, stream: int = 0) -> Block | None:
        pending = list(self.allocator.pending)
        try:
            block = self.allocator.malloc(requested, stream)
        except OutOfMemory as error:
            self._write_calls(pending)
            self.trace.driver(Action.OOM, address=0, size=error.rounded, stream=stream)
            return None
        assert block is not None
        self._write_calls(pending)
        self._hold(block)
        return block

    def free(self, block: Block) -> None:
        self.held.remove(block)
        self.trace.free(self.rows.pop(block))
        self.allocator.free(block)

    def request_free(self, block: Block) -> None:
        self.held.remove(block)
        self.trace.free_requested(self.rows[block])
        self.allocator.request_free(block)

    def complete_free(self, block: Block) -> None:
        self.trace.free_completed(self.rows.pop(block))
        self.allocator.complete_free(block)

    def empty_cache(self) -> None:
        pending = list(self.allocator.pending)
        self.allocator.empty_cache()
        self._write_calls(pending)

    def end(self) -> tuple[SegmentRecord, ...]:
        return self.allocator.layout()

    def _hold(self, block: Block) -> None:
        row = self.trace.alloc(block.requested, stream=block.segment.shelf.stream, address=block.address)
        self.rows[block] = row
        self.held.append(block)

    def _write_calls(self, were_pending: list[Block]) -> None:
        for block in were_pending:
            if block not in self.allocator.pending:
                self.trace.free_completed(self.rows.pop(block))
        for action, address, size, stream in self._calls:
            self.trace.driver(action, address=address, size=size, stream=stream)
        self._calls.clear()


def segment(size: int, *blocks: tuple[int, str, int], address: int = BASE, small: bool = False) -> SegmentRecord:
    records, at = [], address
    for block, state, requested in blocks:
        records.append(BlockRecord(at, block, state, requested))
        at += block
    return SegmentRecord(address, size, 0, small, False, tuple(records))


def on_a_device_of(gib: int, stream: int = 0) -> Recorder:
    """Expandable segments of both pools and two streams, each reserved just above the one before."""
    run = Recorder("expandable_segments:True")
    run.next_address = rising_addresses()
    run.allocator.expandable.device_total = gib * GiB
    for size in (1000, 30 * MiB, 12 * MiB):
        for each in (0, stream):
            run.malloc(size, each)
    return run


# -- verify finds what is wrong --------------------------------------------------------------------------------


def test_a_recording_of_the_model_agrees_with_the_model() -> None:
    run = Recorder()
    first = run.malloc(4 * MiB)
    run.malloc(30 * MiB)
    assert first is not None
    run.free(first)
    run.malloc(3 * MiB)
    assert verify(run.trace, end=run.end()) == []


@pytest.mark.parametrize("stream", [0, 7])
def test_a_recording_on_a_small_device_agrees_though_its_reservations_lie_closer_together(stream: int) -> None:
    run = on_a_device_of(16, stream)
    assert verify(run.trace, run.config, end=run.end()) == []


def test_so_does_one_that_began_when_they_were_there_already() -> None:
    run = on_a_device_of(16)
    late = Recorder("expandable_segments:True", start=run.end())
    late.next_address = run.next_address
    late.malloc(100 * MiB)
    late.malloc(1000)
    late.empty_cache()
    start = rewind(late.trace, late.end(), late.config)
    assert verify(late.trace, late.config, start=start, end=late.end()) == []


def test_addresses_that_no_gpu_has_are_refused() -> None:
    trace = Trace(origin="measured")
    trace.driver(Action.SEGMENT_ALLOC, address=(1 << 64) - 512, size=2 * MiB)
    with pytest.raises(InputError, match="names an address beyond"):
        verify(trace)
    with pytest.raises(InputError, match="a segment lies beyond"):
        verify(Trace(), start=[segment(2 * MiB, (2 * MiB, "inactive", 0), address=1 << 63)])


def test_a_block_at_another_place_is_reported_with_the_free_blocks_nearby() -> None:
    run = Recorder()
    run.malloc(4 * MiB)
    run.malloc(5 * MiB)
    run.trace.addresses[1] += 512
    [mismatch] = verify(run.trace)
    assert (mismatch.event, mismatch.what) == (2, f"the place of {5 * MiB} bytes")
    assert [block.size for block in mismatch.nearby] == [11 * MiB]
    assert "recorded 0x" in str(mismatch) and f"free nearby: {11 * MiB} at 0x" in str(mismatch)


def test_a_segment_of_another_size_is_reported() -> None:
    run = Recorder()
    run.malloc(4 * MiB)
    run.trace.range_sizes[0] = 22 * MiB
    [mismatch] = verify(run.trace)
    assert (mismatch.event, mismatch.what) == (1, "driver calls")
    assert str(22 * MiB) in mismatch.recorded and str(20 * MiB) in mismatch.modelled


def test_a_segment_that_the_model_does_not_want_is_reported() -> None:
    trace = Trace(origin="measured")
    for _ in range(2):
        trace.driver(Action.SEGMENT_ALLOC, address=BASE, size=20 * MiB)
        trace.alloc(4 * MiB, address=BASE)
    [mismatch] = verify(trace)
    assert (mismatch.event, mismatch.modelled) == (3, "0 calls")


def test_a_segment_that_the_recording_does_not_show_is_reported() -> None:
    trace = Trace(origin="measured")
    trace.alloc(4 * MiB, address=BASE)
    [mismatch] = verify(trace)
    assert (mismatch.event, mismatch.recorded) == (0, "0 calls")


def test_the_first_difference_ends_the_comparison() -> None:
    run = Recorder()
    for _ in range(4):
        run.malloc(4 * MiB)
    for row in range(1, 4):
        run.trace.addresses[row] += 512
    assert len(verify(run.trace)) == 1


def test_a_different_final_layout_is_reported_for_each_segment() -> None:
    run = Recorder()
    run.malloc(4 * MiB)
    run.malloc(30 * MiB)
    wrong = tuple(SegmentRecord(s.address, s.size, 7, s.small, s.expandable, s.blocks) for s in run.end())
    assert [m.event for m in verify(run.trace, end=wrong)] == [4, 4]
    assert verify(run.trace, end=run.end()[:1])[0].recorded == "nothing"


def test_empty_cache_shows_as_a_burst_of_all_free_segments() -> None:
    run = Recorder()
    for block in [run.malloc(30 * MiB), run.malloc(40 * MiB), run.malloc(512)]:
        assert block is not None
        run.free(block)
    run.empty_cache()
    assert verify(run.trace, end=()) == []
    run.malloc(30 * MiB)
    assert verify(run.trace, end=run.end()) == []


def test_a_burst_that_leaves_a_free_segment_out_is_reported() -> None:
    run = Recorder()
    for block in [run.malloc(30 * MiB), run.malloc(40 * MiB)]:
        assert block is not None
        run.free(block)
    run.empty_cache()
    run.trace.actions.pop()
    run.trace.subjects.pop()
    [mismatch] = verify(run.trace)
    assert (mismatch.what, mismatch.event) == ("released by empty_cache", 7)


def test_an_empty_cache_before_a_request_that_the_cache_could_have_served_is_recognised() -> None:
    run = Recorder()
    kept, gone = run.malloc(4 * MiB), run.malloc(20 * MiB)
    assert kept is not None and gone is not None
    run.free(gone)
    run.empty_cache()
    run.malloc(20 * MiB)
    assert verify(run.trace, end=run.end()) == []


def test_an_explicit_empty_cache_event_is_obeyed_even_if_it_released_nothing() -> None:
    run = Recorder()
    run.malloc(4 * MiB)
    run.trace.empty_cache()
    run.malloc(4 * MiB)
    assert verify(run.trace, end=run.end()) == []


def test_a_full_device_shows_as_releases_before_a_segment_and_needs_no_known_capacity() -> None:
    run = Recorder(capacity=60 * MiB)
    block = run.malloc(40 * MiB)
    assert block is not None
    run.free(block)
    run.malloc(50 * MiB)
    assert verify(run.trace, end=run.end()) == []


def test_a_recorded_out_of_memory_event_must_happen() -> None:
    run = Recorder(capacity=60 * MiB)
    run.malloc(40 * MiB)
    run.malloc(30 * MiB)
    assert verify(run.trace, limit=60 * MiB, end=run.end()) == []
    assert verify(run.trace, end=run.end()) == []
    cached = Recorder()
    block = cached.malloc(40 * MiB)
    assert block is not None
    cached.free(block)
    cached.trace.driver(Action.OOM, address=0, size=30 * MiB)
    [mismatch] = verify(cached.trace)
    assert (mismatch.event, mismatch.recorded, mismatch.modelled) == (3, "out of memory", "served")


def test_an_out_of_memory_error_that_was_not_recorded_is_reported() -> None:
    run = Recorder()
    run.malloc(40 * MiB)
    [mismatch] = verify(run.trace, limit=30 * MiB)
    assert (mismatch.event, mismatch.modelled) == (1, "out of memory")


# -- rewind finds how it began ---------------------------------------------------------------------------------

USED, FREE = "active_allocated", "inactive"


def began(run: Recorder) -> tuple[SegmentRecord, ...]:
    return rewind(run.trace, run.end(), run.config)


def test_a_recording_from_the_start_began_with_nothing() -> None:
    run = Recorder()
    run.malloc(4 * MiB)
    run.malloc(30 * MiB)
    assert began(run) == ()


def test_what_is_live_throughout_and_the_gaps_between_were_there() -> None:
    start = (segment(20 * MiB, (4 * MiB, USED, 4 * MiB), (4 * MiB, FREE, 0), (12 * MiB, USED, 12 * MiB)),)
    run = Recorder(start=start)
    run.malloc(3 * MiB)
    run.malloc(5 * MiB)
    assert began(run) == start


def test_a_block_freed_during_the_recording_was_there() -> None:
    start = (segment(20 * MiB, (4 * MiB, USED, 4 * MiB), (16 * MiB, FREE, 0)),)
    run = Recorder(start=start)
    run.free(run.held[0])
    assert began(run) == start


def test_a_segment_released_during_the_recording_was_there() -> None:
    start = (
        segment(2 * MiB, (512, USED, 100), (2 * MiB - 512, FREE, 0), small=True),
        segment(30 * MiB, (30 * MiB, USED, 30 * MiB), address=2 * BASE),
    )
    run = Recorder(start=start)
    for block in list(run.held):
        run.free(block)
    run.empty_cache()
    assert run.end() == ()
    assert began(run) == start


def test_a_tail_that_reaches_the_end_of_the_segment_belongs_to_the_freed_block() -> None:
    start = (segment(12 * MiB, (12 * MiB, USED, 11 * MiB + 5)),)
    run = Recorder(start=start)
    run.free(run.held[0])
    assert began(run) == start


def test_a_tail_shows_where_a_later_block_was_placed_behind_it() -> None:
    # 19 MiB in a block of 19.5, then 10.5 free; a block of 4 MiB placed in them tells where they begin
    start = (segment(30 * MiB, (19 * MiB + MiB // 2, USED, 19 * MiB), (10 * MiB + MiB // 2, FREE, 0)),)
    run = Recorder(start=start)
    run.malloc(4 * MiB)
    run.free(run.held[0])
    assert began(run) == start


def test_a_block_freed_under_max_split_size_was_its_whole_segment() -> None:
    start = (segment(60 * MiB, (60 * MiB, USED, 45 * MiB)),)
    run = Recorder("max_split_size_mb:40", start=start)
    run.free(run.held[0])
    assert began(run) == start


def test_a_free_that_was_pending_when_recording_began_is_pending_again() -> None:
    start = (segment(20 * MiB, (20 * MiB, "active_pending_free", 20 * MiB)),)
    run = Recorder(start=start)
    run.complete_free(run.held[0])
    assert began(run) == start


def test_events_that_contradict_the_final_state_are_refused() -> None:
    for action in (Action.ALLOC, Action.FREE_REQUESTED, Action.SEGMENT_ALLOC):
        trace = Trace(origin="measured")
        if action == Action.SEGMENT_ALLOC:
            trace.driver(action, address=BASE, size=20 * MiB)
        else:
            trace.alloc(512, address=BASE)
            trace.actions[0] = action
        with pytest.raises(InputError, match=r"event 0 .* not in the snapshot's final state"):
            rewind(trace, (), AllocatorConfig())


def test_recorded_blocks_that_overlap_are_refused() -> None:
    trace = Trace(origin="measured")
    trace.alloc(4 * MiB, address=BASE + 17 * MiB)
    trace.actions[0] = Action.FREE
    with pytest.raises(InputError, match="overlap"):
        rewind(trace, (segment(20 * MiB, (20 * MiB, FREE, 0)),), AllocatorConfig())


# -- any recording, from any moment ------------------------------------------------------------------------------

sizes = st.one_of(st.integers(1, 3 * MiB), st.sampled_from([MiB, 2 * MiB, 10 * MiB, 19 * MiB, 20 * MiB, 36 * MiB]))
call = st.tuples(
    st.sampled_from(["malloc"] * 5 + ["free"] * 3 + ["request", "complete", "complete", "empty"]),
    sizes,
    st.integers(0, 1000),
    st.sampled_from([0, 0, 1]),
)
calls = st.sampled_from([0, 15, 50]).flatmap(lambda least: st.lists(call, min_size=least, max_size=70))
Calls = list[tuple[str, int, int, int]]


def perform(run: Recorder, sequence: Calls) -> None:
    for what, size, number, stream in sequence:
        pending = list(run.allocator.pending)
        if what == "malloc":
            run.malloc(size, stream)
        elif what == "empty":
            if not pending:  # with frees pending, a recording does not always tell it from the wait before a retry
                run.empty_cache()
        elif what == "complete" and pending:
            run.complete_free(pending[number % len(pending)])
        elif what in ("free", "request") and run.held:
            block = run.held[number % len(run.held)]
            run.free(block) if what == "free" else run.request_free(block)


@given(
    st.sampled_from(["", "max_split_size_mb:24", "roundup_power2_divisions:4", "expandable_segments:True"]),
    st.none() | st.integers(30, 120),
    calls,
)
@settings(max_examples=examples(120), deadline=None)
def test_every_recording_of_the_model_agrees_with_it_and_began_with_nothing(
    conf: str, bound: int | None, sequence: Calls
) -> None:
    card = None if bound is None else bound * MiB
    run = Recorder(conf, capacity=card)
    if run.config.expandable_segments:  # after a wait a request may be served without a map: then it looks like a hit
        sequence = [each for each in sequence if each[0] != "request"]
    perform(run, sequence)
    # A request that fails leaves a reservation behind, and where it lies no recording shows.
    assume(not (run.config.expandable_segments and Action.OOM in run.trace.actions))
    assert verify(run.trace, run.config, card=card, end=run.end()) == []
    assert rewind(run.trace, run.end(), run.config) == ()


@given(st.none() | st.integers(60, 200), calls, calls)
@settings(max_examples=examples(120), deadline=None)
def test_a_recording_that_began_late_is_rewound_to_where_it_began(
    capacity: int | None, before: Calls, after: Calls
) -> None:
    bound = None if capacity is None else capacity * MiB
    early = Recorder(capacity=bound)
    perform(early, [(what, size, number, stream) for what, size, number, stream in before if what != "request"])
    start = early.end()
    if any(b.requested and b.size != early.config.rounded(b.requested) for s in start for b in s.blocks):
        return  # a tail of up to 1 MiB is not always told by what follows
    late = Recorder(capacity=bound, start=start)
    late.next_address = early.next_address
    perform(late, after)
    assert rewind(late.trace, late.end(), late.config) == start
    assert verify(late.trace, late.config, start=start, end=late.end()) == []
