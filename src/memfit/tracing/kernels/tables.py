"""All rules of the kernels in two tables: what an op hides beside its result, and ops that are replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memfit.tracing.kernels import (
    attention,
    composites,
    convolutions,
    four_bit,
    indexing,
    losses,
    normalisation,
    products,
    recurrent,
    rows,
    rules,
)

FILES = (
    attention, composites, convolutions, four_bit, indexing, losses, normalisation, products, recurrent, rows, rules,
)  # fmt: skip


def _gathered(table: str) -> dict[Any, Callable[..., Any]]:
    return {op: rule for file in FILES for op, rule in getattr(file, table, {}).items()}


HIDDEN = _gathered("HIDDEN")
"""Asked after the op: what the kernel takes beside its result."""
REPLACED = _gathered("REPLACED")
"""Asked in place of the op."""
