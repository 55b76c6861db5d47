"""Some cases of a test run each time; the others, which go the same way, with `make test-all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(some: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    every = list(cases)
    assert set(some) <= set(every), "a case that is no more"
    slow = pytest.mark.slow
    return [
        case if case in some else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=slow)
        for case in every
    ]


ALL = False
"""Whether nothing is left out: `make test-all`."""


def examples(most: int) -> int:
    """How many hypothesis makes up."""
    return most if ALL else max(most // 3, min(most, 5))
