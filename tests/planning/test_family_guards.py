"""What must not be told from other points: one case for each guard, in which that guard alone refuses."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
from miniatures import shrunk

from memfit.events import Trace
from memfit.extrapolation.shapes import Fits, NotProven, surrounds
from memfit.extrapolation.streams import NotSeparable, stream_of
from memfit.jobs.workload import Workload
from memfit.planning import interpolation as families
from memfit.planning.interpolation import Corners, Family, family_of
from memfit.planning.traced import Provenance, Recipe
from memfit.platform import H200

CORNERS = [(2, 601), (2, 2048), (16, 601), (16, 2048), (5, 700), (3, 1800)]
"""On both sides of the largest number in the config, 1,024 positions; none just there."""
WINDOW = 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("guards") / "llama"
    folder.mkdir()
    config = {**shrunk("llama", 5), "max_position_embeddings": WINDOW}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def traced(batch: int, length: int, *, more: bool = False, size: int | None = None) -> Any:
    trace = Trace()
    x = trace.alloc(4 * batch * length if size is None else size, op="mm")
    if more:
        trace.free(trace.alloc(3, op="copy"))
    trace.free(x)
    return stream_of(trace, [])


class Known:
    """A family that has been shown these points, and nothing of a model but its config."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.work = Workload(**{"kind": "forward", "model": model, **settings})
        self.family = Family(self.work, H200)
        recipe = Recipe(trace=Trace(), parameters=1, trainable_parameters=0, how=Provenance(), settings={}, notes=())
        self.context = families._PieceFacts("same", recipe, frozenset())

    def add(self, *points: tuple[int, int], **how: Any) -> Known:
        for point in points:
            self.family._traced[point] = {}
            self.family._add("all", point, traced(*point, **how), self.context)
        return self

    def tells(self, batch: int, length: int) -> bool:
        try:
            known = self.family._piece("all", (batch, length))
            known.piece.at((batch, length), self.family._ask)
        except NotProven:
            return False
        return True


def test_between_two_numbers_of_the_config_lengths_are_told_and_just_at_one_they_are_not(model: str) -> None:
    known = Known(model).add(*CORNERS)

    assert known.tells(4, 900) and known.tells(4, WINDOW - 1) and known.tells(4, WINDOW + 1)
    assert not known.tells(4, WINDOW)


def test_a_length_beyond_a_number_needs_a_trace_beyond_it(model: str) -> None:
    near = [(2, 601), (2, 1022), (16, 601), (16, 1022), (5, 700)]
    beyond = [(2, 1024), (16, 1024)]
    known = Known(model).add(*near, *beyond)

    assert known.tells(4, 900)
    assert not known.tells(4, 1023 + 1 + 8)
    assert known.tells(4, WINDOW), "which was traced"


def test_a_generation_reaches_a_number_by_its_new_tokens(model: str) -> None:
    """A prompt of 1,014 tokens and ten more are 1,024: something may begin there, and between the two."""
    asked = {"kind": "generate", "new_tokens": 10}
    known = Known(model, **asked).add(*CORNERS)

    assert known.tells(4, WINDOW - 11) and known.tells(4, WINDOW + 1)
    assert not any(known.tells(4, length) for length in (WINDOW - 10, WINDOW - 9, WINDOW - 1, WINDOW))
    assert Known(model).add(*CORNERS).tells(4, WINDOW - 9)


def test_a_piece_that_does_something_else_inside_is_not_believed(model: str) -> None:
    known = Known(model).add(*CORNERS)
    assert known.tells(4, 1500)

    known.add((6, 1600), more=True)
    assert not known.tells(4, 1500) and not known.tells(4, 900)


def test_of_two_pieces_around_a_point_neither_is_believed(model: str) -> None:
    inner = [(3, 1101), (3, 1536), (12, 1101), (12, 1536), (5, 1200)]
    known = Known(model).add(*inner, more=True)
    assert known.tells(4, 1300)

    known.add(*CORNERS)
    assert not known.tells(4, 1300)


def test_sizes_that_grow_on_one_side_of_a_window_only_are_told_apart(model: str) -> None:
    """The same events on both sides: the points are divided, and those on one side tell their own."""
    known = Known(model)
    below = [(2, 601), (2, 1016), (16, 601), (16, 1016), (5, 700)]
    above = [(2, 1025), (2, 2048), (16, 1025), (16, 2048), (5, 1301)]
    for batch, length in (*below, *above):
        known.add((batch, length), size=4 * batch * min(length, WINDOW))

    assert known.family.given_up is None
    assert len(known.family._pieces["all"]) == 2
    assert known.tells(4, 900) and known.tells(4, 1500)
    told = known.family._piece("all", (4, 1500)).piece.at((4, 1500), known.family._ask)
    assert told.sizes.tolist() == [4 * 4 * WINDOW]


