"""Random weights by repeating their first rows: to draw hundreds of millions of random numbers takes longer than the
steps that they are drawn for, and gradients flow through repeated rows as through any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DRAWN = 1 << 20
"""So many numbers are random, if a weight has more."""
RANDOM = ("normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_",
          "xavier_uniform_")  # fmt: skip


class RepeatedWeights(TorchFunctionMode):
    """Inside, the initialisers of `torch.nn.init` work so; by name, for transformers puts its own in their place."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        weight = given.get("tensor")
        drawn = getattr(func, "__name__", "") in RANDOM
        if not drawn or not isinstance(weight, Tensor) or weight.dim() < 2 or weight.is_meta:
            return func(*args, **given)
        rows = max(DRAWN // max(weight[0].numel(), 1), 1)
        with torch.no_grad():
            func(*args, **{**given, "tensor": weight[:rows]})
            while rows < len(weight):
                more = min(rows, len(weight) - rows)
                weight[rows : rows + more] = weight[:more]
                rows += more
        return weight
