"""Rules' answers taken out of a trace, and others put in their place."""

from __future__ import annotations

import numpy as np
import pytest

from memfit.events import Action, Trace
from memfit.extrapolation.streams import (
    CALLER,
    FilledStream,
    NotSeparable,
    Outline,
    RuleCall,
    filled,
    fingerprint,
    stream_of,
)

BUFFER = Outline(actions=(Action.ALLOC, Action.FREE), subjects=(0, 0), ops=("buffer",), modules=(CALLER,))
TWO_BUFFERS = Outline(
    actions=(Action.ALLOC, Action.ALLOC, Action.FREE, Action.FREE), subjects=(0, 1, 1, 0), ops=("buffer", "locks"),
    modules=(CALLER, 0),
)  # fmt: skip
NOTHING = Outline((), (), (), ())
RESULT = Outline(actions=(Action.ALLOC,), subjects=(0,), ops=("result",), modules=(CALLER,))
SCRATCH_AND_RESULT = Outline(
    actions=(Action.ALLOC, Action.ALLOC, Action.FREE), subjects=(0, 1, 0), ops=("scratch", "sum"), modules=(CALLER,) * 2
)


def call(start: int, end: int, *numbers: int) -> RuleCall:
    return RuleCall("rule", numbers, start, end, "mlp", "", ("embedding",))


def job(size: int, *, buffers: tuple[int, ...] = (), in_order: bool = True) -> tuple[Trace, list[RuleCall]]:
    """A tensor, a reduction with its buffers, another tensor."""
    trace = Trace()
    trace.mark("forward", 1)
    x = trace.alloc(size, op="mm", module="mlp")
    start = len(trace)
    held = [
        trace.alloc(n, op=op, module=m)
        for n, op, m in zip(buffers, ("buffer", "locks"), ("mlp", "embedding"), strict=False)
    ]
    for block in reversed(held):
        trace.free(block)
    made = [call(start, len(trace), size)]
    y = trace.alloc(2 * size, op="add", module="head")
    for block in (x, y) if in_order else (y, x):
        trace.free(block)
    return trace, made


def says(filled_stream: FilledStream, *pool: int) -> str:
    trace = filled_stream.trace(np.array(pool))
    words = {Action.ALLOC: "+", Action.FREE: "-", Action.MARK: "|"}
    return " ".join(
        f"{words[Action(a)]}{trace.op(s)}{trace.requested[s] if a == Action.ALLOC else ''}" if a != Action.MARK else "|"
        for a, s in trace.events()
    )


def test_traces_that_differ_in_sizes_and_answers_have_one_stream() -> None:
    streams = {stream_of(*job(*args)).stream for args in ((8,), (100,))} | {stream_of(*job(8, buffers=(1, 2))).stream}
    assert len(streams) == 1


def test_another_order_of_frees_is_another_stream() -> None:
    assert stream_of(*job(8)).stream != stream_of(*job(8, in_order=False)).stream


def test_the_sizes_of_a_stream_are_those_outside_of_holes() -> None:
    holed = stream_of(*job(8, buffers=(1, 2)))
    assert (holed.sizes.tolist(), holed.numbers) == ([8, 16], ((8,),))


def test_a_hole_is_filled_with_what_the_rule_answers_there() -> None:
    stream = stream_of(*job(8)).stream
    assert says(filled(stream, [NOTHING], [0]), 8, 16) == "| +mm8 +add16 -mm -add"
    assert says(filled(stream, [BUFFER], [0]), 8, 16, 5) == "| +mm8 +buffer5 -buffer +add16 -mm -add"
    two = filled(stream, [TWO_BUFFERS], [0])
    assert says(two, 8, 16, 5, 6) == "| +mm8 +buffer5 +locks6 -locks -buffer +add16 -mm -add"


