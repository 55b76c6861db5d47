"""Which attention kernel a run takes. cuDNN's is the fastest, but it plans for 0.9 s before its first call in a process
(H200, cuDNN 9.19: 879 ms against 17 ms for flash attention, and then 0.39 ms a call against 0.45). So it is left to
runs with so much attention that they win that back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

PAYS_FROM_FLOPS = 7e14
WITHOUT_PLANNING = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def attention_kernels(config: Any, device: torch.device, tokens: int, length: int) -> Iterator[None]:
    """`tokens` in windows of `length`, counted once for each block that they go through."""
    if device.type == "cpu" or causal_flops(config, tokens, length) > PAYS_FROM_FLOPS:
        yield
        return
    with sdpa_kernel(WITHOUT_PLANNING):
        yield


def causal_flops(config: Any, tokens: int, length: int) -> float:
    """Of both passes: two products of a query with half of the keys of its window."""
    heads = getattr(config, "num_attention_heads", 0)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads) if heads else 0
    return 2 * 2 * float(tokens) * length * width
