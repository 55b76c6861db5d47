"""Triangular systems: many or small ones are solved at once, by a pointer to each matrix on either side."""

from __future__ import annotations

import pytest
import torch
from reading import story

from memfit.tracing.tracer import Tracer


@pytest.mark.parametrize(("count", "n", "pointers"), [(20, 64, 2), (5, 32, 2), (8, 64, 0), (9, 64, 2)])
def test_many_or_small_systems_are_solved_through_pointers(count: int, n: int, pointers: int) -> None:
    def job(_: Tracer) -> None:
        factors = torch.empty(count, n, n, device="cuda")
        torch.linalg.solve_triangular(factors, torch.empty_like(factors), upper=False)

    assert story(job).split().count(f"+{8 * count}") == pointers
