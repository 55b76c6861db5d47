"""More steps than were traced, and the stretch of them that a late recording would show."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.events import BLOCK_COLUMNS, Action, Trace, between, step_begins
from memfit.extrapolation.blocks import NotRepeating
from memfit.extrapolation.steps import with_steps
from memfit.replay.replay import replay
from memfit.snapshots.read import read_snapshot
from memfit.snapshots.write import placed_snapshot, save_snapshot


def job(steps: int, *, first: int = 7000, carried: bool = True) -> Trace:
    """State made in the first step, a temporary in each, and a tensor that lives until the next step."""
    trace = Trace()
    trace.mark("load")
    trace.alloc(3 << 20, category="weights")
    kept: int | None = None
    for step in range(1, steps + 1):
        trace.mark("forward", step)
        if step == 1:
            trace.alloc(first, category="optimizer")
        temporary = trace.alloc(5 << 20, op="mm")
        fresh = trace.alloc(600, op="ids")
        if carried and kept is not None:
            trace.free(kept)
        kept = fresh
        trace.free(temporary)
    return trace


def shape(trace: Trace) -> list[tuple[int, object]]:
    return [
        (action, (trace.marks[s].phase, trace.marks[s].step) if action == Action.MARK else (s, trace.requested[s]))
        for action, s in trace.events()
    ]


@given(st.integers(3, 6), st.integers(1, 9))
def test_steps_that_were_not_traced_are_those_that_would_have_been(traced: int, wanted: int) -> None:
    assert shape(with_steps(job(traced), wanted)) == shape(job(wanted))


def test_what_no_step_frees_piles_up() -> None:
    def leaking(steps: int) -> Trace:
        trace = Trace()
        for step in range(1, steps + 1):
            trace.mark("forward", step)
            trace.alloc(1 << 20)
            trace.free(trace.alloc(2 << 20))
        return trace

    assert shape(with_steps(leaking(3), 7)) == shape(leaking(7))


def test_blocks_may_be_numbered_in_any_order() -> None:
    trace, last = job(3), len(job(3).requested) - 1
    for event, action in enumerate(trace.actions):
        if action <= Action.FREE_COMPLETED:
            trace.subjects[event] = last - trace.subjects[event]
    for column in ("requested", *BLOCK_COLUMNS):
        getattr(trace, column).reverse()

    assert shape(with_steps(trace, 6)) == shape(job(6))


def test_a_job_that_does_something_else_in_its_last_step_is_not_repeated() -> None:
    trace = job(3)
    trace.alloc(100)
    trace.mark("forward", 4)
    trace.alloc(200)
    with pytest.raises(NotRepeating):
        with_steps(trace, 6)


def test_a_step_cut_off_at_the_end_of_the_job_is_completed_as_the_one_before() -> None:
    whole, cut = Trace(), Trace()
    for trace, steps in ((whole, 5), (cut, 3)):
        for step in range(1, steps + 1):
            trace.mark("forward", step)
            block = trace.alloc(1 << 20)
            if step < steps:
                trace.free(block)
    assert shape(with_steps(cut, 5)) == shape(whole)


def test_a_late_recording_shows_what_was_live_and_nothing_that_had_died() -> None:
    trace = job(4)
    begin = step_begins(trace, 3)
    assert begin is not None
    later = between(trace, begin, len(trace))
    born = {s for a, s in later.events() if a == Action.ALLOC}
    assert sorted(later.requested[b] for b in range(len(later.requested)) if b not in born) == [600, 7000, 3 << 20]


def test_what_is_born_after_the_end_is_not_there() -> None:
    trace = job(4)
    end = step_begins(trace, 2)
    assert end is not None
    assert len(between(trace, 0, end).requested) == 4


def test_a_predicted_snapshot_reads_back_with_the_peaks_of_the_replay(tmp_path: Path) -> None:
    trace = with_steps(job(3), 6)
    begin = step_begins(trace, 4)
    assert begin is not None
    save_snapshot(placed_snapshot(trace, begin=begin), tmp_path / "late.pickle")
    read = read_snapshot(tmp_path / "late.pickle")
    found = replay(read.traces[0])
    assert found.peak_allocated == max(replay(trace).allocated[begin - 1 :])
    assert sum(segment.total_size for segment in read.segments) == replay(trace).reserved[-1]
    assert read.traces[0].origin == "predicted"
    assert {mark.step for mark in read.traces[0].marks} == {4, 5, 6}
