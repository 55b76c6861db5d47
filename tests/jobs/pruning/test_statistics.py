"""Column norms and X^T X against plain sums, and the check for NaN and infinity."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch

from memfit.errors import InputError
from memfit.jobs.pruning import methods
from memfit.jobs.pruning.methods import ColumnNorms, Gram
from memfit.jobs.pruning.selection import check_finite

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("tokens", [1, 7, 16, 48, 256, 131])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_columns_are_means_over_sequences(dtype: torch.dtype, tokens: int) -> None:
    x = inputs(5, tokens, 6, dtype=dtype)
    norms = ColumnNorms(5, 6, "cpu")
    norms.add(x[:2], 0)
    norms.add(x[2:], 2)
    expected = reference.mean_squared_norms([reference.values(each) for each in x])
    assert norms.summary().dtype == torch.float32
    np.testing.assert_allclose(norms.summary().numpy(), expected, rtol=1e-6)


def test_one_integer_by_hand() -> None:
    norms = ColumnNorms(2, 2, "cpu")
    norms.add(torch.tensor([[[3.0, 1.0], [4.0, 0.0]], [[0.0, 0.0], [1.0, 2.0]]]), 0)
    assert norms.rows.tolist() == [[25.0, 1.0], [1.0, 4.0]]
    assert norms.summary().tolist() == [13.0, 2.5]


def test_fp16_inputs_whose_squares_exceed_fp16_are_no_trouble() -> None:
    norms = ColumnNorms(1, 1, "cpu")
    norms.add(torch.full((1, 4, 1), 60_000.0, dtype=torch.float16), 0)
    assert norms.summary().item() == pytest.approx(4 * 60_000.0**2, rel=1e-3)


def test_rows_from_elsewhere_give_the_same_bits_as_samples_seen_here() -> None:
    x = inputs(6, 9, 16)
    here, one, other = (ColumnNorms(6, 16, "cpu") for _ in range(3))
    for first in range(0, 6, 2):
        here.add(x[first : first + 2], first)
        (one if first == 2 else other).add(x[first : first + 2], first)
    one.rows += other.rows
    assert torch.equal(one.summary(), here.summary())


@pytest.mark.parametrize("upcast", [1, 400, 1 << 20])
def test_tokens_of_an_expert_go_to_their_own_sequences(monkeypatch: pytest.MonkeyPatch, upcast: int) -> None:
    monkeypatch.setattr(methods, "UPCAST_BYTES", upcast)
    x = inputs(3, 8, 5, dtype=torch.bfloat16)
    chosen = torch.tensor([20, 3, 4, 17, 0, 21])
    norms = ColumnNorms(4, 5, "cpu")
    norms.add_tokens(x.flatten(0, 1)[chosen], 1 + chosen // 8)
    norms.add_tokens(x[:0].flatten(0, 1), torch.zeros(0, dtype=torch.int64))
    of_sequence = [[t for t in chosen.tolist() if t // 8 == s] for s in range(3)]
    flat = reference.values(x.flatten(0, 1))
    expected = [[0.0] * 5] + [[sum(float(v) ** 2 for v in flat[own, c]) for c in range(5)] for own in of_sequence]
    np.testing.assert_allclose(norms.rows.numpy(), np.array(expected), rtol=1e-6)


@pytest.mark.parametrize("panel", [3, 8, 2048])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_columns_are_whole_symmetric_and_scaled(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, panel: int
) -> None:
    monkeypatch.setattr(methods, "PANEL", panel)
    monkeypatch.setattr(methods, "UPCAST_BYTES", 200)
    x = inputs(4, 6, 8, dtype=dtype)
    gram = Gram(4, 8, "cpu")
    gram.add(x[:3], 0)
    gram.add_tokens(x[3], torch.full((6,), 3))
    gram.add(x[:0], 4)
    tokens = reference.values(x.flatten(0, 1)).astype(np.float64)
    np.testing.assert_allclose(gram.finish().numpy(), 2 / 4 * tokens.T @ tokens, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_matrix_with_a_value_that_is_not_finite_is_named(dtype: torch.dtype, bad: float) -> None:
    whole = torch.ones(3, 4, dtype=dtype)
    damaged = torch.ones(4, 3, dtype=dtype).t()
    damaged[1, 2] = bad
    check_finite({"layers.0.q_proj": whole, "empty": torch.ones(0)})
    check_finite({})
    with pytest.raises(InputError, match=r"layers\.3\.down_proj: NaN or infinite values"):
        check_finite({"layers.0.q_proj": whole, "layers.3.down_proj": damaged, "layers.4.o_proj": damaged})
