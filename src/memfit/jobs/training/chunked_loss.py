"""Cross-entropy without the logits: the same loss and gradients, a few hundred tokens at a time.

The logits of 2,048 tokens over 152,064 words are 0.6 GiB in 16 bit, and with the fp32 copies that the loss and its
backward pass make of them several times that: often the peak of the whole step. Here each chunk of tokens goes through
the head, its loss and its gradients at once, and its logits are dropped before the next. Nothing is computed twice.

    use_chunked_loss(model)                       # a transformers causal LM, with or without adapters
    loss = model(input_ids=ids, labels=ids).loss  # as before; `logits` holds nothing while training
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from memfit.errors import UsageError

CHUNK = 256
IGNORED = -100
SCALES = ("logit_scale", "logits_scaling", "output_multiplier_scale", "lm_head_multiplier")
"""Configs of models that change the logits after the head in ways that this file does not follow."""


def use_chunked_loss(model: nn.Module, *, chunk: int = CHUNK) -> None:
    """From now on the model's own `forward(..., labels=...)` computes its loss in chunks while it trains."""
    base: Any = getattr(model, "get_base_model", lambda: model)()
    head = getattr(base, "get_output_embeddings", lambda: None)()
    if head is None or not hasattr(type(base), "loss_function"):
        raise UsageError(f"--loss chunked needs a transformers language model, not {type(base).__name__}")
    config = base.config
    changed = [name for name in SCALES if getattr(config, name, 1.0) not in (None, 1, 1.0)]
    if changed:
        raise UsageError(f"--loss chunked does not know this model's {changed[0]}", hint="--loss full works")
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        config.final_logit_softcapping = None  # done below, where there are logits
    as_built = head.forward

    def forward(hidden: Tensor) -> Tensor:
        """While training, hidden states go through to the loss; otherwise this is still a head."""
        if head.training:
            return hidden
        logits: Tensor = as_built(hidden)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    head.forward = forward
    base.loss_function = _loss_function(head, chunk, cap)


def _loss_function(head: Any, chunk: int, cap: float | None) -> Callable[..., Tensor]:
    def loss(
        logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """The signature of transformers' own; `logits` are hidden states while training."""
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
        wanted = shift_labels.reshape(-1).to(logits.device)
        if not head.training:
            kind = "mean" if num_items_in_batch is None else "sum"
            scores = logits.reshape(-1, vocab_size).float()
            whole = nn.functional.cross_entropy(scores, wanted, ignore_index=ignore_index, reduction=kind)
            return whole if num_items_in_batch is None else whole / num_items_in_batch
        hidden = logits.reshape(-1, logits.shape[-1])
        return chunked_cross_entropy(
            hidden, head.weight, wanted, bias=getattr(head, "bias", None), chunk=chunk, cap=cap,
            ignored=ignore_index, items=num_items_in_batch,
        )  # fmt: skip

    return loss


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, chunk: int = CHUNK,
    cap: float | None = None, ignored: int = IGNORED, items: Any = None,
) -> Tensor:  # fmt: skip
    """The mean loss of [tokens, width] hidden states against [tokens] labels, or its sum over `items`."""
    loss: Tensor = _Chunked.apply(hidden, weight, bias, labels, chunk, cap, ignored, items)
    return loss


class _Chunked(torch.autograd.Function):
    """The gradients are made in the forward pass, while a chunk's logits are there; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int, cap: float | None,
        ignored: int, items: Any,
    ) -> Tensor:  # fmt: skip
        counted = labels != ignored
        parts = counted.sum() if items is None else items
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias and bias is not None else None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = linear(hidden[rows], weight, bias)
            scores = logits.float()
            if cap is not None:
                scores = torch.tanh(scores / cap) * cap
            wanted = labels[rows].clamp(min=0)[:, None]
            normaliser = scores.logsumexp(-1, keepdim=True)
            total += ((normaliser - scores.gather(-1, wanted)).squeeze(-1) * counted[rows]).sum()
            if not any((need_hidden, need_weight, need_bias)):
                continue
            share = counted[rows, None] / parts
            slope = (1 - (scores / cap) ** 2) * share if cap is not None else share
            if scores is logits:
                scores = scores.clone()
            change = scores.sub_(normaliser).exp_()
            change.scatter_add_(-1, wanted, torch.full_like(wanted, -1, dtype=change.dtype))
            narrow = change.mul_(slope).to(logits.dtype)
            del scores, change, logits
            if grad_hidden is not None:
                grad_hidden[rows] = (narrow @ weight.to(narrow.dtype)).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += narrow.t() @ hidden[rows].to(narrow.dtype)
            if grad_bias is not None:
                grad_bias += narrow.float().sum(0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return total / parts

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if grad_hidden is None else grad_hidden * grad.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * grad).to(weight_dtype),
            None if grad_bias is None else (grad_bias * grad).to(bias_dtype),
            None, None, None, None, None,
        )  # fmt: skip
