"""OWL's formula by hand, and the share of outliers against a count."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import reference
import torch

from memfit.jobs.pruning import methods
from memfit.jobs.pruning.methods import outlier_percentage, owl, owl_groups
from memfit.jobs.pruning.selection import Magnitude, Wanda


def test_owl_keeps_more_where_there_are_more_outliers() -> None:
    """0.16 wide: d = 0, 0.04, 0.16, less their mean 0.2/3, around 0.3 kept."""
    sparsities = owl([1.0, 2.0, 5.0], 0.7)
    assert sparsities == pytest.approx([0.7 + 0.2 / 3, 0.7 - 0.04 + 0.2 / 3, 0.7 - 0.16 + 0.2 / 3])
    assert sum(sparsities) / 3 == pytest.approx(0.7)
    assert max(sparsities) - min(sparsities) == pytest.approx(0.16)


def test_owl_leaves_no_block_whole_and_empties_none() -> None:
    assert owl([0.0, 1.0], 0.02) == pytest.approx([0.1, 0.01])
    assert owl([0.0, 1.0], 0.95) == pytest.approx([0.99, 0.87])


def test_blocks_without_any_difference_get_the_same() -> None:
    assert owl([3.0, 3.0], 0.5) == [0.5, 0.5]
    assert owl_groups([3.0, 3.0], 4, 8) == [4, 4]


def test_owl_for_groups_rounds_to_whole_weights_and_stays_inside_the_group() -> None:
    """2 wide: 0, 1, 2 less 1."""
    for spread, outliers, removed, group, lost in (
        (2.0, [0.0, 5.0, 10.0], 4, 8, [5, 4, 3]), (0.08, [0.0, 5.0, 10.0], 4, 8, [4, 4, 4]),
        (4.0, [0.0, 10.0], 1, 2, [1, 1]),
    ):  # fmt: skip
        with mock.patch.object(methods, "SPREAD_OF_GROUPS", spread):
            assert owl_groups(outliers, removed, group) == lost


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outliers_are_counted_over_all_matrices_of_a_block(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    first, second = torch.randn(9, 20).pow(5).to(dtype), torch.randn(30, 7).t().to(dtype)
    norms = torch.rand(20) * 10
    with mock.patch.multiple(methods, OUTLIER_FACTOR=2.0, SCRATCH_BYTES=500):
        found = outlier_percentage([(first, Wanda(norms)), (second, Magnitude())])
    scores = np.concatenate(
        [
            reference.wanda_scores(reference.values(first), norms.numpy()).reshape(-1),
            reference.magnitude_scores(reference.values(second)).reshape(-1),
        ]
    )
    above = sum(score > 2 * scores.astype(float).mean() for score in scores)
    assert found.item() == pytest.approx(100 * above / len(scores))
