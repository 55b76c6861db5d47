"""Pruning as one would write it with room for everything: the whole model, hooks, whole activations.

Every block is looked at with a forward of the whole model, its earlier blocks pruned already. Nothing of the engine is
used; statistics and selection are written out plainly, with torch's own reductions so that bits can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Prune = Callable[[list[Tensor], list[Tensor]], None]
"""Weights [rows, columns] that share an input, in place; and that input, one tensor [windows, length, n] a batch."""


def prune_in_memory(model: Any, windows: Tensor, size: int, prune: Prune) -> None:
    for block in blocks_of(model):
        with torch.no_grad():
            for weights, inputs in grouped(observed(model, block, windows, size)):
                prune(weights, inputs)


def blocks_of(model: Any) -> nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == model.config.num_hidden_layers)


def observed(model: Any, block: nn.Module, windows: Tensor, size: int) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Each matrix of the block with its inputs; its own copy of them, shared or not."""
    from transformers.pytorch_utils import Conv1D

    seen: dict[nn.Module, list[Tensor]] = {}
    handles = []
    for module in block.modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            handles.append(
                module.register_forward_pre_hook(lambda m, args: seen.setdefault(m, []).append(args[0].clone()))
            )
    for first in range(0, len(windows), size):
        model(windows[first : first + size], use_cache=False)
    for handle in handles:
        handle.remove()
    length = windows.shape[1]
    return [
        ([m.weight.t() if isinstance(m, Conv1D) else m.weight], [x.reshape(-1, length, x.shape[-1]) for x in inputs])
        for m, inputs in seen.items()
    ]


def grouped(found: list[tuple[list[Tensor], list[Tensor]]]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Matrices whose inputs are the same numbers, together."""
    made: list[tuple[list[Tensor], list[Tensor]]] = []
    for weights, inputs in found:
        for others, known in made:
            if all(torch.equal(x, y) for x, y in zip(inputs, known, strict=True)):
                others += weights
                break
        else:
            made.append((list(weights), inputs))
    return made


def squared_norms(inputs: list[Tensor]) -> Tensor:
    rows = torch.cat([torch.linalg.vector_norm(x, dim=1, dtype=torch.float32) ** 2 for x in inputs])
    return (rows.double().sum(0) / len(rows)).float()


def wanda(ratio: float) -> Prune:
    def prune(weights: list[Tensor], inputs: list[Tensor]) -> None:
        for weight in weights:
            zero_lowest(weight, weight.abs().float() * squared_norms(inputs).sqrt(), int(weight.shape[1] * ratio))

    return prune


def wanda_groups(removed: int, group: int) -> Prune:
    def prune(weights: list[Tensor], inputs: list[Tensor]) -> None:
        for weight in weights:
            scores = weight.abs().float() * squared_norms(inputs).sqrt()
            order = scores.unflatten(1, (-1, group)).argsort(dim=-1, stable=True)[..., :removed]
            mask = torch.zeros_like(scores, dtype=torch.bool).unflatten(1, (-1, group)).scatter_(-1, order, True)
            weight[mask.flatten(1)] = 0

    return prune


def sparsegpt(ratio: float, samples: int) -> Prune:
    """With memfit's own solver: what is compared is what it is given."""
    from memfit.jobs.pruning.methods import Gram
    from memfit.jobs.pruning.sparsegpt import prune_with_updates_
    from memfit.jobs.settings import Sparsity

    def prune(weights: list[Tensor], inputs: list[Tensor]) -> None:
        gram = Gram(samples, inputs[0].shape[-1], "cpu")
        for x in inputs:
            gram.add(x)
        prune_with_updates_(weights, gram.finish(), Sparsity(ratio=ratio))

    return prune


def zero_lowest(weight: Tensor, scores: Tensor, count: int) -> None:
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.argsort(dim=1, stable=True)[:, :count], True)
    weight[mask] = 0
