"""Jobs at other shapes: exact polynomials of batch size and length, and what is proved of points in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from asked_rules import written_call
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.events import Action, Trace
from memfit.extrapolation.shapes import TERMS, ZERO, Fits, NotProven, Piece, TooFewPoints, evaluate, filling, surrounds
from memfit.extrapolation.streams import CALLER, Outline, RuleAnswer, RuleCall, answered, fingerprint, stream_of

FITTED = [(2, 17), (2, 1024), (64, 17), (64, 1024), (5, 300), (31, 777), (12, 640)]
PLAIN = 6


def of(**coefficients: int) -> tuple[int, ...]:
    """`b1s2=3` is 3 B S^2; `b0s1r8=2` is 2 S times S rounded up to a multiple of 8."""
    made = dict.fromkeys(TERMS, 0)
    for name, coefficient in coefficients.items():
        letters, _, multiple = name.partition("r")
        made[int(letters[1]), int(letters[3]), int(multiple or 0)] = coefficient
    return tuple(made.values())


def values(coefficients: tuple[int, ...], points: list[tuple[int, int]] = FITTED) -> list[int]:
    return [evaluate(coefficients, *point) for point in points]


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ([7] * 7, of(b0s0=7)),
        ([0] * 7, ZERO),
        ([-1] * 7, of(b0s0=-1)),
        ([b for b, _ in FITTED], of(b1s0=1)),
        ([4 * b * s for b, s in FITTED], of(b1s1=4)),
        ([2 * b * (s + 63) * 128 for b, s in FITTED], of(b1s1=256, b1s0=256 * 63)),
        ([s * s for _, s in FITTED], of(b0s2=1)),
        ([4 * b * 32 * s * 65 + 256 for b, s in FITTED], of(b1s1=8320, b0s0=256)),
        ([b * s * -(-s // 8) * 8 for b, s in FITTED], of(b1s1r8=1)),
        ([-(-s // 32) * 32 for _, s in FITTED], of(b0s0r32=1)),
    ],
)
def test_the_polynomial_through_the_points_is_found(numbers: list[int], wanted: tuple[int, ...]) -> None:
    assert Fits(FITTED).find(numbers) == wanted


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(0, PLAIN - 1), st.integers(1, 1 << 40), min_size=1, max_size=3))
def test_any_three_terms_are_told_by_seven_points(terms: dict[int, int]) -> None:
    wanted = tuple(terms.get(i, 0) for i in range(len(TERMS)))
    assert Fits(FITTED).find(values(wanted)) == wanted


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([b * min(s, 512) for b, s in FITTED], id="a window"),
        pytest.param([b * s + (s > 700) for b, s in FITTED], id="one byte from a length on"),
        pytest.param([s // 2 for _, s in FITTED], id="half of an odd length"),
        pytest.param([b**2 for b, _ in FITTED], id="a square of the batch"),
        pytest.param([-(-s // 64) * 64 for _, s in FITTED], id="rounded to 64"),
    ],
)
def test_there_is_none_through_other_numbers(numbers: list[int]) -> None:
    assert Fits(FITTED).find(numbers) is None


def test_two_points_more_than_terms_are_needed() -> None:
    assert Fits(FITTED[:2]).find([1, 1]) is None
    assert Fits(FITTED[:3]).find([1, 1, 1]) == of(b0s0=1)
    two_terms = of(b1s1=4, b1s0=3)
    assert Fits(FITTED[:3]).find(values(two_terms, FITTED[:3])) is None
    assert Fits(FITTED[:4]).find(values(two_terms, FITTED[:4])) == two_terms


def test_along_a_line_only_what_varies_is_looked_for() -> None:
    points = [(batch, 512) for batch in (2, 3, 8, 64)]
    assert Fits(points).find([4 * b * s for b, s in points]) == of(b1s0=2048)
    points = [(1, length) for length in (17, 100, 512, 1000)]
    assert Fits(points).find([4 * b * s * s for b, s in points]) == of(b0s2=4)


def test_points_that_cannot_tell_two_polynomials_apart_tell_none() -> None:
    multiples = [(2, 64), (2, 256), (8, 64), (8, 256), (5, 128), (7, 192)]
    assert Fits(multiples).find([-(-s // 32) * 32 for _, s in multiples]) == of(b0s1=1)
    diagonal = [(n, n) for n in (2, 3, 5, 8, 13, 40)]
    assert Fits(diagonal).find([n for n, _ in diagonal]) is None


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
