"""The methods as the engine sees them: which statistic of the inputs they need, and what they do with it.

An expert that saw no token has no statistic; its weights go by their magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from memfit.jobs.pruning.observation import Group, Statistic
from memfit.jobs.pruning.scores import Magnitude, Ria, Scorer, Wanda
from memfit.jobs.pruning.selection import prune_groups_, prune_matrix_, prune_rows_, prune_variant_, removals
from memfit.jobs.pruning.settings import PruneSettings, Sparsity
from memfit.jobs.pruning.sparsegpt import Sweeps, prune_with_updates_
from memfit.jobs.pruning.statistics import ColumnNorms, Gram


class Norms(ColumnNorms):
    def summary(self) -> Tensor:
        return self.mean()


class Products(Gram):
    def __init__(self, samples: int, columns: int, device: torch.device) -> None:
        super().__init__(columns, device)
        self.samples = samples

    def summary(self) -> Tensor:
        return self.matrix.diagonal()


class Method(Protocol):
    @property
    def needs_data(self) -> bool: ...

    def statistic(self, samples: int, columns: int, device: torch.device) -> Statistic: ...

    def prune(self, weights: Sequence[Tensor], group: Group | None, sparsity: Sparsity) -> tuple[str, ...]:
        """In place; what should be known of it."""
        ...


def method_of(settings: PruneSettings) -> Method:
    if settings.method == "magnitude":
        return ByMagnitude()
    if settings.method == "sparsegpt":
        return WithUpdates()
    return ByNorms(settings.method, settings.use_variant)


class ByMagnitude:
    needs_data = False

    def statistic(self, samples: int, columns: int, device: torch.device) -> Statistic:
        raise AssertionError("magnitude looks at no inputs")

    def prune(self, weights: Sequence[Tensor], group: Group | None, sparsity: Sparsity) -> tuple[str, ...]:
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
        return Norms(samples, columns, device)

    def scorer(self, weight: Tensor, squared: Tensor) -> Scorer:
        return Ria(weight, squared) if self._ria else Wanda(squared)

    def prune(self, weights: Sequence[Tensor], group: Group | None, sparsity: Sparsity) -> tuple[str, ...]:
        assert group is not None and isinstance(group.statistic, Norms)
        squared = group.statistic.mean() if group.seen != 0 else torch.ones_like(group.statistic.mean())
        for weight in weights:
            self._prune(weight, self.scorer(weight, squared), sparsity)
        return ()

    def _prune(self, weight: Tensor, scorer: Scorer, sparsity: Sparsity) -> None:
        if sparsity.group is not None and sparsity.removed is not None:
            prune_groups_(weight, scorer, sparsity.removed, sparsity.group)
        elif self._variant:
            prune_variant_(weight, scorer, sparsity.ratio)
        else:
            prune_rows_(weight, scorer, removals(weight.shape[1], sparsity.ratio))


class WithUpdates:
    """SparseGPT: the kept weights make up for those that go."""

    needs_data = True

    def __init__(self) -> None:
        self._sweeps = Sweeps()

    def statistic(self, samples: int, columns: int, device: torch.device) -> Statistic:
        return Products(samples, columns, device)

    def prune(self, weights: Sequence[Tensor], group: Group | None, sparsity: Sparsity) -> tuple[str, ...]:
        assert group is not None and isinstance(group.statistic, Products)
        statistic = group.statistic
        if group.seen == 0 or (sparsity.group is not None and sparsity.removed in (0, sparsity.group)):
            return ByMagnitude().prune(weights, group, sparsity)
        groups = (sparsity.removed, sparsity.group) if sparsity.removed and sparsity.group else None
        outcome = prune_with_updates_(
            weights, statistic.finish(statistic.samples), ratio=sparsity.ratio if groups is None else None,
            groups=groups, names=[matrix.name for matrix in group.matrices], sweeps=self._sweeps,
        )  # fmt: skip
        return outcome.warnings
