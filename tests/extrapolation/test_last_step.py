"""Literal streams of two steps, and the third that they tell."""

from __future__ import annotations

import re

import pytest

from memfit.events import Action, Trace
from memfit.extrapolation.blocks import NotRepeating
from memfit.extrapolation.steps import last_step

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
