"""Weights that lie otherwise in the files than in the model, as transformers stacks and renames them while it loads.

The experts of a mixture are files' tensors of their own, and one weight in transformers 5. What makes one of the other
on the device is transformers' own code (core_model_loading.py, `WeightConverter.convert`), run here on empty tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memfit.models.checkpoint import MissingWeights, WeightStore

ARRIVES = "arrives"
"""An attribute of a weight that is made from others while it is loaded: a `StackedWeight`."""
COMES_AS = "comes_as"
"""One of a weight that has another name in the files: the first of them, which says when its turn is."""
Source = tuple[str, str, tuple[int, ...]]
"""A tensor in the files: its name, the pattern by which transformers knows it, its shape."""


def note_conversions(model: Any, folder: Path | None) -> bool:
    """Of each weight that is made from others, or has another name in the files, which `folder` has if they are here.
    Whether any is made from others."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    if not mapping:
        return False
    weights = dict(model.named_parameters())
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
    made_from: dict[str, list[Source]] = {}
    for key, shape in sorted(_in_files(model, weights, folder).items(), key=lambda each: dot_natural_key(each[0])):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, weights)
        weight = weights.get(name)
        if weight is None:
            continue
        if not hasattr(weight, COMES_AS):
            setattr(weight, COMES_AS, key)
        if pattern is not None and len(converter_of[pattern].target_patterns) == 1:
            made_from.setdefault(name, []).append((key, pattern, shape))
    for name, sources in made_from.items():
        converter = converter_of[sources[0][1]]
        setattr(weights[name], ARRIVES, StackedWeight(name, sources, converter, model.config))
    return bool(made_from)


def _in_files(model: Any, weights: Mapping[str, Tensor], folder: Path | None) -> Mapping[str, tuple[int, ...]]:
    """As they are there; else as transformers would save them."""
    from transformers.core_model_loading import revert_weight_conversion

    if folder is not None:
        try:
            store = WeightStore.open(folder)
        except MissingWeights:
            pass
        else:
            store.close()
            return {name: each.shape for name, each in store.stored.items()}
    empty = {name: torch.empty_like(each, device="meta") for name, each in weights.items()}
    return {name: tuple(each.shape) for name, each in revert_weight_conversion(model, empty).items()}


class StackedWeight:
    """How a weight comes: its `sources`, one after the other, then what is made of them."""

    def __init__(self, name: str, sources: list[Source], converter: Any, config: Any) -> None:
        self.name, self.sources, self.converter, self.config = name, sources, converter, config

    def part(self, weight: Tensor, source: Source, device: torch.device | str) -> Tensor:
        return torch.empty(source[2], dtype=weight.dtype, device=device)

    def made(self, parts: list[Any]) -> Tensor:
        """Of all parts, or of functions that bring them when transformers asks; it lets them go."""
        converter = deepcopy(self.converter)
        converter.collected_tensors = {}
        for _, pattern, _ in self.sources:
            converter.collected_tensors.setdefault(pattern, []).append(parts.pop(0))
        (made,) = converter.convert(self.name, config=self.config).values()
        whole: Tensor = made[0] if isinstance(made, list) else made
        return whole
