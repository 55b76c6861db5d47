"""What `generate` asks of its tensors, answered for a run that makes exactly the tokens asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from memfit.tracing.answers import Answer, Site, Value

UTILS = "transformers/generation/utils.py"
LOGITS = "transformers/generation/logits_process.py"
CACHE = "transformers/cache_utils.py"


def generate_answers(tokens: int, on_token: Callable[[], None], *, padded: bool) -> dict[Site, Answer]:
    """`on_token` is called after each of them, when it is asked whether to go on."""
    return {
        Site(UTILS, "_prepare_special_tokens"): False,  # the padding token is no end token; end tokens are not negative
        Site(UTILS, "_get_logits_processor"): False,  # tokens are not negative
        Site(UTILS, "generate", "== 1).all()"): not padded,  # is the mask all ones? If so, 5.22 drops it
        Site(UTILS, "generate"): False,  # is there padding on the right?
        Site(UTILS, "__call__"): true_at(tokens, on_token),  # StopCheck: has every row ended?
        Site(UTILS, "_has_unfinished_sequences"): true_at(tokens, on_token),  # the same, before there was a StopCheck
        Site(UTILS, "_beam_search"): beam_search(tokens, on_token),
        Site(LOGITS, "__init__"): False,  # end tokens are not negative
        Site(CACHE, "reorder_cache"): True,  # there is something in a static cache when beams change places
    }


@contextmanager
def cache_labelled(tracer: Any) -> Iterator[None]:
    """What a layer of the key-value cache makes while it is updated is the cache."""
    from transformers import cache_utils

    def labelled(update: Callable[..., Any]) -> Callable[..., Any]:
        def update_labelled(*args: Any, **kwargs: Any) -> Any:
            before, tracer.default_category = tracer.default_category, "kv_cache"
            try:
                return update(*args, **kwargs)
            finally:
                tracer.default_category = before

        return update_labelled

    layers = [
        c for c in vars(cache_utils).values() if isinstance(c, type) and issubclass(c, cache_utils.CacheLayerMixin)
    ]
    with ExitStack() as stack:
        for layer in layers:
            for name in ("update", "lazy_initialization"):
                if name in vars(layer):
                    stack.enter_context(mock.patch.object(layer, name, labelled(vars(layer)[name])))
        yield


def beam_search(count: int, on_token: Callable[[], None]) -> Callable[[torch.Tensor], Value]:
    """It asks for the padding token, a number, and whether some beam goes on, yes or no."""
    ended = true_at(count, on_token)
    return lambda tensor: not ended(tensor) if tensor.dtype == torch.bool else 0


def true_at(count: int, on_token: Callable[[], None]) -> Callable[[torch.Tensor], bool]:
    asked = 0

    def answer(_: torch.Tensor) -> bool:
        nonlocal asked
        asked += 1
        on_token()
        return asked >= count

    return answer
