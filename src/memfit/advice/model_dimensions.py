"""The numbers that tensors of a model are made of, read from its settings alone: no torch, no transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from memfit.errors import MemfitError
from memfit.models.presets import find_preset, presets

_SPELLINGS = {
    "vocabulary": ("vocab_size",),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "d_ffn"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads"),
    "head_dim": ("head_dim",),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "positions": ("max_position_embeddings", "n_positions", "context_length", "max_seq_len"),
}
"""As the families spell them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    model: str
    family: str
    vocabulary: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    layers: int | None = None
    positions: int | None = None
    parameters: int | None = None


def dimensions_of(config: Mapping[str, Any], *, model: str, parameters: int | None = None) -> Dimensions:
    found: dict[str, int | None] = {name: _first(config, names) for name, names in _SPELLINGS.items()}
    hidden, heads = found["hidden"], found["heads"]
    if found["intermediate"] is None and hidden and config.get("model_type") == "gpt2":
        found["intermediate"] = 4 * hidden
    if found["head_dim"] is None and hidden and heads and hidden % heads == 0:
        found["head_dim"] = hidden // heads
    if found["kv_heads"] is None:
        found["kv_heads"] = heads
    return Dimensions(model=model, family=str(config.get("model_type", "")), parameters=parameters, **found)


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40:
            return value
    return None


_IN_TEXT = {
    name: re.compile(rf"(?<![\w.])[\"']?(?:{'|'.join(names)})[\"']?\s?[:=]\s?(\d{{1,9}})(?![\d.])")
    for name, names in _SPELLINGS.items()
}
_NAMING = ("vocabulary", "hidden")


def dimensions_in_text(text: str) -> Dimensions | None:
    """Of a config that a program has printed into its log. A number that is given twice, differently, is none."""
    found: dict[str, int] = {}
    for name, pattern in _IN_TEXT.items():
        values = {int(each[1]) for each in pattern.finditer(text)} - {0}
        if len(values) == 1:
            found[name] = values.pop()
    if any(name not in found for name in _NAMING):
        return None
    config = {_SPELLINGS[name][0]: value for name, value in found.items()}
    return dimensions_of(config, model="the model whose settings are in the text")


def dimensions_of_model(name: str) -> Dimensions | None:
    """Of whatever `--model` takes; None where only running the model's own code would tell."""
    from memfit.models.registry import resolve

    source = resolve(name)
    if source.kind == "preset":
        return preset_dimensions(source.target)
    if source.kind == "factory":
        return None
    from memfit.models.config_check import read_config

    try:
        return dimensions_of(read_config(Path(source.target)), model=source.name)
    except MemfitError:
        return None


@cache
def preset_dimensions(name: str) -> Dimensions | None:
    preset = find_preset(name)
    if preset is None:
        return None
    return dimensions_of(preset.config, model=preset.name, parameters=preset.parameters)


@cache
def known_dimensions(family: str | None = None) -> tuple[Dimensions, ...]:
    """Of all shipped models, or of those of one family."""
    made = (preset_dimensions(preset.name) for preset in presets() if family in (None, preset.model_type))
    return tuple(each for each in made if each is not None)
