"""Some cases of a parametrised test run each time; the others, which go the same way, with `make test-all`."""

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
