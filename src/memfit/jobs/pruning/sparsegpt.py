"""SparseGPT (arXiv 2301.00774): remove weights and let the kept ones make up for them.

With H = X^T X, the columns of W are gone through from left to right; what is removed from a column is made up for by
the columns to its right, along the rows of U, the upper Cholesky factor of H^-1 (H^-1 = U^T U). Columns are taken in
blocks: inside a block every column updates the rest of the block, and the block as a whole then updates what follows.

Here U comes without H^-1: reversing rows and columns of H, factorising (L L^T) and inverting L gives U reversed. That
is one factorisation and one triangular solve within two matrices of H's size, and loses less precision.
Matrices that share an input are stacked and swept together; each has thresholds of its own. A column block loses
exactly int(size * ratio) weights, ties by rows and then columns (the public code removes one more, and all ties).
W lies transposed, so that a column is contiguous. Rows of U are divided by their diagonal, so that the update by a
removed weight is that weight times a row, and sets the weight itself to exactly zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from memfit.errors import InputError
from memfit.jobs.pruning.selection import check_finite, lowest_of_all, removals
from memfit.jobs.settings import Sparsity

DAMPING = 0.01
MOST_DAMPING = 100.0
BLOCK = 128
Groups = tuple[int, int]
"""How many of how many consecutive columns are removed."""


def prune_with_updates_(
    weights: Sequence[Tensor],
    hessian: Tensor,
    sparsity: Sparsity,
    *,
    names: Sequence[str] = (),
    block: int = BLOCK,
    sweeps: ColumnSweeps | None = None,
) -> tuple[str, ...]:
    """Prune matrices [rows, columns] that share an input, in place, by a ratio or by groups of columns. The kept
    weights make up for those that go. `hessian` is used up. What should be known of it is given back.
    Keep one `sweeps` for a whole model: its CUDA graphs serve all blocks of the same shape."""
    columns = len(hessian)
    names = names or [f"matrix {number}" for number in range(len(weights))]
    check_finite({**dict(zip(names, weights, strict=True)), f"inputs of {names[0]}": hessian.diagonal()})
    bounds = [0, *accumulate(len(weight) for weight in weights)]  # of each matrix in the stack
    stacked = torch.empty(columns, bounds[-1], dtype=torch.float32, device=hessian.device)
    for weight, (start, end) in zip(weights, pairwise(bounds), strict=True):
        stacked[:, start:end].copy_(weight.mT)
    dead = hessian.diagonal() == 0
    hessian.diagonal().masked_fill_(dead, 1.0)
    stacked.masked_fill_(dead.unsqueeze(1), 0.0)
    warnings = _factorise_(hessian, names)
    _sweep_(stacked, hessian, bounds, sparsity, block, sweeps or ColumnSweeps())
    for weight, (start, end) in zip(weights, pairwise(bounds), strict=True):
        weight.copy_(stacked[:, start:end].mT)
    return warnings


# -- factorisation -----------------------------------------------------------------------------------------------------


def _factorise_(hessian: Tensor, names: Sequence[str]) -> tuple[str, ...]:
    """Put U in the place of H. Beside it there is never more than one matrix of its size."""
    damping = DAMPING
    mean = hessian.diagonal().mean()
    while not _into_lower_factor(reversed_ := hessian.flip(0, 1), mean * damping):
        del reversed_
        damping *= 10
        if damping > MOST_DAMPING:
            raise InputError(
                f"inputs of {names[0]}: X^T X is not positive definite, even with {damping / 10:g} of its mean added",
                hint="the statistics of this matrix are damaged; prune it by --prune-method wanda",
            )
    hessian.zero_().fill_diagonal_(1.0)
    torch.linalg.solve_triangular(reversed_.mT, hessian, upper=False, out=hessian)
    del reversed_
    hessian.copy_(hessian.flip(0, 1))
    if damping == DAMPING:
        return ()
    return (f"{', '.join(names)}: X^T X was not positive definite with damping {DAMPING:g}; {damping:g} was used",)


def _into_lower_factor(matrix: Tensor, added: Tensor) -> bool:
    """The factor in the place of a symmetric matrix, in LAPACK's order of columns: the transpose of what is passed."""
    matrix.diagonal().add_(added)
    info = torch.zeros((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(matrix.mT, out=(matrix.mT, info))
    return _succeeded(info)


def _succeeded(info: Tensor) -> bool:
    """The only question that this module asks of the device, beside `check_finite`."""
    return int(info.item()) == 0


# -- the sweep ---------------------------------------------------------------------------------------------------------


def _sweep_(
    stacked: Tensor, factor: Tensor, bounds: Sequence[int], sparsity: Sparsity, block: int, sweeps: ColumnSweeps
) -> None:
    (columns, rows), groups = stacked.shape, sparsity.groups
    diagonal = factor.diagonal().clone().unsqueeze(1)
    factor.div_(diagonal)
    diagonal.square_()
    width = block if groups is None else max(block // groups[1], 1) * groups[1]
    for start in range(0, columns, width):
        end = min(start + width, columns)
        sweep = sweeps.find(end - start, rows, stacked.device, groups)
        sweep.weights.copy_(stacked[start:end])
        sweep.factor.copy_(factor[start:end, start:end])
        sweep.diagonal.copy_(diagonal[start:end])
        for first, last in pairwise(bounds) if groups is None else ():
            sweep.choose(first, last, sparsity.ratio)
        sweep.run()
        stacked[start:end].copy_(sweep.weights)
        stacked[end:].addmm_(factor[start:end, end:].mT, sweep.errors, alpha=-1)


class ColumnSweep:
    """The steps through a block of columns, on buffers that stay in one place so that a CUDA graph can repeat them.

    A step is two kernels of a few microseconds; launching them one by one from Python would take many times that.
    """

    def __init__(self, width: int, rows: int, device: torch.device, groups: Groups | None) -> None:
        def buffer(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        self.weights, self.removed, self.errors = buffer(width, rows), buffer(width, rows), buffer(width, rows)
        self.factor, self.diagonal = buffer(width, width), buffer(width, 1)
        """`removed` is 1 or 0; `errors` is what was removed; `diagonal` is squared."""
        self._groups = groups
        if groups is not None:
            self._scores = buffer(groups[1], rows)
            self._lowest = torch.empty(1, rows, dtype=torch.int64, device=device)
        self._ran = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def choose(self, first: int, last: int, ratio: float) -> None:
        """Unstructured: mark the lowest of one matrix's rows in this block, by the weights as they come in."""
        own = self.weights[:, first:last].mT
        scores = torch.mul(own, own, out=torch.empty(own.shape, dtype=torch.float32, device=own.device))
        scores.div_(self.diagonal.mT)
        self.removed[:, first:last].copy_(lowest_of_all(scores, removals(scores.numel(), ratio)).mT)

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        if self._ran and self.weights.device.type == "meta":
            return  # as on a GPU, where a replay takes no memory
        self._steps()
        if self.weights.device.type == "cuda":
            self._graph = self._recorded()
        self._ran = True

    def _steps(self) -> None:
        for column in range(len(self.weights)):
            if self._groups is not None and column % self._groups[1] == 0:
                self._choose_group(column, *self._groups)
            torch.mul(self.weights[column], self.removed[column], out=self.errors[column])
            self.weights[column:].addcmul_(self.factor[column, column:, None], self.errors[column], value=-1)

    def _choose_group(self, column: int, removed: int, group: int) -> None:
        """By the weights as they are now. argmin takes the first of equal ones."""
        here = slice(column, column + group)
        torch.mul(self.weights[here], self.weights[here], out=self._scores)
        self._scores.div_(self.diagonal[here])
        for _ in range(removed):
            torch.argmin(self._scores, dim=0, keepdim=True, out=self._lowest)
            self._scores.scatter_(0, self._lowest, torch.inf)
        torch.eq(self._scores, torch.inf, out=self.removed[here])

    def _recorded(self) -> torch.cuda.CUDAGraph:
        """Not by `torch.cuda.graph`, which would empty the allocator's cache. Other threads may go on allocating."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self.weights.device)
        stream.wait_stream(torch.cuda.current_stream(self.weights.device))
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._steps()
            finally:
                graph.capture_end()
        return graph


class ColumnSweeps:
    """Column sweeps by shape, the latest few."""

    MOST = 16

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, torch.device, Groups | None], ColumnSweep] = {}

    def find(self, width: int, rows: int, device: torch.device, groups: Groups | None) -> ColumnSweep:
        key = (width, rows, device, groups)
        sweep = self._made.pop(key, None) or ColumnSweep(width, rows, device, groups)
        self._made[key] = sweep
        while len(self._made) > self.MOST:
            del self._made[next(iter(self._made))]
        return sweep
