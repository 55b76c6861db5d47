"""The tensors that a model makes, as products of its numbers and the run's: no torch, no transformers.

    T * vocabulary * 4          fp32 logits               B * heads * S * S * 2       attention scores
    vocabulary * hidden * 2     embedding or lm_head      samples * S * hidden * 2    calibration inputs

Where a number of the run is not known, those that people choose are tried: 2,048 and 1,536 for a sequence, 1,000 for
the side of a cube.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from memfit.errors import MemfitError
from memfit.models.presets import find_preset, presets
from memfit.units import MiB

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


WORKSPACE = 32 * MiB
"""Of cuBLAS on Hopper and newer; on older cards it is 8.125 MiB and shares a segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    symbol: str
    value: int
    least: int | None = None
    most: int | None = None
    """Of a number that was searched for: between these all would do."""

    @property
    def said(self) -> str:
        symbol = "row" if self.value == 1 and self.symbol == "rows" else self.symbol
        return f"{self.value:,} {symbol}".strip()


@dataclass(frozen=True, slots=True)
class TensorPattern:
    """A tensor of a model: what is fixed by the model, and which numbers of the run it is multiplied by."""

    kind: str
    tensor: str
    fixed: tuple[Factor, ...]
    itemsizes: tuple[int, ...]
    free: str = ""
    """tokens, rows-length-length, length-length, samples-length, or nothing."""
    phases: frozenset[str] = frozenset()
    """In which it is made; none: in any."""
    prior: int = 0


_TRAINING = frozenset({"forward", "loss", "backward", "evaluation", "generation"})
_PASSES = frozenset({"forward", "backward", "evaluation", "generation"})
_UNPACKED = "copy of a 4-bit weight, for one product"
_WEIGHTS = frozenset({"loading", "backward", "optimizer step", "saving"})


_LOSS = frozenset({"loss", "backward", "evaluation", "generation", "forward"})
_GENERATING = frozenset({"generation", "evaluation", "forward"})
_PRUNING = frozenset({"calibration", "forward"})
_CALIBRATING = _PRUNING | {"evaluation", "data"}
_KEPT = "weight, gradient or optimizer moment"
_OF_MODELS: tuple[tuple[str, str, tuple[str, ...], tuple[int, ...], str, frozenset[str], int], ...] = (
    ("logits", "fp32 logits, their log-softmax or their gradient", ("vocabulary",), (4,), "tokens", _LOSS, 1),
    ("logits", "16-bit logits or their gradient", ("vocabulary",), (2,), "tokens", _LOSS, 0),
    ("attention", "attention scores", ("heads",), (2, 4), "rows-length-length", _TRAINING, 0),
    ("attention", "attention dropout mask", ("heads",), (1,), "rows-length-length", _TRAINING, -1),
    ("mlp", "MLP activation", ("intermediate",), (2, 4), "tokens", _TRAINING, 0),
    ("attention-output", "queries or output of attention", ("in all heads",), (2, 4), "tokens", _TRAINING, -1),
    ("hidden", "hidden states", ("hidden",), (2, 4), "tokens", _TRAINING, -1),
    ("calibration", "calibration inputs or outputs", ("hidden",), (2, 4), "samples-length", _CALIBRATING, 0),
    ("weights", f"embedding or lm_head: {_KEPT}", ("vocabulary", "hidden"), (2, 4), "", _WEIGHTS, 1),
    ("weights", f"MLP matrix: {_KEPT}", ("hidden", "intermediate"), (2, 4), "", _WEIGHTS, 1),
    ("packed weights", f"MLP matrix: {_UNPACKED}", ("hidden", "intermediate"), (2, 4), "", _PASSES, -1),
    ("sort", "int64 indices of a sort over an MLP matrix", ("hidden", "intermediate"), (8,), "", _PRUNING, -1),
    ("hessian", "Hessian of the MLP's down projection", ("intermediate", "intermediate"), (4,), "", _PRUNING, -1),
    ("weights", f"attention matrix: {_KEPT}", ("hidden", "hidden"), (2, 4), "", _WEIGHTS, 0),
    ("packed weights", f"attention matrix: {_UNPACKED}", ("hidden", "hidden"), (2, 4), "", _PASSES, -2),
    ("hessian", "Hessian of a hidden-sized input", ("hidden", "hidden"), (4,), "", frozenset({"calibration"}), -1),
    ("flat", "flat buffer of all parameters", ("parameters",), (2, 4), "", _WEIGHTS, 2),
    ("kv-cache", "key-value cache of all layers", ("(keys, values)", "layers", "kv heads", "head dim"), (2,), "tokens",
     _GENERATING, -1),
    ("kv-cache", "keys or values of one layer", ("kv heads", "head dim"), (2,), "tokens", _GENERATING, -2),
)  # fmt: skip
"""The model's numbers that a tensor is made of, by their symbols. A model that lacks one of them has no such tensor."""
_ALSO_NEEDED = {"kv-cache": "layers", "hessian": "hidden"}