def test_a_job_that_follows_no_polynomial_is_given_up(model: str) -> None:
    known = Known(model)
    for number in range(10):
        batch, length = 2 + number % 7, 601 + 31 * number
        known.add((batch, length), size=batch * length * length * length % 9973 + 1)

    assert known.family.given_up is not None
    assert known.family.told(known.work) is None


def test_three_points_that_cannot_be_learned_from_are_enough_to_give_up(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Known(model)
    noted = SimpleNamespace(trace=Trace(), calls=[], loss_modules=frozenset())

    def fail(*_: Any) -> None:
        raise NotSeparable("a rule's buffer is used outside of it")

    monkeypatch.setattr(families, "parts_of", lambda heard, length: {"all": noted})
    monkeypatch.setattr(families, "stream_of", fail)
    given_up = []
    for batch in (2, 3, 4):
        known.family.learn(dataclasses.replace(known.work, batch_size=batch), known.context.recipe, [])
        given_up.append(known.family.given_up)
    assert given_up == [None, None, "a rule's buffer is used outside of it"]


def test_the_first_and_the_last_tokens_of_different_kinds_are_not_put_together(model: str) -> None:
    known = Known(model, kind="generate", new_tokens=10)
    other = dataclasses.replace(known.context, key="other")
    for point in CORNERS:
        known.family._traced[point] = {}
        for part, context in (("near", known.context), ("far", other), ("all", known.context)):
            known.family._add(part, point, traced(*point), context)  # type: ignore[arg-type]
    with pytest.raises(NotProven, match="of different kinds"):
        known.family._told((4, 900))


def test_a_line_that_is_out_of_reach_is_not_drawn_again_for_a_longer_row() -> None:
    made = Corners()
    made.asked.update([(2, 40), (5, 100), (7, 120)])
    assert made.around((5, 100))[-1] == (8, 128)
    made.is_out_of_reach((8, 128))
    made.asked.add((5, 125))
    assert max(length for _, length in made.around((5, 125))) == 125


def test_another_card_is_another_family_and_pruning_has_none(model: str) -> None:
    work = Workload(kind="forward", model=model)
    families._families.clear()
    families._wholes.clear()

    assert family_of(work, H200) is family_of(dataclasses.replace(work, batch_size=9), H200)
    assert family_of(work, H200) is not family_of(work, dataclasses.replace(H200, sm_count=100))
    assert family_of(Workload(kind="prune", model=model), H200) is None


# -- polynomials -------------------------------------------------------------------------------------------------------


def test_two_points_more_than_terms_are_needed() -> None:
    def fits(points: list[tuple[int, int]]) -> bool:
        return Fits(points).find([3 * batch * length + 7 * length for batch, length in points]) is not None

    points = [(2, 17), (3, 40), (5, 64), (7, 24), (4, 31)]
    assert fits(points[:4]) and not fits(points[:3])


def test_where_two_polynomials_go_through_all_points_neither_is_taken() -> None:
    """All lengths are multiples of 8, so the length and the length rounded up are the same."""
    points = [(2, 16), (2, 32), (2, 48), (2, 64)]
    assert Fits(points).find([5 * length * length for _, length in points]) is not None
    squares = [(n, n) for n in (3, 5, 7, 11, 13)]
    assert Fits(squares).find([4 * n for n, _ in squares]) is None


def test_coefficients_are_whole() -> None:
    points = [(1, 16), (1, 32), (1, 48), (1, 80)]
    assert Fits(points).find([length // 2 for _, length in points]) is None
    assert Fits(points).find([2 * length for _, length in points]) is not None


@pytest.mark.parametrize("missing", range(4))
def test_three_corners_do_not_surround_a_point(missing: int) -> None:
    corners = [(2, 17), (2, 256), (64, 17), (64, 256)]
    assert surrounds(corners, (8, 100))
    assert not surrounds([each for at, each in enumerate(corners) if at != missing], (8, 100))


def test_sizes_out_of_range_are_not_told(model: str) -> None:
    """A line that falls with the length would be below nothing further on."""
    from memfit.extrapolation.shapes import Piece

    points = [(1, 17), (1, 33), (1, 47), (1, 256)]
    made = {point: traced(*point, size=1000 - 4 * point[1] + 60) for point in points[:3]}
    made[points[3]] = traced(*points[3], size=1000 - 4 * points[3][1] + 60)
    piece = Piece(next(iter(made.values())).stream)
    for point, each in made.items():
        piece.add(point, each)
    assert piece.at((1, 100), lambda *_: None).sizes.tolist() == [660]  # type: ignore[arg-type]
    fitted = piece.fit(lambda *_: None)  # type: ignore[arg-type]
    with pytest.raises(NotProven, match="out of range"):
        fitted.at((1, 400))
