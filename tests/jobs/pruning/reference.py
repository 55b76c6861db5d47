"""Pruning as the papers define it, written to be read: loops and stable sorts over lists, one weight at a time.

fp32 arithmetic is done in numpy's float32 scalars, sums exactly (`math.fsum`) and rounded once. SparseGPT is done in
fp64 by the definition: factorise H, invert it, factorise the inverse. Masks are True where a weight is removed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
Mask = NDArray[np.bool_]


def values(tensor: torch.Tensor) -> Matrix:
    """fp16 and bf16 values as fp32 ones, which hold them exactly."""
    return tensor.detach().float().cpu().contiguous().numpy()


def removed_by(before: torch.Tensor, after: torch.Tensor, mask: Mask) -> bool:
    """Whether `after` is `before` with exactly the weights of the mask set to zero."""
    expected = before.clone()
    expected[torch.from_numpy(mask).to(before.device)] = 0
    return torch.equal(expected, after)


# -- statistics and scores ---------------------------------------------------------------------------------------------


def mean_squared_norms(sequences: Sequence[Matrix]) -> list[float]:
    """For each column, the mean over sequences of the squared norm over tokens."""
    columns = sequences[0].shape[1]
    return [
        math.fsum(float(value) ** 2 for x in sequences for value in x[:, column]) / len(sequences)
        for column in range(columns)
    ]


def magnitude_scores(weight: Matrix) -> Matrix:
    return _each(weight, lambda row, column: abs(weight[row, column]))


def wanda_scores(weight: Matrix, squared_norms: NDArray[np.float32]) -> Matrix:
    return _each(weight, lambda row, column: abs(weight[row, column]) * np.sqrt(squared_norms[column]))


def ria_scores(weight: Matrix, squared_norms: NDArray[np.float32], power: float = 0.5) -> Matrix:
    column_sums = [_rounded_sum(column) or np.float32(1) for column in weight.T]
    row_sums = [_rounded_sum(row) or np.float32(1) for row in weight]

    def score(row: int, column: int) -> np.float32:
        size = abs(weight[row, column])
        relative = size / column_sums[column] + size / row_sums[row]
        return np.float32(relative * np.float32(math.pow(float(squared_norms[column]), power / 2)))

    return _each(weight, score)


def _each(weight: Matrix, score: Callable[[int, int], np.float32]) -> Matrix:
    rows, columns = weight.shape
    return np.array([[score(row, column) for column in range(columns)] for row in range(rows)], dtype=np.float32)


def _rounded_sum(some: NDArray[np.float32]) -> np.float32:
    return np.float32(math.fsum(abs(float(value)) for value in some))


# -- selection ---------------------------------------------------------------------------------------------------------


def lowest(scores: Sequence[float], count: int) -> list[int]:
    """Python's sort is stable: of equal scores the first stays first."""
    return sorted(range(len(scores)), key=lambda index: scores[index])[:count]


def by_rows(scores: Matrix, count: int) -> Mask:
    mask = np.zeros(scores.shape, dtype=bool)
    for row, of_row in enumerate(scores):
        mask[row, lowest(of_row.tolist(), count)] = True
    return mask


def by_matrix(scores: Matrix, count: int) -> Mask:
    mask = np.zeros(scores.size, dtype=bool)
    mask[lowest(scores.reshape(-1).tolist(), count)] = True
    return mask.reshape(scores.shape)


def by_groups(scores: Matrix, removed: int, group: int) -> Mask:
    mask = np.zeros(scores.shape, dtype=bool)
    for row, of_row in enumerate(scores):
        for start in range(0, len(of_row), group):
            for index in lowest(of_row[start : start + group].tolist(), removed):
                mask[row, start + index] = True
    return mask


def by_variant(scores: Matrix, ratio: float) -> Mask:
    """One alpha for the matrix: each row loses the scores up to the one that brings their sum to alpha of the row's."""
    alpha, low, high = 0.4, 0.0, 0.8
    mask = _within_share(scores, alpha)
    while abs(mask.sum() / mask.size - ratio) > 0.001 and high - low >= 0.001:
        if mask.sum() / mask.size > ratio:
            alpha, high = (alpha + low) / 2, alpha
        else:
            alpha, low = (alpha + high) / 2, alpha
        mask = _within_share(scores, alpha)
    return mask


def _within_share(scores: Matrix, alpha: float) -> Mask:
    mask = np.zeros(scores.shape, dtype=bool)
    for row, of_row in enumerate(scores):
        ordered = sorted(of_row.tolist())
        sums = list(accumulate(ordered))
        within = sum(each <= alpha * sums[-1] for each in sums)
        if within:
            mask[row] = of_row <= np.float32(ordered[within - 1])
    return mask


# -- SparseGPT ---------------------------------------------------------------------------------------------------------


def sparsegpt(
    weight: NDArray[np.float64],
    hessian: NDArray[np.float64],
    *,
    ratio: float | None = None,
    groups: tuple[int, int] | None = None,
    damping: float = 0.01,
    block: int = 128,
) -> tuple[NDArray[np.float64], Mask]:
    """The pruned matrix and its mask. `hessian` is 2/samples * X^T X."""
    weight, hessian = weight.copy(), hessian.copy()
    rows, columns = weight.shape
    for column in range(columns):
        if hessian[column, column] == 0:
            hessian[column, column] = 1
            weight[:, column] = 0
    hessian += damping * np.mean(np.diag(hessian)) * np.eye(columns)
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    chosen = np.zeros(weight.shape, dtype=bool)
    for start in range(0, columns, block):
        end = min(start + block, columns)
        if ratio is not None:
            scores = weight[:, start:end] ** 2 / np.diag(upper)[start:end] ** 2
            chosen[:, start:end] = by_matrix(scores, int(rows * (end - start) * ratio))
        errors = np.zeros((rows, end - start))
        for column in range(start, end):
            if groups is not None and column % groups[1] == 0:
                here = slice(column, column + groups[1])
                chosen[:, here] = by_groups(weight[:, here] ** 2 / np.diag(upper)[here] ** 2, *groups)
            kept = np.where(chosen[:, column], 0, weight[:, column])
            errors[:, column - start] = (weight[:, column] - kept) / upper[column, column]
            weight[:, column:end] -= np.outer(errors[:, column - start], upper[column, column:end])
            weight[:, column] = kept
        weight[:, end:] -= errors @ upper[start:end, end:]
    return weight, chosen
