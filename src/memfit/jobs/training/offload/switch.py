"""The memory levers of a model's blocks, switched on before it goes to its device, for a plan as for a run.

A block is computed again in backward, all of it or what is cheap; its inputs lie here or on the host. Matrix products
and attention are kept; norms, activation functions and all else between them is computed again. Two kinds of products
are not worth their memory: the second one of an adapter, over no more terms than its rank, and the scores of attention
written out, which are larger than what they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memfit.errors import UsageError
from memfit.jobs.settings import Checkpointing
from memfit.jobs.training.offload.activations import ActivationsOnHost
from memfit.jobs.training.offload.weights import FrozenWeightsOnHost


def use_block_levers(
    model: Any,
    *,
    checkpointing: Checkpointing,
    offload: Collection[str],
    adapters: bool,
    setting: str,
    reentrant: bool = False,
) -> None:
    """`setting` is how the user asked for checkpointing."""
    on_host = ActivationsOnHost() if "activations" in offload else None
    if checkpointing != "none":
        if not hasattr(model, "gradient_checkpointing_enable"):
            raise UsageError(f"{setting} needs a transformers model", hint="checkpoint inside your own factory")
        if adapters:
            model.enable_input_require_grads()  # the embedding is frozen: without this no block would have gradients
        settings: dict[str, Any] = {"use_reentrant": reentrant}
        if checkpointing == "selective":
            settings["context_fn"] = selective_contexts(model)
        try:
            if hasattr(model, "activation_checkpointing_enable"):  # its name since transformers 5.23
                model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
            else:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        except ValueError as error:
            raise UsageError(f"{setting}: {str(error).splitlines()[0]}") from error
        for module in model.modules():
            function = vars(module).get("_gradient_checkpointing_func")
            if on_host is not None and function is not None:
                module._gradient_checkpointing_func = on_host.around(function)
    elif on_host is not None:
        on_host.watch_blocks(model)
    if "weights" in offload:
        FrozenWeightsOnHost(model)


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


def selective_contexts(model: Any) -> Callable[[], Any]:
    """What `torch.utils.checkpoint.checkpoint` takes as `context_fn`."""
    rank = max((int(each.r) for each in getattr(model, "peft_config", {}).values()), default=0)

    def policy(_: Any, op: Any, *args: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_kept(op, args, rank) else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


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
