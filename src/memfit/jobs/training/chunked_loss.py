"""Cross-entropy without the logits: the same loss and gradients, a few hundred tokens at a time.

The logits of 2,048 tokens over 152,064 words are 0.6 GiB in 16 bit, and with the fp32 copies that the loss and its
backward pass make of them several times that: often the peak of the whole step. Here each chunk of tokens goes through
the head, its loss and its gradients at once, and its logits are dropped before the next. Where the head itself is
trained, its gradient is made a chunk of words at a time; there, and only there, logits are computed twice.

    use_chunked_loss(model)                       # a transformers causal LM, with or without adapters
    loss = model(input_ids=ids, labels=ids).loss  # as before; `logits` holds nothing while training
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax

from memfit.errors import UsageError

CHUNK = 256
IGNORED = -100
CAP = "final_logit_softcapping"
ALL = slice(None)
ALIGNED = 128
"""Words of a chunk are a multiple of this, for the sake of matrix products."""
FP16_TOKENS = 1024
"""A sum of so many gradients, each of size 1, stays far from the largest fp16 number."""
SCALES = ("logit_scale", "logits_scaling", "output_multiplier_scale", "lm_head_multiplier")
"""Configs of models that change the logits after the head in ways that this file does not follow."""


def use_chunked_loss(model: nn.Module, *, chunk: int = CHUNK) -> None:
    """From now on the model's own `forward(..., labels=...)` computes its loss in chunks while it trains."""
    base: Any = getattr(model, "get_base_model", lambda: model)()
    head = getattr(base, "get_output_embeddings", lambda: None)()
    if head is None or not _asks_for_its_loss(base):
        raise UsageError(
            f"--loss chunked needs a causal language model of transformers, not {type(base).__name__}",
            hint="--loss full works",
        )
    if not isinstance(head, nn.Linear):
        raise UsageError(
            f"--loss chunked: the output head is a {type(head).__name__}, with weights that it does not know of",
            hint="no adapter on the output head, or --loss full",
        )
    config = base.config
    changed = [name for name in SCALES if getattr(config, name, 1.0) not in (None, 1, 1.0)]
    if changed:
        raise UsageError(f"--loss chunked does not know this model's {changed[0]}", hint="--loss full works")
    cap = getattr(config, CAP, None)
    if cap is not None:
        _cap_nothing_while_training(base, head)  # but the scores, below
    as_built = head.forward

    def forward(hidden: Tensor) -> Tensor:
        """While training, hidden states go through to the loss; otherwise this is still a head."""
        return hidden if head.training else as_built(hidden)

    head.forward = forward  # type: ignore[method-assign,assignment]
    base.loss_function = _loss_function(head, chunk, cap)


def _cap_nothing_while_training(base: Any, head: nn.Module) -> None:
    """The model caps what its head returns, if its config says so. The config itself is saved with the weights, so it
    says so again when the pass is over."""
    as_built = base.forward

    @wraps(as_built)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not head.training:
            return as_built(*args, **kwargs)
        cap = getattr(base.config, CAP)
        setattr(base.config, CAP, None)
        try:
            return as_built(*args, **kwargs)
        finally:
            setattr(base.config, CAP, cap)

    base.forward = forward


def _asks_for_its_loss(model: Any) -> bool:
    """Models that fill in masked words compute theirs in their own code, where nothing can be put in its place."""
    forward: Any = inspect.unwrap(type(model).forward)
    return hasattr(type(model), "loss_function") and "loss_function" in forward.__code__.co_names


def _loss_function(head: Any, chunk: int, cap: float | None) -> Callable[..., Tensor]:
    def loss(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The signature of transformers' own; `logits` are hidden states while training."""
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
        wanted = shift_labels.reshape(-1).to(logits.device)
        if not head.training:
            kind = "mean" if num_items_in_batch is None else "sum"
            scores = logits.reshape(-1, vocab_size).float()
            whole = nn.functional.cross_entropy(scores, wanted, ignore_index=ignore_index, reduction=kind)
            return whole if num_items_in_batch is None else whole / num_items_in_batch
        hidden, bias = logits.reshape(-1, logits.shape[-1]), getattr(head, "bias", None)
        items, ignored = num_items_in_batch, ignore_index
        return chunked_cross_entropy(
            hidden, head.weight, wanted, bias=bias, chunk=chunk, cap=cap, ignored=ignored, items=items
        )

    return loss


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int = CHUNK,
    cap: float | None = None,
    ignored: int = IGNORED,
    items: Any = None,
) -> Tensor:
    """The mean loss of [tokens, width] hidden states against [tokens] labels, or its sum over `items`."""
    loss: Tensor = _Chunked.apply(hidden, weight, bias, labels, chunk, cap, ignored, items)
    return loss


