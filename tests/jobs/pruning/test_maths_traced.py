"""The same functions on the traced device: no question but the known ones, and little memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from memfit.events import Action, Trace
from memfit.jobs.pruning.methods import ColumnNorms, Gram, outlier_percentage, reconstruct_
from memfit.jobs.pruning.selection import (
    Magnitude,
    Ria,
    Wanda,
    check_finite,
    prune_groups_,
    prune_matrix_,
    prune_rows_,
    prune_variant_,
)
from memfit.jobs.pruning.sparsegpt import ColumnSweeps, prune_with_updates_
from memfit.jobs.settings import Sparsity
from memfit.tracing.answers import Answers, Site
from memfit.tracing.tracer import trace
from memfit.units import MiB

COLUMNS = 8192
SHAPES = ((4096, 8192), (16384, 2048), (1536, 640))
ANSWERS = {
    Site("memfit/jobs/pruning/selection.py", "_all_true"): True,
    Site("memfit/jobs/pruning/sparsegpt.py", "_succeeded"): 0,
}


def traced(job: Callable[[], object]) -> Trace:
    return trace(lambda _: job(), answers=Answers(ANSWERS))


def peak(made: Trace) -> int:
    now = most = 0
    for action, subject in made.events():
        if action in (Action.ALLOC, Action.FREE):
            now += made.requested[subject] * (1 if action == Action.ALLOC else -1)
        most = max(most, now)
    return most


def beside(job: Callable[..., object], *inputs: tuple[torch.dtype, tuple[int, ...]]) -> int:
    """The peak of a job, without what it is given."""
    given = sum(math.prod(shape) * dtype.itemsize for dtype, shape in inputs)
    made = traced(lambda: job(*(torch.empty(shape, dtype=dtype, device="cuda") for dtype, shape in inputs)))
    return peak(made) - given


def norms(w: Tensor) -> Tensor:
    return torch.empty(w.shape[1], device="cuda")


SELECTIONS: dict[str, Callable[[Tensor], object]] = {
    "wanda": lambda w: prune_rows_(w, Wanda(norms(w)), w.shape[1] // 2),
    "wanda 2:4": lambda w: prune_groups_(w, Wanda(norms(w)), 2, 4),
    "wanda 64:128": lambda w: prune_groups_(w, Wanda(norms(w)), 64, 128),
    "variant": lambda w: prune_variant_(w, Wanda(norms(w)), 0.5),
    "ria": lambda w: prune_rows_(w, Ria(w, norms(w)), w.shape[1] // 2),
    "magnitude": lambda w: prune_matrix_(w, w.numel() // 2),
    "magnitude 4:8": lambda w: prune_groups_(w, Magnitude(), 4, 8),
    "outliers": lambda w: outlier_percentage([(w, Wanda(norms(w)))]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SELECTIONS)
def test_selection_stays_within_its_scratch(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The larger matrices alone would take 128 MiB in fp32. Beside the scratch there are a few rows of sums."""
    assert beside(SELECTIONS[name], (dtype, shape)) <= 34 * MiB


INPUT = (torch.float16, (8, 2048, COLUMNS))


def test_norms_take_one_row_a_sequence_and_no_copy_of_the_input() -> None:
    def job(x: Tensor) -> None:
        statistic = ColumnNorms(16, COLUMNS, "cuda")
        statistic.add(x, 8)
        check_finite({"norms": statistic.summary()})

    assert beside(job, INPUT) < 6 * MiB


def test_products_of_columns_take_the_matrix_alone() -> None:
    def job(x: Tensor) -> None:
        gram = Gram(8, COLUMNS, "cuda")
        gram.add(x)
        gram.finish()

    workspace = 32 * MiB
    assert beside(job, INPUT) == 4 * COLUMNS**2 + workspace


@pytest.mark.parametrize("kind", ["unstructured", "2:4"])
def test_sparsegpt_takes_one_more_hessian_and_the_weights_in_fp32(kind: str) -> None:
    def job(hessian: Tensor, first: Tensor, second: Tensor) -> None:
        prune_with_updates_([first, second], hessian, Sparsity.parse(kind), sweeps=ColumnSweeps())

    matrix = (torch.bfloat16, (1024, COLUMNS))
    used = beside(job, (torch.float32, (COLUMNS, COLUMNS)), matrix, matrix)
    assert used <= 4 * COLUMNS**2 + 4 * COLUMNS * 2048 + MiB


def test_the_three_buffers_of_a_sweep_are_made_once_for_all_matrices_of_a_shape() -> None:
    def blocks(times: int) -> int:
        def job(hessian: Tensor, weight: Tensor) -> None:
            sweeps = ColumnSweeps()
            for _ in range(times):
                prune_with_updates_([weight], hessian, Sparsity(ratio=0.5), sweeps=sweeps)

        made = traced(lambda: job(*(torch.empty(rows, 512, device="cuda") for rows in (512, 64))))
        return made.requested.count(4 * 128 * 64)

    assert blocks(1) > 3
    assert blocks(3) == 3 * blocks(1) - 2 * 3


def test_reconstruction_takes_sixteen_bytes_a_weight() -> None:
    def job() -> None:
        own = torch.empty(4096, COLUMNS, dtype=torch.bfloat16, device="cuda")
        mask = torch.empty(4096, COLUMNS, dtype=torch.bool, device="cuda")
        x = torch.empty(1, 16, COLUMNS, dtype=torch.bfloat16, device="cuda")
        y = torch.empty(1, 16, 4096, dtype=torch.bfloat16, device="cuda")
        reconstruct_(
            {"w": own}, {"w": mask}, lambda weights, inputs: inputs @ weights["w"].mT, lambda: [(x, y)], 1
        )  # fmt: skip

    copies = 16 + 2 + 1
    sixteen_bit_weight_and_gradient = 4
    most = 4096 * COLUMNS * (copies + sixteen_bit_weight_and_gradient) + 34 * MiB
    assert peak(traced(job)) <= most
