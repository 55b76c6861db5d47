"""The methods as the engine sees them: which statistic they need, what they do, how much of a block goes.

Statistics are gathered while the blocks run, from inputs as they are: a 16-bit input is never copied to fp32 on a GPU.
An expert that saw no token has none; its weights go by their magnitude.

OWL (arXiv 2310.05175) keeps more of the blocks that have more outliers: scores far above their block's mean. The
blocks' sparsities are spread over 2 * `spread` around the ratio that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from memfit.errors import InputError
from memfit.jobs.pruning.observation import SharedInput, Statistic
from memfit.jobs.pruning.selection import (
    SCRATCH_BYTES,
    Magnitude,
    Ria,
    Scorer,
    Wanda,
    check_finite,
    parts_of_rows,
    prune_groups_,
    prune_matrix_,
    prune_rows_,
    prune_variant_,
    removals,
)
from memfit.jobs.pruning.settings import PruneSettings
from memfit.jobs.pruning.sparsegpt import ColumnSweeps, prune_with_updates_
from memfit.jobs.settings import Sparsity
from memfit.units import MiB


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
            if sparsity.groups is not None:
                prune_groups_(weight, Magnitude(), *sparsity.groups)
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
            if sparsity.groups is not None:
                prune_groups_(weight, scorer, *sparsity.groups)
            elif self._variant:
                prune_variant_(weight, scorer, sparsity.ratio)
            else:
                prune_rows_(weight, scorer, removals(weight.shape[1], sparsity.ratio))
        return ()


class WithUpdates:
    """SparseGPT: the kept weights make up for those that go."""

    needs_data = True

    def __init__(self) -> None:
        self._sweeps = ColumnSweeps()

    def statistic(self, samples: int, columns: int, device: torch.device) -> Statistic:
        return Gram(samples, columns, device)

    def prune(self, weights: Sequence[Tensor], group: SharedInput | None, sparsity: Sparsity) -> tuple[str, ...]:
        assert group is not None and isinstance(group.statistic, Gram)
        if group.seen == 0 or (sparsity.group is not None and sparsity.removed in (0, sparsity.group)):
            return ByMagnitude().prune(weights, group, sparsity)
        names = [matrix.name for matrix in group.matrices]
        return prune_with_updates_(weights, group.statistic.finish(), sparsity, names=names, sweeps=self._sweeps)


# -- statistics of a matrix's inputs -----------------------------------------------------------------------------------

UPCAST_BYTES = 32 * MiB
LONGEST_STRETCH = 128
"""Tokens whose squares are summed by one thread block of a GPU."""
PANEL = 2048
"""Columns of X^T X computed at a time: 16 x 8 tiles of 128 x 256 fill a large GPU once."""


class ColumnNorms:
    """The squared norm of each column over the tokens of each sequence, one row a sequence.

    Rows instead of a running sum: processes that hold different sequences exchange rows, and all come to the same bits.
    """

    def __init__(self, samples: int, columns: int, device: torch.device | str) -> None:
        self.rows = torch.zeros(samples, columns, dtype=torch.float32, device=device)

    @property
    def sums(self) -> Sequence[Tensor]:
        return (self.rows,)

    def add(self, x: Tensor, first_sample: int) -> None:
        """x is [sequences, tokens, columns]. Stretches of a sequence first: over all of its tokens at once a GPU shares
        the sum between thread blocks, in a buffer that can be larger than x."""
        stretch = _longest_stretch(x.shape[1])
        norms = torch.linalg.vector_norm(x.view(len(x), -1, stretch, x.shape[2]), dim=2, dtype=torch.float32)
        torch.sum(norms.square_(), 1, out=self.rows[first_sample : first_sample + len(x)])

    def add_tokens(self, x: Tensor, sequence_of_token: Tensor) -> None:
        """x is [tokens, columns], the tokens of any sequences in any order (an expert's). Summed by a product with
        zeros and ones: scattering into rows would add in an order that changes from run to run."""
        samples = torch.arange(len(self.rows), device=x.device).unsqueeze(1)
        step = max(1, UPCAST_BYTES // (4 * (x.shape[1] + len(self.rows))))
        for part, sequence in zip(x.split(step), sequence_of_token.split(step), strict=True):
            self.rows.addmm_((sequence == samples).float(), part.to(torch.float32, copy=True).square_())

    def summary(self) -> Tensor:
        """The mean over all sequences, summed in fp64 and rounded once."""
        return (self.rows.sum(0, dtype=torch.float64) / len(self.rows)).float()


@cache
def _longest_stretch(tokens: int) -> int:
    """The largest divisor up to `LONGEST_STRETCH`; a number that has only small ones is left whole."""
    largest = next(size for size in range(min(tokens, LONGEST_STRETCH), 0, -1) if tokens % size == 0)
    return largest if largest >= 16 else tokens


class Gram:
    """X^T X in fp32: exact products of 16-bit inputs, summed by tensor cores (to some 2e-5 of the whole on an H200).

    The result is symmetric, so what lies below the panels' diagonal blocks is mirrored once, at the end.
    """

    def __init__(self, samples: int, columns: int, device: torch.device | str) -> None:
        self.samples = samples
        self.matrix = torch.zeros(columns, columns, dtype=torch.float32, device=device)

    @property
    def sums(self) -> Sequence[Tensor]:
        return (self.matrix,)

    def add(self, x: Tensor, first_sample: int = 0) -> None:
        """x is [..., columns]; of which sequences does not matter."""
        tokens = x.reshape(-1, x.shape[-1])
        if len(tokens) == 0:
            return
        if tokens.dtype == torch.float32 or tokens.device.type == "cpu":
            for part in tokens.split(max(1, UPCAST_BYTES // (4 * tokens.shape[1]))):
                for panel, left, right in self._products(part.float()):
                    panel.addmm_(left, right)
            return
        for panel, left, right in self._products(tokens):
            if panel.is_meta:  # without data dtypes need not agree, and torch 2.11 lacks the form below
                torch.addmm(panel, left, right, out=panel)
            else:
                torch.addmm(panel, left, right, out_dtype=torch.float32, out=panel)

    def add_tokens(self, x: Tensor, sequence_of_token: Tensor) -> None:
        self.add(x)

    def _products(self, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for start, end in self._panels():
            yield self.matrix[:end, start:end], tokens[:, :end].mT, tokens[:, start:end]

    def _panels(self) -> Iterator[tuple[int, int]]:
        columns = len(self.matrix)
        for start in range(0, columns, PANEL):
            yield start, min(start + PANEL, columns)

    def summary(self) -> Tensor:
        return self.matrix.diagonal()

    def finish(self) -> Tensor:
        """The whole matrix times 2/samples, as SparseGPT scales it, in place of the sum."""
        self.matrix.mul_(2 / self.samples)
        for start, end in self._panels():
            self.matrix[end:, start:end].copy_(self.matrix[start:end, end:].mT)
        return self.matrix


# -- how much of each block goes ---------------------------------------------------------------------------------------

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


# -- block reconstruction ----------------------------------------------------------------------------------------------

Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""One pass over inputs and the dense block's outputs; called once an epoch, and `steps` long each time."""
EPOCHS = 5
LEARNING_RATE, BETAS = 2e-4, (0.9, 0.95)


def reconstruct_(
    weights: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    forward: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    batches: Batches,
    steps: int,
) -> None:
    """Tune kept weights in place, so that a block answers as the dense one did (arXiv 2406.15524).

    Adam on an fp32 copy of them, under autocast where the model has 16 bits; mean squared error to the dense block's
    outputs; the learning rate falls linearly to zero. 16 bytes a weight: copy, gradient, two moments. A removed weight
    is zero in the copy and its gradient is set to zero, which is W * mask in the forward without another copy of W:
    Adam moves nothing whose gradient was always zero. Same inputs in the same order give the same weights on a CPU; on
    a GPU as far as the kernels of attention's backward do.

    `masks` (True is removed) has those of the pruned ones; a weight without a mask is
    tuned whole. `forward` runs the block on inputs with the weights it is given in place of its own."""
    first = next(iter(weights.values()))
    device, dtype = first.device, first.dtype
    copies = {name: _copy(weight, masks.get(name)) for name, weight in weights.items()}
    optimizer = torch.optim.Adam(copies.values(), lr=LEARNING_RATE, betas=BETAS, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    taken, total = 0, steps * EPOCHS
    with torch.enable_grad():
        for _ in range(EPOCHS):
            for inputs, targets in batches():
                for group in optimizer.param_groups:
                    group["lr"] = LEARNING_RATE * (1 - taken / total)
                with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                    outputs = forward(copies, inputs)
                error = (outputs.float() - targets.float()).square().mean()
                scaler.scale(error).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                taken += 1
    try:
        check_finite(copies)
    except InputError as error:
        raise InputError(f"block reconstruction ran away: {error.message}", hint="leave --reconstruct out") from error
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(copies[name])


def _copy(weight: Tensor, mask: Tensor | None) -> Tensor:
    copy = weight.detach().to(torch.float32, copy=True)
    if mask is None:
        return copy.requires_grad_()

    def clear(tuned: Tensor) -> None:
        assert tuned.grad is not None
        tuned.grad.masked_fill_(mask, 0.0)

    copy.masked_fill_(mask, 0.0).requires_grad_().register_post_accumulate_grad_hook(clear)
    return copy