class _Chunked(torch.autograd.Function):
    """The gradients are made in the forward pass, while logits are there; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk: int,
        cap: float | None,
        ignored: int,
        items: Any,
    ) -> Tensor:
        device, (of_hidden, of_weight, of_bias) = hidden.device.type, ctx.needs_input_grad[:3]
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        with torch.autocast(device, enabled=False):  # each is cast once, not for every chunk
            head = _HeadInputs(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), cap)
            counted = (labels != ignored)[:, None]
            words = labels.clamp(min=0)[:, None]
            grad_hidden = torch.empty_like(hidden) if of_hidden else None
            loss, learned = _by_tokens(head, words, counted, chunk, grad_hidden)
            grad_weight = torch.empty_like(weight) if of_weight else None
            grad_bias = torch.empty_like(bias) if of_bias and bias is not None else None
            shrunk = min(1.0, FP16_TOKENS / max(1, len(labels))) if dtype == torch.float16 else 1.0
            if grad_weight is not None or grad_bias is not None:
                _by_words(head, words, learned, chunk, counted * shrunk, grad_weight, grad_bias)
            parts = counted.sum() if items is None else items
        ctx.grads = grad_hidden, grad_weight, grad_bias
        ctx.scales = 1 / parts, 1 / (parts * shrunk), 1 / (parts * shrunk)
        return loss / parts

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Only here are they divided: in fp16 a word's share of a whole batch would be 0 before it is scaled up."""
        if ctx.grads is None:
            raise RuntimeError("the gradients of a chunked loss are there for one backward pass only")
        grads, ctx.grads = ctx.grads, None  # else a weight's gradient would be copied, not taken
        scaled = (
            None if each is None else each.mul_(grad * scale) for each, scale in zip(grads, ctx.scales, strict=True)
        )
        return (*scaled, None, None, None, None, None)


@dataclass(frozen=True)
class _HeadInputs:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    cap: float | None

    def scores(self, tokens: slice = ALL, words: slice = ALL) -> Tensor:
        logits = linear(self.hidden[tokens], self.weight[words], None if self.bias is None else self.bias[words])
        return logits if self.cap is None else logits.float().div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, scores: Tensor) -> Tensor | None:
        """How a score follows its logit, where that is capped."""
        return None if self.cap is None else 1 - (scores / self.cap) ** 2

    def change(self, probabilities: Tensor, slope: Tensor | None, word: Tensor, at_word: Tensor) -> Tensor:
        """What a logit should fall by: its probability, less 1 at the right word, where that is made without rounding
        the probability first."""
        made = probabilities.to(self.weight.dtype).scatter_(-1, word, at_word.to(self.weight.dtype))
        return made if slope is None else made.mul_(slope)


@dataclass(frozen=True)
class _Learned:
    """Of each token, [tokens, 1]: the logarithm of the sum over all words, and what the logit of its own falls by."""

    normalisers: Tensor
    at_words: Tensor


def _by_tokens(
    head: _HeadInputs, words: Tensor, counted: Tensor, chunk: int, grad_hidden: Tensor | None
) -> tuple[Tensor, _Learned]:
    """The sum of the losses, and what hidden states get: some tokens and all words at a time."""
    total = torch.zeros((), dtype=torch.float32, device=counted.device)
    learned = _Learned(*(torch.empty(counted.shape, dtype=torch.float32, device=counted.device) for _ in range(2)))
    for start in range(0, len(counted), chunk):
        tokens = slice(start, start + chunk)
        word = words[tokens]
        scores = head.scores(tokens)
        own, slope = scores.gather(-1, word).float(), head.slope(scores)
        wide = scores.float()
        del scores
        logarithms = log_softmax(wide, -1)
        del wide
        at_word = logarithms.gather(-1, word)
        total -= (at_word * counted[tokens]).sum()
        learned.normalisers[tokens] = own - at_word
        learned.at_words[tokens] = at_word = at_word.exp() - 1
        if grad_hidden is not None:
            change = head.change(logarithms.exp_(), slope, word, at_word)
            del logarithms, slope
            grad_hidden[tokens] = (change @ head.weight) * counted[tokens]
            del change
    return total, learned


def _by_words(
    head: _HeadInputs,
    words: Tensor,
    learned: _Learned,
    chunk: int,
    shares: Tensor,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    """What the head gets: all tokens and some words at a time, so that each row of its gradient is made in one product.

    Summed up over chunks of tokens it would need a copy in fp32, which for a wide head is more than the logits are; the
    price is that logits are computed a second time.
    """
    tokens, count, dtype = head.hidden.shape[0], head.weight.shape[0], head.weight.dtype
    width = -(-chunk * count // max(1, tokens) // ALIGNED) * ALIGNED or ALIGNED
    shares = shares.to(dtype)
    hidden = head.hidden * shares
    for start in range(0, count, width):
        some = slice(start, min(start + width, count))
        scores = head.scores(words=some)
        slope = head.slope(scores)
        probabilities = (scores - learned.normalisers).exp_()
        del scores
        word = (words - start).clamp(0, some.stop - start - 1)
        here = (words >= start) & (words < some.stop)
        at_word = torch.where(here, learned.at_words, probabilities.gather(-1, word))
        change = head.change(probabilities, slope, word, at_word)
        del probabilities, slope
        if grad_weight is not None:
            grad_weight[some] = change.t() @ hidden
        if grad_bias is not None:
            grad_bias[some] = change.t() @ shares[:, 0]
        del change
