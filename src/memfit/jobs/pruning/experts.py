"""Mixtures of experts: each expert's own tokens reach its own statistics.

transformers keeps the experts of a block as 3-D parameters and multiplies them in one grouped product, where no hook
sees a single expert. While statistics are collected, the experts run one by one instead, each on the tokens that the
router sent to it, in the order of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from memfit.jobs.pruning.matrices import is_experts

See = Callable[[nn.Module, int, str, Tensor, Tensor], None]
"""Module, number of the expert, side, its input [tokens, n], and the place of each token among all of them."""


@contextmanager
def seen(block: nn.Module, see: See, after: Callable[[nn.Module], None]) -> Iterator[None]:
    """Show what each expert is given; `after` is called when a block's experts have all been shown."""
    replaced = [module for module in block.modules() if is_experts(module)]
    for module in replaced:
        usual = module.forward

        def forward(hidden: Tensor, chosen: Tensor, shares: Tensor, module: Any = module, usual: Any = usual) -> Tensor:
            _show(module, hidden, chosen, see)
            after(module)
            made: Tensor = usual(hidden, chosen, shares)
            return made

        module.forward = forward
    try:
        yield
    finally:
        for module in replaced:
            del module.forward


def _show(module: Any, hidden: Tensor, chosen: Tensor, see: See) -> None:
    experts, each = module.num_experts, chosen.shape[-1]
    order = torch.sort(chosen.reshape(-1), stable=True)
    tokens = order.indices // each
    counts = (order.values[None, :] == torch.arange(experts, device=hidden.device)[:, None]).sum(1)
    start = 0
    for expert, count in enumerate(sizes(counts, tokens.numel())):
        if not count:
            continue
        mine = tokens[start : start + count]
        start += count
        given = hidden[mine]
        see(module, expert, "in", given, mine)
        inner = module._apply_gate(linear(given, module.gate_up_proj[expert]))
        del given
        see(module, expert, "down", inner, mine)


def sizes(counts: Tensor, total: int) -> list[int]:
    """How many tokens each expert has: the one thing here that the program must wait for. Without data, as in a plan,
    they are spread evenly."""
    if counts.is_meta:
        even, more = divmod(total, counts.numel())
        return [even + (expert < more) for expert in range(counts.numel())]
    made: list[int] = counts.tolist()
    return made