def _of_model(of: Dimensions) -> Iterator[TensorPattern]:
    wide = of.heads * of.head_dim if of.heads and of.head_dim else None
    values: dict[str, Any] = {**asdict(of), "in all heads": wide, "(keys, values)": 2}
    values |= {"kv heads": of.kv_heads, "head dim": of.head_dim}
    for kind, tensor, symbols, itemsizes, free, phases, prior in _OF_MODELS:
        if all(values[symbol] for symbol in (*symbols, _ALSO_NEEDED.get(kind, symbols[0]))):
            fixed = tuple(Factor(symbol=symbol, value=values[symbol]) for symbol in symbols)
            yield TensorPattern(kind, tensor, fixed, itemsizes, free, phases, prior)


def fingerprints_of_lora(rank: int, models: Sequence[Dimensions]) -> Iterator[TensorPattern]:
    low = (Factor(symbol="rank", value=rank),)
    yield TensorPattern("lora", "what a LoRA A matrix makes", low, (2, 4), "tokens", _TRAINING, -1)
    for wide in {size for model in models for size in (model.intermediate, model.hidden) if size}:
        matrix = (*low, Factor(symbol="wide", value=wide))
        yield TensorPattern("weights", f"LoRA matrix: {_KEPT}", matrix, (2, 4), "", _WEIGHTS)


OF_NO_MODEL = (
    TensorPattern("attention", "attention mask", (), (1, 2, 4), "length-length", _TRAINING, -1),
    TensorPattern("workspace", "cuBLAS workspace", (Factor(symbol="", value=WORKSPACE),), (1,)),
)
"""Of a size that does not depend on the model."""


@lru_cache(maxsize=64)
def fingerprints_of(models: tuple[Dimensions, ...]) -> tuple[tuple[TensorPattern, tuple[Dimensions, ...]], ...]:
    """Models share sizes: each fingerprint once, with the models that have it."""
    found: dict[TensorPattern, list[Dimensions]] = {fingerprint: [] for fingerprint in OF_NO_MODEL}
    for model in models:
        for fingerprint in _of_model(model):
            if fingerprint.kind == "flat" and len(models) > 1:
                continue  # some model has any number of parameters
            found.setdefault(fingerprint, []).append(model)
    return tuple((fingerprint, tuple(having)) for fingerprint, having in found.items())


ROUNDEST = (1, 3, 5, 7, 9, 15)
"""Odd parts of such numbers: 2,048 is 1 x 2^11, 1,536 is 3 x 2^9."""


def roundest(low: int, high: int) -> int | None:
    """Of the numbers between, the one divisible by the largest power of two: batches are padded to such."""
    if low > high or high < 1:
        return None
    return next(
        found
        for power in range(high.bit_length(), -1, -1)
        if (found := ((low + (1 << power) - 1) >> power) << power) <= high
    )


def is_round(number: int) -> bool:
    return number // (number & -number) in ROUNDEST


def roundness(number: int) -> int:
    return {1: 4, 3: 3, 5: 2, 7: 2}.get(number // (number & -number), 1)


def root_below(number: int, power: int) -> int:
    """The largest whole number whose power is not above it."""
    if number < 1:
        return 0
    root: int = round(float(number) ** (1 / power))
    while root**power > number:
        root -= 1
    while (root + 1) ** power <= number:
        root += 1
    return root


def root_above(number: int, power: int) -> int:
    below = root_below(number, power)
    return below if below**power == number else below + 1


def round_decimals(low: int, high: int) -> Iterator[int]:
    """Numbers such as 1,000 and 2,500, which no model has as a size."""
    for unit in (100_000, 10_000, 1_000):
        found = -(-low // unit) * unit
        if unit <= found <= high:
            yield found
            return
