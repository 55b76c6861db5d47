"""Which of a block's results are kept for backward: those that are dear to compute.

Matrix products and attention are kept; norms, activation functions and all else between them is computed again. Two
kinds of products are not worth their memory: the second one of an adapter, over no more terms than its rank, and the
scores of attention written out, which are larger than what they are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

aten = torch.ops.aten

PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}
"""And where their first matrix is among the arguments."""
BATCHED = {aten.bmm.default: 0, aten.baddbmm.default: 1}
ATTENTION_NAMES = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_grouped_mm",
)  # fmt: skip
ATTENTION = frozenset(getattr(aten, name).default for name in ATTENTION_NAMES if hasattr(aten, name))


def selective_contexts(model: nn.Module) -> Callable[[], Any]:
    """What `torch.utils.checkpoint.checkpoint` takes as `context_fn`."""
    rank = max((int(each.r) for each in getattr(model, "peft_config", {}).values()), default=0)
    return partial(create_selective_checkpoint_contexts, partial(_policy, rank))


def _policy(rank: int, _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(op, args, rank) else CheckpointPolicy.PREFER_RECOMPUTE


def is_kept(op: Any, args: tuple[Any, ...], rank: int = 0) -> bool:
    if op in ATTENTION:
        return True
    if op in PRODUCTS:
        left: Tensor = args[PRODUCTS[op]]
        return left.shape[-1] > rank
    if op in BATCHED:
        left, right = args[BATCHED[op] : BATCHED[op] + 2]
        return bool(left.shape[-1] >= right.shape[-1])
    return False
