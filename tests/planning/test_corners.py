"""Which points are traced so that others need not be: arithmetic alone, nothing is traced here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from memfit.extrapolation.shapes import surrounds
from memfit.planning.interpolation import Corners

Point = tuple[int, int]


def corners(asked: Sequence[Point] = (), expected: Sequence[Point] = ()) -> Corners:
    made = Corners()
    made.asked.update(asked)
    made.expected.update(expected)
    return made


SWEEP = [(batch, length) for batch in (3, 5, 24) for length in (200, 333, 1000)]


@pytest.mark.parametrize("known", [{"asked": SWEEP}, {"expected": SWEEP}])
def test_corners_lie_around_all_points_that_are_known(known: dict[str, list[Point]]) -> None:
    made = corners(**known)
    found = made.around((5, 333))
    assert len(found) == 4
    assert all(surrounds([*found, (3, 301)], point) for point in SWEEP)


def test_points_that_are_known_to_come_are_surrounded_closely() -> None:
    assert corners(expected=SWEEP).around((5, 333)) == [(2, 199), (2, 1024), (24, 199), (24, 1024)]
    assert corners(asked=SWEEP).around((5, 333)) == [(2, 65), (2, 1024), (32, 65), (32, 1024)]


def test_what_does_not_vary_stays_as_it_is() -> None:
    along_batch = [(batch, 512) for batch in (2, 4, 9)]
    assert corners(asked=along_batch).around((4, 512)) == [(2, 512), (16, 512)]
    assert corners(asked=[(7, 7)]).around((7, 7)) == [(7, 7)]


def test_batch_size_1_has_a_line_of_its_own() -> None:
    made = corners(asked=[*SWEEP, (1, 300)])
    assert made.around((1, 300)) == [(1, 65), (1, 1024)]
    assert min(batch for batch, _ in made.around((5, 300))) == 2


def test_a_point_outside_moves_the_outer_lines() -> None:
    made = corners(asked=SWEEP)
    made.around((5, 333))
    made.asked.add((100, 5000))
    assert made.around((100, 5000)) == [(32, 1024), (32, 8192), (128, 1024), (128, 8192)]
    assert made.around((5, 333))[-1] == (32, 1024)


# -- what pays ---------------------------------------------------------------------------------------------------------


def test_four_corners_pay_for_a_dozen_points_to_come_or_for_four_that_were_asked() -> None:
    coming = [(3, 200 + i) for i in range(13)]
    made = corners(asked=coming[:1], expected=coming)
    assert made.pay([(2, 199), (8, 256)], new=4, unasked=0)
    assert not corners(asked=coming[:1], expected=coming[:12]).pay([(2, 199), (8, 256)], new=4, unasked=0)
    assert corners(asked=SWEEP[:4]).pay([(2, 65), (32, 1024)], new=4, unasked=0)
    assert not corners(asked=SWEEP[:3]).pay([(2, 65), (32, 1024)], new=3, unasked=0)
    assert not corners(asked=SWEEP[:5]).pay([(2, 65), (32, 1024)], new=4, unasked=2)


def test_points_elsewhere_do_not_pay() -> None:
    made = corners(asked=[(1, 300)], expected=[(3, 200 + i) for i in range(100)])
    assert not made.pay([(1, 199), (1, 512)], new=2, unasked=0)


# -- lines -------------------------------------------------------------------------------------------------------------


def drawn(made: Corners, point: Point, what: Callable[[Point], object], likely: Sequence[int] = ()) -> bool:
    return made.draw_line(point, what, list(likely), lambda _: None)


def test_corners_that_do_the_same_need_no_line() -> None:
    made = corners(expected=SWEEP)
    assert not drawn(made, (5, 333), lambda point: "same")
    assert len(made.around((5, 333))) == 4


def test_a_line_is_drawn_at_a_number_of_the_config_first() -> None:
    made = corners(expected=SWEEP)
    assert drawn(made, (5, 333), lambda point: point[1] > 512, likely=[511, 512, 513, 4096])
    assert made.around((5, 333))[-1] == (24, 511)
    assert made.around((5, 600))[0] == (2, 513)
    assert made.around((5, 512)) == [(2, 512), (24, 512)]


def test_else_lines_close_in_on_the_place_from_the_middle() -> None:
    made, what = corners(expected=SWEEP), lambda point: point[1] > 700
    while drawn(made, (5, 333), what):
        pass
    assert made.around((5, 333)) == [(2, 199), (2, 611), (24, 199), (24, 611)]
    assert made.around((5, 650)) == [(2, 611), (2, 1024), (24, 611), (24, 1024)]


def test_corners_are_like_the_point_where_8_matters() -> None:
    made, what = corners(expected=SWEEP), lambda point: point[1] % 8 == 0
    assert drawn(made, (5, 333), what)
    assert {length % 8 == 0 for _, length in made.around((5, 333))} == {False}
    assert {length % 8 == 0 for _, length in made.around((5, 400))} == {True}
    assert surrounds([*made.around((5, 333)), (3, 201)], (5, 333))
    assert surrounds([*made.around((5, 400)), (3, 208)], (5, 400))


def test_a_line_out_of_reach_goes_back_to_what_was_asked_for() -> None:
    made = corners(asked=[(2, 40), (5, 100), (7, 120)])
    corner = made.around((5, 100))[-1]
    assert corner == (8, 128)
    made.is_out_of_reach((8, 128))
    assert made.around((5, 100))[-1] == (7, 120)
