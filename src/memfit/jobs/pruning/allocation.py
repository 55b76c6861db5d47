"""How much of each block goes.

OWL (arXiv 2310.05175) keeps more of the blocks that have more outliers: scores far above their block's mean. The
blocks' sparsities are spread over 2 * `spread` around the ratio that is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memfit.jobs.pruning.scores import SCRATCH_BYTES, Scorer, parts_of_rows

OUTLIER_FACTOR = 5.0
SPREAD = 0.08
LEAST, MOST = 0.01, 0.99
"""A block is neither left whole nor emptied."""


def uniform(ratio: float, blocks: int) -> list[float]:
    return [ratio] * blocks


def owl(outliers: Sequence[float], ratio: float, spread: float = SPREAD) -> list[float]:
    """The sparsity of each block from its percentage of outliers."""
    kept = _spread_around_zero(outliers, 2 * spread)
    return [min(max(ratio - more, LEAST), MOST) for more in kept]


def owl_groups(outliers: Sequence[float], removed: int, group: int, spread: float = 1.0) -> list[int]:
    """How many of each group of columns a block loses. `spread`, from the fewest to the most, is in weights of a group
    before rounding."""
    kept = _spread_around_zero(outliers, spread)
    return [min(max(removed - round(more), 1), group - 1) for more in kept]


def _spread_around_zero(values: Sequence[float], width: float) -> list[float]:
    low, high = min(values), max(values)
    if high == low:
        return [0.0] * len(values)
    spread = [width * (value - low) / (high - low) for value in values]
    mean = sum(spread) / len(spread)
    return [value - mean for value in spread]


def outlier_percentage(
    matrices: Sequence[tuple[Tensor, Scorer]],
    factor: float = OUTLIER_FACTOR,
    *,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Tensor:
    """Of all scores of a block's matrices together, the percentage above `factor` times their mean. It stays on the
    device: ask for all blocks' values at once, after the last."""
    weights = sum(weight.numel() for weight, _ in matrices)
    total = torch.zeros((), dtype=torch.float64, device=matrices[0][0].device)
    for weight, scorer in matrices:
        for rows in parts_of_rows(weight, scorer.bytes_per_weight + 8, scratch_bytes):
            total += scorer(rows).sum(dtype=torch.float64)
    threshold = (total * (factor / weights)).float()
    above = torch.zeros((), dtype=torch.int64, device=total.device)
    for weight, scorer in matrices:
        for rows in parts_of_rows(weight, scorer.bytes_per_weight + 9, scratch_bytes):
            above += (scorer(rows) > threshold).sum()
    return above.double() * (100 / weights)
