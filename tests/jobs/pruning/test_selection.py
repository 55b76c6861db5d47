"""Masks against the reference, to the bit: methods, dtypes, strides, ties, and scratch of any size."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memfit.errors import InputError
from memfit.jobs.pruning import selection
from memfit.jobs.pruning.selection import (
    Magnitude,
    Ria,
    Scorer,
    Wanda,
    lowest_of_all,
    parts_of_rows,
    prune_groups_,
    prune_matrix_,
    prune_rows_,
    prune_variant_,
    removals,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Fill = Callable[[torch.Generator, tuple[int, int]], Tensor]

FILLS: dict[str, Fill] = {
    "normal": lambda generator, shape: torch.randn(shape, generator=generator) * 0.02,
    "quantised": lambda generator, shape: torch.randint(-3, 4, shape, generator=generator) * 0.25,
    "mostly zero": lambda generator, shape: (
        torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.2)
    ),
    "equal rows": lambda generator, shape: torch.randn((1, shape[1]), generator=generator).expand(shape).clone(),
    "all equal": lambda generator, shape: torch.full(shape, -0.5),
    "zeros of both signs": lambda generator, shape: torch.zeros(shape) * torch.randn(shape, generator=generator),
}


def plain(matrix: Tensor) -> Tensor:
    return matrix.clone()


def transposed(matrix: Tensor) -> Tensor:
    return matrix.t().contiguous().t()


def expert_slice(matrix: Tensor) -> Tensor:
    """The middle expert of three, and of it the second half of the rows, as gate and up lie in one parameter."""
    rows, columns = matrix.shape
    experts = torch.full((3, 2 * rows, columns), 7.0, dtype=matrix.dtype)
    experts[1, rows:] = matrix
    return experts[1, rows:]


def transposed_expert(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    experts = torch.full((2, columns, rows), 7.0, dtype=matrix.dtype)
    experts[1] = matrix.t()
    return experts[1].t()


LAYOUTS = (plain, transposed, expert_slice, transposed_expert)


@st.composite
def matrices(draw: st.DrawFn, groups_of: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (draw(st.integers(1, 9)), groups_of * draw(st.integers(1, max(1, 24 // groups_of))))
    fill = draw(st.sampled_from(sorted(FILLS)))
    return draw(st.sampled_from(LAYOUTS))(FILLS[fill](generator, shape).to(draw(st.sampled_from(DTYPES))))


def norms_for(weight: Tensor, *, tied: bool) -> Tensor:
    """Some inputs dead; tied ones make products of quantised weights equal across columns."""
    generator = torch.Generator().manual_seed(weight.numel())
    norms = torch.rand(weight.shape[1], generator=generator) * 100
    norms = norms.round() if tied else norms
    return norms.masked_fill_(torch.rand(weight.shape[1], generator=generator) < 0.1, 0)


def scorer_and_scores(method: str, weight: Tensor, *, tied: bool) -> tuple[Scorer, reference.Matrix]:
    norms, plain_weight = norms_for(weight, tied=tied), reference.values(weight)
    if method == "magnitude":
        return Magnitude(), reference.magnitude_scores(plain_weight)
    if method == "wanda":
        return Wanda(norms), reference.wanda_scores(plain_weight, norms.numpy())
    return Ria(weight, norms), reference.ria_scores(plain_weight, norms.numpy())


METHODS = st.sampled_from(("magnitude", "wanda", "ria"))


@given(weight=matrices(), method=METHODS, tied=st.booleans(), data=st.data())
def test_scores_have_the_bits_of_the_reference(weight: Tensor, method: str, tied: bool, data: st.DataObject) -> None:
    scorer, expected = scorer_and_scores(method, weight, tied=tied)
    first = data.draw(st.integers(0, len(weight) - 1))
    assert np.array_equal(scorer(weight[first:]).numpy(), expected[first:])


@given(weight=matrices(), method=METHODS, tied=st.booleans(), scratch=st.integers(0, 4000), data=st.data())
def test_the_k_lowest_of_each_row_go(
    weight: Tensor, method: str, tied: bool, scratch: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(0, weight.shape[1]))
    scorer, scores = scorer_and_scores(method, weight, tied=tied)
    before = weight.clone()
    with mock.patch.object(selection, "SCRATCH_BYTES", scratch):
        prune_rows_(weight, scorer, k)
    assert reference.removed_by(before, weight, reference.by_rows(scores, k))


@given(weight=matrices(), scratch=st.integers(0, 4000), data=st.data())
def test_the_smallest_magnitudes_of_a_matrix_go_and_exactly_as_many_as_asked(
    weight: Tensor, scratch: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, weight.numel()))
    before = weight.clone()
    with mock.patch.object(selection, "SCRATCH_BYTES", scratch):
        prune_matrix_(weight, count)
    scores = reference.magnitude_scores(reference.values(before))
    assert reference.removed_by(before, weight, reference.by_matrix(scores, count))


@pytest.mark.parametrize(("removed", "group"), [(2, 4), (4, 8), (1, 4), (3, 4), (3, 8), (5, 7), (1, 2), (0, 4), (4, 4)])
@settings(max_examples=25)
@given(data=st.data(), method=METHODS, tied=st.booleans(), scratch=st.integers(0, 4000))
def test_the_lowest_of_each_group_of_columns_go(
    removed: int, group: int, data: st.DataObject, method: str, tied: bool, scratch: int
) -> None:
    weight = data.draw(matrices(groups_of=group))
    scorer, scores = scorer_and_scores(method, weight, tied=tied)
    before = weight.clone()
    with mock.patch.object(selection, "SCRATCH_BYTES", scratch):
        prune_groups_(weight, scorer, removed, group)
    assert reference.removed_by(before, weight, reference.by_groups(scores, removed, group))


@pytest.mark.parametrize(("removed", "group"), [(16, 32), (20, 40), (64, 128)])
@pytest.mark.parametrize("fill", sorted(FILLS))
def test_groups_may_be_long(removed: int, group: int, fill: str) -> None:
    weight = FILLS[fill](torch.Generator().manual_seed(1), (5, 2 * group))
    scorer, scores = scorer_and_scores("wanda", weight, tied=True)
    before = weight.clone()
    prune_groups_(weight, scorer, removed, group)
    assert reference.removed_by(before, weight, reference.by_groups(scores, removed, group))


@given(
    weight=matrices(),
    ratio=st.sampled_from((0.0, 0.1, 0.3, 0.5, 0.7, 0.95)),
    tied=st.booleans(),
    scratch=st.integers(0, 10**6),
)
@settings(deadline=None)
def test_the_variant_removes_one_share_of_each_rows_sum(weight: Tensor, ratio: float, tied: bool, scratch: int) -> None:
    scorer, scores = scorer_and_scores("wanda", weight, tied=tied)
    mask = reference.by_variant(scores, ratio)
    before = weight.clone()
    with mock.patch.object(selection, "SCRATCH_BYTES", scratch):
        prune_variant_(weight, scorer, ratio)
    assert reference.removed_by(before, weight, mask)


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.6])
def test_the_variant_comes_within_a_thousandth_of_the_ratio_on_a_matrix_of_some_size(ratio: float) -> None:
    weight = FILLS["normal"](torch.Generator().manual_seed(2), (60, 160)).bfloat16()
    scorer, scores = scorer_and_scores("wanda", weight, tied=False)
    mask = reference.by_variant(scores, ratio)
    before = weight.clone()
    prune_variant_(weight, scorer, ratio)
    assert reference.removed_by(before, weight, mask)
    assert abs(mask.sum() / weight.numel() - ratio) <= 0.001


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fill", sorted(FILLS))
def test_larger_matrices_in_several_parts_equal_the_reference(fill: str, dtype: torch.dtype) -> None:
    drawn = FILLS[fill](torch.Generator().manual_seed(3), (70, 130)).to(dtype)
    scorer, scores = scorer_and_scores("wanda", drawn, tied=True)
    by_row, whole = drawn.clone(), transposed(drawn)
    with mock.patch.object(selection, "SCRATCH_BYTES", 30_000):
        prune_rows_(by_row, scorer, 65)
        prune_matrix_(whole, 4321)
    assert reference.removed_by(drawn, by_row, reference.by_rows(scores, 65))
    magnitudes = reference.magnitude_scores(reference.values(drawn))
    assert reference.removed_by(drawn, whole, reference.by_matrix(magnitudes, 4321))


@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 12),
    levels=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_the_lowest_of_all_are_found_with_ties_by_rows_and_then_columns(
    rows: int, columns: int, levels: int, seed: int, data: st.DataObject
) -> None:
    scores = torch.randint(levels, (rows, columns), generator=torch.Generator().manual_seed(seed)).float()
    k = data.draw(st.integers(0, scores.numel()))
    assert np.array_equal(lowest_of_all(scores, k).numpy(), reference.by_matrix(scores.numpy(), k))


def test_by_hand_two_of_each_four_go_from_the_left_if_equal() -> None:
    weight = torch.tensor([[1.0, -1.0, 1.0, 1.0, 4.0, 3.0, -2.0, 1.0]])
    prune_groups_(weight, Magnitude(), 2, 4)
    assert weight.tolist() == [[0.0, 0.0, 1.0, 1.0, 4.0, 3.0, 0.0, 0.0]]


def test_by_hand_wanda_looks_at_the_inputs_too() -> None:
    weight = torch.tensor([[3.0, 1.0, 2.0], [1.0, 1.0, 1.0]])
    prune_rows_(weight, Wanda(torch.tensor([1.0, 100.0, 4.0])), 1)
    assert weight.tolist() == [[0.0, 1.0, 2.0], [0.0, 1.0, 1.0]]


def test_a_negative_zero_that_is_removed_becomes_a_plain_zero() -> None:
    weight = torch.tensor([[-0.0, 1.0]])
    prune_rows_(weight, Magnitude(), 1)
    assert not torch.signbit(weight).any()


def test_rows_beside_an_experts_slice_are_left_alone() -> None:
    experts = torch.ones(3, 4, 6)
    prune_rows_(experts[1, 2:], Magnitude(), 3)
    assert experts.sum() == 3 * 4 * 6 - 2 * 3


@pytest.mark.parametrize(("size", "ratio", "expected"), [(10, 0.5, 5), (7, 0.5, 3), (100, 0.29, 28), (3, 0.0, 0)])
def test_a_ratio_is_cut_off_to_a_count(size: int, ratio: float, expected: int) -> None:
    """0.29 * 100 is 28.999..., so 28 go, as in the public code."""
    assert removals(size, ratio) == expected


def test_parts_stay_within_the_scratch_and_are_one_row_at_least() -> None:
    weight = torch.zeros(10, 100)
    assert [len(part) for part in parts_of_rows(weight, 16, 4800)] == [3, 3, 3, 1]
    assert [len(part) for part in parts_of_rows(weight, 16, 1)] == [1] * 10


@pytest.mark.parametrize(
    ("prune", "message"),
    [
        (lambda w: prune_rows_(w.double(), Magnitude(), 2), "cannot prune a 2-D float64 weight"),
        (lambda w: prune_groups_(w.view(2, 3, 2), Magnitude(), 1, 3), "cannot prune a 3-D float32 weight"),
    ],
)
def test_what_cannot_be_is_refused(prune: Callable[[Tensor], int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        prune(torch.ones(2, 6))
