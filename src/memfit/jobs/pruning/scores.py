"""How much a weight matters, by method: the lower the score, the sooner it goes.

A scorer is called with some rows of a matrix and gives their scores in fp32, so that no score of a whole matrix ever
exists. Sums that a score needs are taken in fp64 and rounded once: whatever the order of the sum, on a GPU or a CPU,
the score has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from memfit.errors import InputError
from memfit.units import MiB

SCRATCH_BYTES = 32 * MiB
"""What pruning may use beside weights and statistics, whatever the size of a matrix (one row is the least)."""
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Scorer(Protocol):
    @property
    def bytes_per_weight(self) -> int:
        """Scratch for one weight while it is scored, the score included."""
        ...

    def __call__(self, rows: Tensor) -> Tensor:
        """Finite, not negative, fp32, contiguous, of the shape of `rows`."""
        ...


class Magnitude:
    """|W|."""

    bytes_per_weight = 4

    def __call__(self, rows: Tensor) -> Tensor:
        return _as_fp32(rows).abs_()


class Wanda:
    """|W_ij| * sqrt(s_j), with s_j the mean over sequences of the squared norm of input j (arXiv 2306.11695)."""

    bytes_per_weight = 8  # a CPU makes an fp32 copy of 16-bit rows first

    def __init__(self, squared_norms: Tensor) -> None:
        self._root = squared_norms.double().sqrt().float()  # MKL's fp32 root may be off by one bit

    def __call__(self, rows: Tensor) -> Tensor:
        scores = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        return torch.mul(rows, self._root, out=scores).abs_()


class Ria:
    """(|W_ij| / sum_i |W_ij| + |W_ij| / sum_j |W_ij|) * sqrt(s_j)^a (ICLR 2024), in fp32; a row or a column of zeros
    scores zero."""

    bytes_per_weight = 12

    def __init__(
        self, weight: Tensor, squared_norms: Tensor, power: float = 0.5, *, scratch_bytes: int = SCRATCH_BYTES
    ) -> None:
        sums = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
        # A GPU shares longer columns between thread blocks, in a buffer many times the size of the rows.
        for rows in parts_of_rows(weight, 16, min(scratch_bytes, 16 * weight.shape[1] * 512)):
            sums += rows.double().abs_().sum(0)
        self._column_sums = _divisor(sums)
        self._scale = squared_norms.double().pow(power / 2).float()

    def __call__(self, rows: Tensor) -> Tensor:
        magnitudes = _as_fp32(rows).abs_()
        row_sums = _divisor(magnitudes.sum(1, keepdim=True, dtype=torch.float64))
        scores = magnitudes / self._column_sums
        return scores.add_(magnitudes.div_(row_sums)).mul_(self._scale)


def parts_of_rows(
    weight: Tensor, bytes_per_weight: int, scratch_bytes: int, bytes_per_row: int = 0
) -> Iterator[Tensor]:
    """Views of consecutive rows, as many at a time as their scratch has room for, and one at least."""
    if weight.dim() != 2 or weight.dtype not in WEIGHT_DTYPES:
        kind = str(weight.dtype).removeprefix("torch.")
        raise InputError(f"cannot prune a {weight.dim()}-D {kind} weight", hint="matrices in fp32, fp16 or bf16 can be")
    each = max(1, weight.shape[1] * bytes_per_weight + bytes_per_row)
    step = max(1, scratch_bytes // each)
    for first in range(0, weight.shape[0], step):
        yield weight[first : first + step]


def _as_fp32(rows: Tensor) -> Tensor:
    """A copy whose rows lie one after the other, whatever the strides of the original."""
    return torch.empty(rows.shape, dtype=torch.float32, device=rows.device).copy_(rows)


def _divisor(sums: Tensor) -> Tensor:
    rounded = sums.float()
    return rounded.masked_fill_(rounded == 0, 1.0)
