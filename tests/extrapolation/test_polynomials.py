"""Polynomials through a few points: exact, the simplest there is, and none where there is none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.extrapolation.shapes import TERMS, ZERO, Fits, evaluate

POINTS = [(2, 17), (2, 1024), (64, 17), (64, 1024), (5, 300), (31, 777), (12, 640)]
PLAIN = 6


def of(**coefficients: int) -> tuple[int, ...]:
    """`b1s2=3` is 3 B S^2; `b0s1r8=2` is 2 S times S rounded up to a multiple of 8."""
    made = dict.fromkeys(TERMS, 0)
    for name, coefficient in coefficients.items():
        letters, _, multiple = name.partition("r")
        made[int(letters[1]), int(letters[3]), int(multiple or 0)] = coefficient
    return tuple(made.values())


def values(coefficients: tuple[int, ...], points: list[tuple[int, int]] = POINTS) -> list[int]:
    return [evaluate(coefficients, *point) for point in points]


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ([7] * 7, of(b0s0=7)),
        ([0] * 7, ZERO),
        ([-1] * 7, of(b0s0=-1)),
        ([b for b, _ in POINTS], of(b1s0=1)),
        ([4 * b * s for b, s in POINTS], of(b1s1=4)),
        ([2 * b * (s + 63) * 128 for b, s in POINTS], of(b1s1=256, b1s0=256 * 63)),
        ([s * s for _, s in POINTS], of(b0s2=1)),
        ([4 * b * 32 * s * 65 + 256 for b, s in POINTS], of(b1s1=8320, b0s0=256)),
        ([b * s * -(-s // 8) * 8 for b, s in POINTS], of(b1s1r8=1)),
        ([-(-s // 32) * 32 for _, s in POINTS], of(b0s0r32=1)),
    ],
)
def test_the_polynomial_through_the_points_is_found(numbers: list[int], wanted: tuple[int, ...]) -> None:
    assert Fits(POINTS).find(numbers) == wanted


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(0, PLAIN - 1), st.integers(1, 1 << 40), min_size=1, max_size=3))
def test_any_three_terms_are_told_by_seven_points(terms: dict[int, int]) -> None:
    wanted = tuple(terms.get(i, 0) for i in range(len(TERMS)))
    assert Fits(POINTS).find(values(wanted)) == wanted


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([b * min(s, 512) for b, s in POINTS], id="a window"),
        pytest.param([b * s + (s > 700) for b, s in POINTS], id="one byte from a length on"),
        pytest.param([s // 2 for _, s in POINTS], id="half of an odd length"),
        pytest.param([b**2 for b, _ in POINTS], id="a square of the batch"),
        pytest.param([-(-s // 64) * 64 for _, s in POINTS], id="rounded to 64"),
    ],
)
def test_there_is_none_through_other_numbers(numbers: list[int]) -> None:
    assert Fits(POINTS).find(numbers) is None


def test_two_points_more_than_terms_are_needed() -> None:
    assert Fits(POINTS[:2]).find([1, 1]) is None
    assert Fits(POINTS[:3]).find([1, 1, 1]) == of(b0s0=1)
    two_terms = of(b1s1=4, b1s0=3)
    assert Fits(POINTS[:3]).find(values(two_terms, POINTS[:3])) is None
    assert Fits(POINTS[:4]).find(values(two_terms, POINTS[:4])) == two_terms


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
