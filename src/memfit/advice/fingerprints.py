"""The tensors that a model makes, as products: which of its numbers, times which numbers of the run.

T * vocabulary * 4          fp32 logits               B * heads * S * S * 2       attention scores
vocabulary * hidden * 2     embedding or lm_head      samples * S * hidden * 2    calibration inputs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from memfit.advice.model_dimensions import Dimensions
from memfit.units import MiB

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
        return (
            f"{self.value:,} {self.symbol[:-1] if self.value == 1 and self.symbol == 'rows' else self.symbol}".strip()
        )


@dataclass(frozen=True, slots=True)
class Fingerprint:
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
_WEIGHTS = frozenset({"loading", "backward", "optimizer step", "saving"})


def _of_model(of: Dimensions) -> Iterator[Fingerprint]:
    vocabulary, hidden = _factor("vocabulary", of.vocabulary), _factor("hidden", of.hidden)
    intermediate, heads = _factor("intermediate", of.intermediate), _factor("heads", of.heads)
    if vocabulary:
        loss = frozenset({"loss", "backward", "evaluation", "generation", "forward"})
        yield Fingerprint("logits", "fp32 logits, their log-softmax or their gradient", vocabulary, (4,), "tokens",
                           loss, 1)  # fmt: skip
        yield Fingerprint("logits", "16-bit logits or their gradient", vocabulary, (2,), "tokens", loss)
    if heads:
        yield Fingerprint("attention", "attention scores", heads, (2, 4), "rows-length-length", _TRAINING)
        yield Fingerprint("attention", "attention dropout mask", heads, (1,), "rows-length-length", _TRAINING, -1)
    if intermediate:
        yield Fingerprint("mlp", "MLP activation", intermediate, (2, 4), "tokens", _TRAINING)
    if of.heads and of.head_dim:
        wide = (Factor(symbol="in all heads", value=of.heads * of.head_dim),)
        yield Fingerprint("attention-output", "queries or output of attention", wide, (2, 4), "tokens", _TRAINING, -1)
    if hidden:
        yield Fingerprint("hidden", "hidden states", hidden, (2, 4), "tokens", _TRAINING, -1)
        calibration = frozenset({"forward", "calibration", "evaluation", "data"})
        yield Fingerprint("calibration", "calibration inputs or outputs", hidden, (2, 4), "samples-length",
                           calibration)  # fmt: skip
    yield from _of_weights(of, vocabulary, hidden, intermediate)
    if of.layers and of.kv_heads and of.head_dim:
        one = (Factor(symbol="kv heads", value=of.kv_heads), Factor(symbol="head dim", value=of.head_dim))
        every = (Factor(symbol="(keys, values)", value=2), Factor(symbol="layers", value=of.layers), *one)
        generating = frozenset({"generation", "evaluation", "forward"})
        yield Fingerprint("kv-cache", "key-value cache of all layers", every, (2,), "tokens", generating, -1)
        yield Fingerprint("kv-cache", "keys or values of one layer", one, (2,), "tokens", generating, -2)


def _of_weights(
    of: Dimensions, vocabulary: tuple[Factor, ...], hidden: tuple[Factor, ...], intermediate: tuple[Factor, ...]
) -> Iterator[Fingerprint]:
    kept = "weight, gradient or optimizer moment"
    if vocabulary and hidden:
        yield Fingerprint("weights", f"embedding or lm_head: {kept}", (*vocabulary, *hidden), (2, 4), "", _WEIGHTS, 1)
    if intermediate and hidden:
        matrix = (*hidden, *intermediate)
        yield Fingerprint("weights", f"MLP matrix: {kept}", matrix, (2, 4), "", _WEIGHTS, 1)
        pruning = frozenset({"calibration", "forward"})
        yield Fingerprint("sort", "int64 indices of a sort over an MLP matrix", matrix, (8,), "", pruning, -1)
        yield Fingerprint("hessian", "Hessian of the MLP's down projection", (*intermediate, *intermediate), (4,), "",
                           pruning, -1)  # fmt: skip
    if hidden:
        square = (*hidden, *hidden)
        yield Fingerprint("weights", f"attention matrix: {kept}", square, (2, 4), "", _WEIGHTS)
        yield Fingerprint(
            "hessian", "Hessian of a hidden-sized input", square, (4,), "", frozenset({"calibration"}), -1
        )
    if of.parameters:
        whole = (Factor(symbol="parameters", value=of.parameters),)
        yield Fingerprint("flat", "flat buffer of all parameters", whole, (2, 4), "", _WEIGHTS, 2)


def _factor(symbol: str, value: int | None) -> tuple[Factor, ...]:
    return (Factor(symbol=symbol, value=value),) if value else ()


def fingerprints_of_lora(rank: int, models: Sequence[Dimensions]) -> Iterator[Fingerprint]:
    low = (Factor(symbol="rank", value=rank),)
    yield Fingerprint("lora", "what a LoRA A matrix makes", low, (2, 4), "tokens", _TRAINING, -1)
    for wide in {size for model in models for size in (model.intermediate, model.hidden) if size}:
        matrix = (*low, Factor(symbol="wide", value=wide))
        yield Fingerprint("weights", "LoRA matrix: weight, gradient or optimizer moment", matrix, (2, 4), "", _WEIGHTS)


OF_NO_MODEL = (
    Fingerprint("attention", "attention mask", (), (1, 2, 4), "length-length", _TRAINING, -1),
    Fingerprint("workspace", "cuBLAS workspace", (Factor(symbol="", value=WORKSPACE),), (1,)),
)
"""Of a size that does not depend on the model."""


@lru_cache(maxsize=64)
def fingerprints_of(models: tuple[Dimensions, ...]) -> tuple[tuple[Fingerprint, tuple[Dimensions, ...]], ...]:
    """Models share sizes: each fingerprint once, with the models that have it."""
    found: dict[Fingerprint, list[Dimensions]] = {fingerprint: [] for fingerprint in OF_NO_MODEL}
    for model in models:
        for fingerprint in _of_model(model):
            if fingerprint.kind == "flat" and len(models) > 1:
                continue  # some model has any number of parameters
            found.setdefault(fingerprint, []).append(model)
    return tuple((fingerprint, tuple(having)) for fingerprint, having in found.items())
