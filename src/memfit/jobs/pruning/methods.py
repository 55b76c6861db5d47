"""The methods as the engine sees them: which statistic they need, what they do, how much of a block goes.

An expert that saw no token has no statistic; its weights go by their magnitude.

OWL (arXiv 2310.05175) keeps more of the blocks that have more outliers: scores far above their block's mean. The
blocks' sparsities are spread over 2 * `spread` around the ratio that is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from memfit.jobs.pruning.observation import SharedInput, Statistic
from memfit.jobs.pruning.selection import (
    SCRATCH_BYTES,
    Magnitude,
    Ria,
    Scorer,
    Wanda,
    parts_of_rows,
    prune_groups_,
    prune_matrix_,
    prune_rows_,
    prune_variant_,
    removals,
)
from memfit.jobs.pruning.settings import PruneSettings
from memfit.jobs.pruning.sparsegpt import Sweeps, prune_with_updates_
from memfit.jobs.pruning.statistics import ColumnNorms, Gram
from memfit.jobs.settings import Sparsity


class Method(Protocol):
    @property
    def needs_data(self) -> bool: ...

    def statistic(self, samples: int, columns: int, device: torch.device) -> Statistic: ...

    def prune(self, weights: Sequence[Tensor], group: SharedInput | None, sparsity: Sparsity) -> tuple[str, ...]:
        """In place; what should be known of it."""
        ...


def method_of(settings: PruneSettings) -> Method:
    method = settings.workload.method
    if method == "magnitude":
        return ByMagnitude()
    if method == "sparsegpt":
        return WithUpdates()
    return ByNorms(method, settings.use_variant)


class ByMagnitude:
    needs_data = False

    def statistic(self, samples: int, columns: int, device: torch.device) -> Statistic:
        raise AssertionError("magnitude looks at no inputs")

    def prune(self, weights: Sequence[Tensor], group: SharedInput | None, sparsity: Sparsity) -> tuple[str, ...]:
        for weight in weights:
            if sparsity.group is not None and sparsity.removed is not None:
                prune_groups_(weight, Magnitude(), sparsity.removed, sparsity.group)
            else:
                prune_matrix_(weight, removals(weight.numel(), sparsity.ratio))
        return ()


class ByNorms:
    """Wanda and RIA: norms of the inputs' columns, rows by rows."""

    needs_data = True

    def __init__(self, method: str, use_variant: bool = False) -> None:
        self._ria = method == "ria"
        self._variant = use_variant

    def statistic(self, samples: int, columns: int, device: torch.device) -> Statistic:
        return ColumnNorms(samples, columns, device)

    def prune(self, weights: Sequence[Tensor], group: SharedInput | None, sparsity: Sparsity) -> tuple[str, ...]:
        assert group is not None and isinstance(group.statistic, ColumnNorms)
        squared = group.statistic.summary() if group.seen != 0 else torch.ones_like(group.statistic.summary())
        for weight in weights:
            scorer = Ria(weight, squared) if self._ria else Wanda(squared)
            if sparsity.group is not None and sparsity.removed is not None:
                prune_groups_(weight, scorer, sparsity.removed, sparsity.group)
            elif self._variant:
                prune_variant_(weight, scorer, sparsity.ratio)
            else:
                prune_rows_(weight, scorer, removals(weight.shape[1], sparsity.ratio))
        return ()


class WithUpdates:
    """SparseGPT: the kept weights make up for those that go."""

    needs_data = True

    def __init__(self) -> None:
        self._sweeps = Sweeps()

    def statistic(self, samples: int, columns: int, device: torch.device) -> Statistic:
        return Gram(samples, columns, device)

    def prune(self, weights: Sequence[Tensor], group: SharedInput | None, sparsity: Sparsity) -> tuple[str, ...]:
        assert group is not None and isinstance(group.statistic, Gram)
        statistic = group.statistic
        if group.seen == 0 or (sparsity.group is not None and sparsity.removed in (0, sparsity.group)):
            return ByMagnitude().prune(weights, group, sparsity)
        groups = (sparsity.removed, sparsity.group) if sparsity.removed and sparsity.group else None
        outcome = prune_with_updates_(
            weights,
            statistic.finish(),
            ratio=sparsity.ratio if groups is None else None,
            groups=groups,
            names=[matrix.name for matrix in group.matrices],
            sweeps=self._sweeps,
        )
        return outcome.warnings


OUTLIER_FACTOR = 5.0
SPREAD = 0.08
SPREAD_OF_GROUPS = 1.0
LEAST, MOST = 0.01, 0.99
"""A block is neither left whole nor emptied."""


def owl(outliers: Sequence[float], ratio: float) -> list[float]:
    """The sparsity of each block from its percentage of outliers."""
    kept = _spread_around_zero(outliers, 2 * SPREAD)
    return [min(max(ratio - more, LEAST), MOST) for more in kept]


def owl_groups(outliers: Sequence[float], removed: int, group: int) -> list[int]:
    """How many of each group of columns a block loses, one more or less than others before rounding."""
    kept = _spread_around_zero(outliers, SPREAD_OF_GROUPS)
    return [min(max(removed - round(more), 1), group - 1) for more in kept]


def _spread_around_zero(values: Sequence[float], width: float) -> list[float]:
    low, high = min(values), max(values)
    if high == low:
        return [0.0] * len(values)
    spread = [width * (value - low) / (high - low) for value in values]
    mean = sum(spread) / len(spread)
    return [value - mean for value in spread]


def outlier_percentage(matrices: Sequence[tuple[Tensor, Scorer]]) -> Tensor:
    """Of all scores of a block's matrices together, the percentage above `OUTLIER_FACTOR` times their mean. It stays on
    the device: ask for all blocks' values at once, after the last."""
    weights = sum(weight.numel() for weight, _ in matrices)
    total = torch.zeros((), dtype=torch.float64, device=matrices[0][0].device)
    for weight, scorer in matrices:
        for rows in parts_of_rows(weight, scorer.bytes_per_weight + 8, SCRATCH_BYTES):
            total += scorer(rows).sum(dtype=torch.float64)
    threshold = (total * (OUTLIER_FACTOR / weights)).float()
    above = torch.zeros((), dtype=torch.int64, device=total.device)
    for weight, scorer in matrices:
        for rows in parts_of_rows(weight, scorer.bytes_per_weight + 9, SCRATCH_BYTES):
            above += (scorer(rows) > threshold).sum()
    return above.double() * (100 / weights)
