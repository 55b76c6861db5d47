"""When points tell those in between, and when they do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from asked_rules import written_call

from memfit.events import Action, Trace
from memfit.extrapolation.shapes import NotProven, Piece, TooFewPoints, filling, surrounds
from memfit.extrapolation.streams import CALLER, Outline, RuleAnswer, RuleCall, answered, fingerprint, stream_of

CORNERS = [(2, 17), (2, 256), (64, 17), (64, 256)]
POINTS = [*CORNERS, (5, 100), (7, 33)]


# -- around ------------------------------------------------------------------------------------------------------------


def test_four_corners_surround_what_is_between_them() -> None:
    assert surrounds([*CORNERS, (3, 20)], (9, 100))
    assert surrounds([*CORNERS, (3, 20)], (64, 256))


@pytest.mark.parametrize("point", [(1, 100), (65, 100), (9, 16), (9, 257)])
def test_they_do_not_surround_what_is_outside(point: tuple[int, int]) -> None:
    assert not surrounds([*CORNERS, (3, 20)], point)


def test_two_opposite_corners_are_not_enough() -> None:
    """batch > length could be true in between, and false at both."""
    assert not surrounds([(2, 17), (64, 256), (3, 20)], (9, 100))


def test_two_ends_surround_what_is_on_their_line() -> None:
    assert surrounds([(1, 17), (1, 256)], (1, 100))
    assert not surrounds([(1, 17), (1, 256)], (2, 100))
    assert surrounds([(3, 512), (64, 512)], (40, 512))


@pytest.mark.parametrize(("length", "told"), [(96, True), (104, True), (100, False), (99, False)])
def test_lengths_that_8_divides_do_not_tell_of_others(length: int, told: bool) -> None:
    eights = [(2, 24), (2, 256), (64, 24), (64, 256), (3, 32)]
    assert surrounds(eights, (8, length)) is told


def test_even_batches_do_not_tell_of_odd_ones() -> None:
    assert not surrounds(CORNERS, (9, 100))
    assert surrounds(CORNERS, (8, 100))


# -- a job -------------------------------------------------------------------------------------------------------------


def rule(form: object, numbers: tuple[int, ...]) -> RuleAnswer:
    """A kernel that sorts more than 3,072 indices, and then needs two buffers."""
    (count,) = numbers
    if count <= 3072:
        return RuleAnswer(Outline((), (), (), ()), ())
    made = Outline(
        (Action.ALLOC, Action.ALLOC, Action.FREE, Action.FREE), (0, 1, 1, 0), ("sorted", "cub"), (CALLER, CALLER)
    )
    return RuleAnswer(made, (8 * count, count // 100))


Job = Callable[[int, int], tuple[Trace, list[RuleCall]]]


def job(batch: int, length: int, *, size: int | None = None, more: bool = False) -> tuple[Trace, list[RuleCall]]:
    trace = Trace()
    x = trace.alloc(4 * batch * length if size is None else size, op="mm")
    if more:
        trace.free(trace.alloc(3, op="copy"))
    asked = batch * length
    calls = [written_call(trace, "sort", (asked,), rule("sort", (asked,)))]
    trace.free(x)
    return trace, calls


def windowed(batch: int, length: int) -> tuple[Trace, list[RuleCall]]:
    return job(batch, length, size=4 * batch * min(length, 128))


def piece_of(work: Job, points: list[tuple[int, int]]) -> Piece:
    traced = {point: stream_of(*work(*point)) for point in points}
    (stream,) = {each.stream for each in traced.values()}
    piece = Piece(stream)
    for point, each in traced.items():
        piece.add(point, each)
    return piece


def told(piece: Piece, point: tuple[int, int]) -> str:
    sized = piece.at(point, rule)
    outlines, pool = answered(sized, rule)
    return fingerprint(filling(sized, outlines).trace(pool))


@pytest.mark.parametrize("point", [(3, 50), (40, 70), (48, 64), (49, 63), (64, 255), (2, 17)])
def test_what_is_told_is_what_would_be_traced_on_both_sides_of_a_kernels_threshold(point: tuple[int, int]) -> None:
    assert told(piece_of(job, POINTS), point) == fingerprint(job(*point)[0])


def test_four_corners_and_one_more_point_are_needed() -> None:
    with pytest.raises(TooFewPoints):
        told(piece_of(job, CORNERS), (8, 100))
    with pytest.raises(TooFewPoints):
        told(piece_of(job, POINTS), (100, 100))
    assert told(piece_of(job, [*CORNERS, (5, 100)]), (8, 100))


def test_sizes_that_stop_growing_at_a_window_are_seen() -> None:
    with pytest.raises(NotProven, match="no polynomial"):
        told(piece_of(windowed, POINTS), (8, 200))


def test_a_rule_that_answers_something_else_than_was_traced_is_seen() -> None:
    piece = piece_of(job, POINTS)
    with pytest.raises(NotProven, match="not told as it was traced"):
        piece.at((8, 100), lambda form, numbers: rule(form, (numbers[0] + 1,)))


def test_a_point_that_is_added_later_is_held_against_what_was_found() -> None:
    piece = piece_of(job, POINTS)
    assert told(piece, (8, 100))
    piece.add((9, 64), stream_of(*job(9, 64)))
    assert told(piece, (8, 100))
    piece.add((11, 64), stream_of(*job(11, 64, size=1)))
    with pytest.raises(NotProven):
        told(piece, (8, 100))


def test_another_event_makes_another_stream() -> None:
    assert stream_of(*job(8, 8)).stream != stream_of(*job(8, 8, more=True)).stream
