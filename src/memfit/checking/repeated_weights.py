"""A few blocks of a real model, quick on any CPU without another answer.

Weights repeat their first rows, and products of 16-bit numbers go by way of fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DRAWN = 1 << 20
"""So many numbers are random, if a weight has more."""
RANDOM = ("normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_",
          "xavier_uniform_")  # fmt: skip


class RepeatedWeights(TorchFunctionMode):
    """To draw hundreds of millions of random numbers takes longer than the steps that they are drawn for, and gradients
    flow through repeated rows as through any. Inside, the initialisers of `torch.nn.init` work so; by name, for
    transformers puts its own in their place."""

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


PRODUCTS = {"aten::mm": 1, "aten::addmm": 2, "aten::bmm": 1, "aten::baddbmm": 2}
"""Where the second factor stands."""
SHORT = (torch.bfloat16, torch.float16)


class ProductsByFp32(TorchDispatchMode):  # type: ignore[no-untyped-call,unused-ignore]
    """A CPU without units for 16-bit numbers multiplies them one by one where the rows of the second factor lie in a
    row, as in every backward pass: a layer of a 7B model takes 18 s (bf16) or 45 s (fp16), in fp32 0.4 s. The result is
    rounded as it would be, so what does not fit into fp16 is inf here too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        place = PRODUCTS.get(func._schema.name)
        if place is None or args[place].dtype not in SHORT or args[place].stride(-1) != 1:
            return func(*args, **given)
        if len({each.dtype for each in args if isinstance(each, Tensor)}) > 1:
            return func(*args, **given)  # which torch refuses
        wide = (each.float() if isinstance(each, Tensor) else each for each in args)
        return func(*wide, **given).to(args[place].dtype)