def test_buffers_belong_to_the_caller_or_to_an_argument() -> None:
    frame = filled(stream_of(*job(8)).stream, [TWO_BUFFERS], [0]).frame
    assert [(frame.op(b), frame.module(b)) for b in range(4)] == [
        ("mm", "mlp"), ("buffer", "mlp"), ("locks", "embedding"), ("add", "head"),
    ]  # fmt: skip


@pytest.mark.parametrize("buffers", [(), (5,), (5, 6)])
def test_filled_with_its_own_answers_a_trace_is_what_it_was(buffers: tuple[int, ...]) -> None:
    trace, calls = job(8, buffers=buffers)
    holed = stream_of(trace, calls)
    answer = (NOTHING, BUFFER, TWO_BUFFERS)[len(buffers)]
    made = filled(holed.stream, [answer], [0]).trace(np.array([*holed.sizes, *buffers]))
    assert (made.actions, made.subjects, made.requested) == (trace.actions, trace.subjects, trace.requested)
    assert fingerprint(made) == holed.fingerprint == fingerprint(trace)


def with_result(size: int, scratch: int | None = None) -> tuple[Trace, list[RuleCall]]:
    trace = Trace()
    first = None if scratch is None else trace.alloc(scratch, op="scratch", module="mlp")
    result = trace.alloc(size, op="result" if scratch is None else "sum", module="mlp")
    if first is not None:
        trace.free(first)
    calls = [call(0, len(trace), size)]
    trace.free(result)
    return trace, calls


def test_a_rules_results_stay_in_the_stream_whatever_made_them() -> None:
    plain, in_parts = stream_of(*with_result(8)), stream_of(*with_result(8, scratch=100))
    assert plain.stream == in_parts.stream
    assert plain.stream.holes[0].kept == (0,)
    assert says(filled(plain.stream, [RESULT], [0]), 0, 8) == "+result8 -result"
    assert says(filled(plain.stream, [SCRATCH_AND_RESULT], [0]), 0, 100, 8) == "+scratch100 +sum8 -scratch -sum"


def test_an_answer_with_other_results_does_not_fill_the_hole() -> None:
    stream = stream_of(*with_result(8)).stream
    with pytest.raises(NotSeparable, match="other results"):
        filled(stream, [BUFFER], [0])


def test_holes_with_the_same_answer_share_its_sizes() -> None:
    trace, calls = Trace(), []
    for _ in range(3):
        trace.free(trace.alloc(7, op="buffer", module="mlp"))
        calls.append(call(len(trace) - 2, len(trace), 7))
    made = filled(stream_of(trace, calls).stream, [BUFFER], [0, 0, 0])
    assert made.source.tolist() == [0, 0, 0]
    assert says(made, 9) == "+buffer9 -buffer +buffer9 -buffer +buffer9 -buffer"


def test_what_names_blocks_and_events_by_number_is_renumbered() -> None:
    trace, calls = job(8, buffers=(1, 2))
    trace.facts |= {"lists": {"3": [0, None, 3]}, "tokens": [2, 6, len(trace)]}
    stream = stream_of(trace, calls).stream
    facts = filled(stream, [NOTHING], [0]).frame.facts
    assert facts == {"lists": {"1": [0, None, 1]}, "tokens": [2, 2, 5]}
    assert filled(stream, [TWO_BUFFERS], [0]).frame.facts == trace.facts


def test_a_buffer_that_outlives_its_rule_and_dies_later_is_a_result() -> None:
    trace = Trace()
    block = trace.alloc(4)
    trace.alloc(5)
    trace.free(block)
    assert stream_of(trace, [call(0, 1)]).stream.holes[0].kept == (0,)


def test_a_rule_that_frees_what_is_not_its_own_cannot_be_taken_out() -> None:
    trace = Trace()
    block = trace.alloc(4)
    trace.free(block)
    with pytest.raises(NotSeparable):
        stream_of(trace, [call(1, 2)])


def test_calls_after_the_end_of_a_trace_are_left_out() -> None:
    trace, calls = job(8)
    assert stream_of(trace, [*calls, call(90, 92)]).stream == stream_of(trace, calls).stream
