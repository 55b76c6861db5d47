"""More steps than were traced: a training's last one, and as many as a profile has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.events import BLOCK_COLUMNS, Action, Trace, between, step_begins
from memfit.extrapolation.blocks import NotRepeating
from memfit.extrapolation.steps import last_step, with_steps
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


ALLOC = re.compile(r"([a-z]+)(\d+)")


def trace_of(text: str) -> Trace:
    """`|zero:1 a8 -a` is: a mark of step 1, 8 bytes made by op a, and its free. A name that is used again is another
    block; a free is of the latest."""
    trace, blocks = Trace(), {}
    for word in text.split():
        if word.startswith("|"):
            phase, _, step = word[1:].partition(":")
            trace.mark(phase, int(step or 0))
        elif word.startswith("-"):
            trace.free(blocks[word[1:]])
        else:
            found = ALLOC.fullmatch(word)
            assert found, word
            blocks[found[1]] = trace.alloc(int(found[2]), op=found[1], module=f"of {found[1]}")
    return trace


def text_of(trace: Trace) -> str:
    """Blocks by their numbers: `0=a8` is made, `-0` is freed."""
    words = {
        Action.ALLOC: lambda block: f"{block}={trace.op(block)}{trace.requested[block]}",
        Action.FREE: lambda block: f"-{block}",
        Action.MARK: lambda mark: f"|{trace.marks[mark].phase}:{trace.marks[mark].step}",
        Action.EMPTY_CACHE: lambda _: "empty",
    }
    return " ".join(words[Action(action)](subject) for action, subject in trace.events())


def with_last_step(trace: Trace, steps: int = 3) -> str:
    found = last_step(trace, steps)
    assert found is not None
    return text_of(found.apply(trace))


def test_what_lies_between_the_ends_of_the_last_two_steps_comes_again() -> None:
    made = with_last_step(trace_of("|load w8 |step:1 |zero:1 |forward:2 a4 -a |step:2 |zero:2"))
    first, again = "|forward:2 1=a4 -1 |step:2 |zero:2", "|forward:3 2=a4 -2 |step:3 |zero:3"
    assert made == f"|load:0 0=w8 |step:1 |zero:1 {first} {again}"


def test_what_the_step_before_made_is_freed_by_the_next() -> None:
    """Gradients are dropped when the next step begins."""
    made = with_last_step(trace_of("|step:1 g8 |zero:1 -g |backward:2 g8 |zero:2 -g"))
    assert made == "|step:1 0=g8 |zero:1 -0 |backward:2 1=g8 |zero:2 -1 |backward:3 2=g8 |zero:3 -2"


def test_what_comes_after_the_last_step_is_about_the_step_that_is_added() -> None:
    made = with_last_step(trace_of("|step:1 g8 |zero:1 -g |step:2 g8 |zero:2 -g e2 -e"))
    assert made == "|step:1 0=g8 |zero:1 -0 |step:2 1=g8 |zero:2 -1 |step:3 2=g8 |zero:3 -2 3=e2 -3"


def test_the_optimizer_s_state_stays_what_it_is() -> None:
    made = with_last_step(trace_of("|step:1 m8 |zero:1 |step:2 t4 -t |zero:2 -m"))
    assert made == "|step:1 0=m8 |zero:1 |step:2 1=t4 -1 |zero:2 |step:3 2=t4 -2 |zero:3 -0"


def test_several_tensors_are_matched_in_the_order_of_their_birth() -> None:
    made = with_last_step(trace_of("|step:1 g8 h8 |zero:1 -h -g |step:2 g8 h8 |zero:2"))
    assert made == "|step:1 0=g8 1=h8 |zero:1 -1 -0 |step:2 2=g8 3=h8 |zero:2 -3 -2 |step:3 4=g8 5=h8 |zero:3"


def test_the_cache_may_be_emptied() -> None:
    trace = trace_of("|zero:1")
    trace.empty_cache()
    trace.mark("zero", 2)
    assert with_last_step(trace) == "|zero:1 empty |zero:2 empty |zero:3"


def test_lists_name_the_blocks_of_their_own_step() -> None:
    trace = trace_of("w8 |step:1 g8 |zero:1 -g |step:2 g8 n4 -n |zero:2 n4")
    trace.facts["lists"] = {"3": [0, 2, None], "4": [2]}
    found = last_step(trace, 3)
    assert found is not None
    assert found.frame.facts["lists"] == {"3": [0, 2, None], "5": [0, 4, None], "6": [4]}


def test_the_same_way_leads_to_the_sizes_of_another_trace() -> None:
    text = "|step:1 g8 |zero:1 -g |step:2 g8 t4 -t |zero:2"
    found = last_step(trace_of(text), 3)
    assert found is not None
    other = found.apply(trace_of(text.replace("8", "80").replace("t4", "t7")))
    assert list(other.requested) == [80, 80, 7, 80, 7]


def test_the_trace_that_was_given_is_left_alone() -> None:
    trace = trace_of("|step:1 g8 |zero:1 -g |step:2 g8 |zero:2")
    before = text_of(trace)
    with_last_step(trace)
    assert text_of(trace) == before


def test_nothing_is_missing_from_a_job_without_steps_or_with_all_of_them() -> None:
    assert last_step(trace_of("|load w8 |forward:1 a4 -a |forward:2 a4 -a"), 3) is None
    assert last_step(trace_of("|zero:1 a4 -a |zero:2 a4 -a |zero:3"), 3) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("|zero:1 a4 -a", "more than one step is missing"),
        ("|zero:1 |step:2 m8 |zero:2", "a step does not leave behind what it found"),
        ("|step:1 g8 |zero:1 -g |step:2 |zero:2", "a step does not leave behind what it found"),
        ("|step:1 g8 |zero:1 -g |step:2 h8 |zero:2", "a step leaves other tensors behind than it found"),
        ("|step:1 g8 |zero:1 -g |step:2 g9 |zero:2", "differ"),
    ],
)
def test_a_step_that_is_not_proven_is_refused_with_its_reason(text: str, why: str) -> None:
    with pytest.raises(NotRepeating, match=why):
        with_last_step(trace_of(text))
