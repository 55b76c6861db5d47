"""SparseGPT against the definition in fp64: masks, weights, dead inputs, damping, and stacks of matrices."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from torch import Tensor

from memfit.errors import InputError
from memfit.jobs.pruning.methods import Gram
from memfit.jobs.pruning.sparsegpt import ColumnSweeps, prune_with_updates_
from memfit.jobs.settings import Sparsity


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def hessian_of(columns: int, *, tokens: int = 400, dead: tuple[int, ...] = ()) -> Tensor:
    """Of inputs that depend on each other, as those of a model do."""
    x = torch.randn(2, tokens // 2, columns) @ (torch.eye(columns) + 0.3 * torch.randn(columns, columns))
    x[..., list(dead)] = 0
    gram = Gram(2, columns, "cpu")
    gram.add(x)
    return gram.finish()


def expected(weight: Tensor, hessian: Tensor, **how: object) -> tuple[np.ndarray, np.ndarray]:
    return reference.sparsegpt(reference.values(weight).astype(float), hessian.numpy().astype(float), **how)  # type: ignore[arg-type]


def assert_close(weight: Tensor, wanted: np.ndarray, mask: np.ndarray) -> None:
    """fp32 rounding along a sweep; masks to the bit."""
    assert np.array_equal(weight.numpy() == 0, mask | (wanted == 0))
    np.testing.assert_allclose(weight.numpy(), wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 0.8])
@pytest.mark.parametrize(("columns", "block"), [(48, 16), (50, 16), (40, 128)])
def test_a_ratio_of_each_column_block_goes(columns: int, block: int, ratio: float) -> None:
    weight, hessian = torch.randn(24, columns), hessian_of(columns)
    wanted, mask = expected(weight, hessian, ratio=ratio, block=block)
    warnings = prune_with_updates_([weight], hessian.clone(), Sparsity(ratio=ratio), block=block)
    assert warnings == ()
    assert_close(weight, wanted, mask)
    for start in range(0, columns, block):
        here = weight[:, start : start + block]
        assert (here == 0).sum() == int(here.numel() * ratio)


@pytest.mark.parametrize("groups", [(2, 4), (4, 8), (1, 4), (3, 8), (5, 6)])
def test_groups_are_chosen_by_weights_as_updated_so_far(groups: tuple[int, int]) -> None:
    weight, hessian = torch.randn(20, 48), hessian_of(48)
    wanted, mask = expected(weight, hessian, groups=groups, block=24)
    prune_with_updates_([weight], hessian, Sparsity.parse(f"{groups[0]}:{groups[1]}"), block=24)
    assert_close(weight, wanted, mask)
    assert ((weight.view(20, -1, groups[1]) == 0).sum(-1) == groups[0]).all()


def test_a_block_is_cut_to_whole_groups() -> None:
    weight, hessian = torch.randn(8, 36), hessian_of(36)
    wanted, mask = expected(weight, hessian, groups=(3, 6), block=12)
    prune_with_updates_([weight], hessian, Sparsity.parse("3:6"), block=16)
    assert_close(weight, wanted, mask)


def test_what_goes_is_made_up_for() -> None:
    weight, hessian = torch.randn(16, 40), hessian_of(40)
    dense = weight.clone()
    prune_with_updates_([weight], hessian.clone(), Sparsity(ratio=0.5), block=16)
    removed_only = dense.clone().masked_fill_(weight == 0, 0)

    def error(pruned: Tensor) -> float:
        gone = pruned - dense
        return float((gone @ hessian * gone).sum())

    assert error(weight) < 0.9 * error(removed_only)


def test_matrices_that_share_an_input_come_out_as_alone() -> None:
    hessian = hessian_of(40)
    weights = [torch.randn(rows, 40).to(dtype) for rows, dtype in ((8, torch.float32), (20, torch.bfloat16))]
    alone = [weight.clone() for weight in weights]
    prune_with_updates_(weights, hessian.clone(), Sparsity(ratio=0.5), block=16)
    for weight in alone:
        prune_with_updates_([weight], hessian.clone(), Sparsity(ratio=0.5), block=16)
    for together, apart in zip(weights, alone, strict=True):
        assert torch.equal(together == 0, apart == 0)
        torch.testing.assert_close(together, apart, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_and_transposed_weights_are_rounded_once_at_the_end(dtype: torch.dtype) -> None:
    weight, hessian = torch.randn(40, 24).to(dtype).t(), hessian_of(40)
    wanted, mask = expected(weight, hessian, ratio=0.5, block=16)
    prune_with_updates_([weight], hessian, Sparsity(ratio=0.5), block=16)
    assert np.array_equal(reference.values(weight) == 0, mask)
    np.testing.assert_allclose(reference.values(weight), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def test_ties_go_by_rows_and_then_columns() -> None:
    """With the identity for H nothing is made up for, and the score is the square."""
    weight = torch.tensor([[1.0, -1.0, 2.0, 1.0], [1.0, 1.0, 3.0, 2.0]])
    prune_with_updates_([weight], torch.eye(4), Sparsity(ratio=0.5), block=4)
    assert weight.tolist() == [[0.0, 0.0, 2.0, 0.0], [0.0, 1.0, 3.0, 2.0]]


def test_weights_of_dead_inputs_become_zero_and_harm_nothing() -> None:
    weight, hessian = torch.randn(16, 40), hessian_of(40, dead=(0, 17, 39))
    wanted, mask = expected(weight, hessian, ratio=0.4, block=16)
    prune_with_updates_([weight], hessian, Sparsity(ratio=0.4), block=16)
    assert (weight[:, [0, 17, 39]] == 0).all()
    assert_close(weight, wanted, mask)


def test_fewer_tokens_than_columns_need_no_more_than_the_usual_damping() -> None:
    weight, hessian = torch.randn(16, 40), hessian_of(40, tokens=10)
    assert prune_with_updates_([weight], hessian, Sparsity(ratio=0.5)) == ()


def test_damping_grows_tenfold_until_the_matrix_is_positive_definite_and_says_so() -> None:
    hessian = torch.eye(8)
    hessian[0, 1] = hessian[1, 0] = 1.05
    weight = torch.randn(4, 8)
    warnings = prune_with_updates_([weight], hessian, Sparsity(ratio=0.5), names=["layers.2.o_proj"])
    assert warnings == ("layers.2.o_proj: X^T X was not positive definite with damping 0.01; 0.1 was used",)
    assert (weight == 0).sum() == 16 and weight.isfinite().all()


def test_a_matrix_that_no_damping_mends_is_an_error_that_names_it() -> None:
    hessian = torch.eye(8) - 500 * torch.ones(8, 8).triu(1) - 500 * torch.ones(8, 8).tril(-1)
    with pytest.raises(InputError, match=r"inputs of layers\.2\.o_proj: X\^T X is not positive definite"):
        prune_with_updates_([torch.randn(4, 8)], hessian, Sparsity(ratio=0.5), names=["layers.2.o_proj"])


def test_values_that_are_not_finite_are_named_before_anything_is_changed() -> None:
    weight, hessian = torch.ones(4, 8), torch.eye(8)
    hessian[3, 3] = torch.inf
    with pytest.raises(InputError, match=r"inputs of layers\.0\.q_proj: NaN or infinite"):
        prune_with_updates_([weight], hessian, Sparsity(ratio=0.5), names=["layers.0.q_proj"])
    assert (weight == 1).all()


def test_sweeps_are_kept_by_shape_and_the_oldest_go() -> None:
    sweeps = ColumnSweeps()
    cpu = torch.device("cpu")
    first = sweeps.find(4, 3, cpu, None)
    assert sweeps.find(4, 3, cpu, None) is first
    assert sweeps.find(4, 3, cpu, (2, 4)) is not first
    for rows in range(ColumnSweeps.MOST):
        sweeps.find(2, rows, cpu, None)
    assert sweeps.find(4, 3, cpu, None) is not first
