"""Which tensor of a model has the size that could not be had: 1.16 GiB is 2,048 tokens x 152,064 words in fp32.

    readings(request_intervals(oom), (dimensions,), RunClues(batch_size=1, seq_len=2048))

The tensors that a model makes are products of its numbers and the run's, told without torch and transformers:

    T * vocabulary * 4          fp32 logits               B * heads * S * S * 2       attention scores
    vocabulary * hidden * 2     embedding or lm_head      samples * S * hidden * 2    calibration inputs

What torch prints is the new segment, and rounded, so a request is an interval. Every product that lies in it is a
reading. Several are normal: they are ranked by how much of them is known and by what was going on, and one is called
the likeliest only where it is well ahead. Where a number of the run is not known, those that people choose are tried:
2,048 and 1,536 for a sequence, 1,000 for the side of a cube.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from memfit.errors import MemfitError
from memfit.explaining.message import Interval
from memfit.models.presets import find_preset, presets
from memfit.units import MiB

# -- the numbers of a model --------------------------------------------------------------------------------------------

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


# -- the tensors that it makes -----------------------------------------------------------------------------------------

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


def patterns_of_lora(rank: int, models: Sequence[Dimensions]) -> Iterator[TensorPattern]:
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
def patterns_of(models: tuple[Dimensions, ...]) -> tuple[tuple[TensorPattern, tuple[Dimensions, ...]], ...]:
    """Models share sizes: each pattern once, with the models that have it."""
    found: dict[TensorPattern, list[Dimensions]] = {pattern: [] for pattern in OF_NO_MODEL}
    for model in models:
        for pattern in _of_model(model):
            if pattern.kind == "flat" and len(models) > 1:
                continue  # some model has any number of parameters
            found.setdefault(pattern, []).append(model)
    return tuple((pattern, tuple(having)) for pattern, having in found.items())


# -- numbers that people choose ----------------------------------------------------------------------------------------

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


# -- readings ----------------------------------------------------------------------------------------------------------

MAX_READINGS, SAME_NAME = 6, 2
AHEAD = 3
"""By so many points must the first reading be ahead of the second to be called the likeliest."""
OF_THE_RUN, KNOWN, USUAL, POSSIBLE, ANY = 7, 6, 5, 2, 1
"""Points of the numbers in a product: rows and length of the run itself; the model's, or one of the run's; one of them
a usual number; an unusual one; any that fits. A length that was searched for has 1 to 4, by how round it is."""
SEARCHED_MODEL = 4
RIGHT_LINE, OTHER_LINE, RIGHT_PHASE, WRONG_PHASE = 5, -2, 1, -3
"""Points of the moment: the failing line works on such a tensor, or on another; it is made in this phase, or not."""
WRONG_TYPE = -6
"""Two bytes an element where everything is fp32."""
PART = -2
"""One row where the run has several."""
MOST_USUAL_ROWS = 64
MOST_USUAL_LENGTH = 8192
"""Longer windows are the mistake that the public code is known for; shorter ones, of a job of which nothing is known,
are one guess more."""
MAX_ROWS, MIN_TOKENS, MAX_TOKENS = 1 << 12, 64, 1 << 18
IN_LINES_OF_THEIR_OWN = ("hessian", "sort", "packed weights")
CALIBRATION_SAMPLES = (128, 256, 512, 64, 32, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClues:
    """What is known of the run."""

    batch_size: int | None = None
    seq_len: int | None = None
    rank: int | None = None
    nsamples: int | None = None
    precision: str | None = None
    phase: str | None = None
    hints: frozenset[str] = frozenset()
    """What the failing lines of code work on: logits, attention, attention-output, mlp, calibration, weights,
    kv-cache, hessian, sort."""
    written: tuple[tuple[int, ...], int] | None = None
    """The shape and the bytes of an element, where the failing line spells them out, as compiled code does."""
    card_bytes: int | None = None
    """Of the card, where the message tells it: a model that no card of that size holds was not on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    kind: str
    tensor: str
    factors: tuple[Factor, ...]
    itemsize: int
    models: tuple[str, ...]
    known: bool
    """Whether every factor is the model's or the run's, none searched for."""
    points: int

    @property
    def nbytes(self) -> int:
        return math.prod((factor.value for factor in self.factors), start=self.itemsize)

    @property
    def product(self) -> str:
        """`2,048 tokens x 152,064 vocabulary x 4 bytes`."""
        said = [factor.said for factor in self.factors]
        return " x ".join([*said, "1 byte" if self.itemsize == 1 else f"{self.itemsize} bytes"])


@dataclass(frozen=True, slots=True)
class Readings:
    intervals: tuple[Interval, ...]
    candidates: tuple[Reading, ...]
    why_none: str = ""
    grounded: bool = False
    """Whether the model is known, and something of the run or of the moment."""

    @property
    def first(self) -> Reading | None:
        return next(iter(self.candidates), None)

    @property
    def likeliest(self) -> Reading | None:
        """None where several are as likely, or where too little is known to prefer one."""
        if not self.grounded or not self.candidates or self.candidates[0].points < AHEAD:
            return None
        rest = self.candidates[1:]
        return self.candidates[0] if not rest or self.candidates[0].points - rest[0].points >= AHEAD else None


def readings(intervals: tuple[Interval, ...], models: tuple[Dimensions, ...], run: RunClues) -> Readings:
    """Of one model, of a family, or (none given) of all that memfit knows."""
    if not intervals:
        return Readings((), (), "the size that was asked for is not known")
    if len(intervals) > 1 or intervals[0][0] <= 1:
        size = "between 1 and 10 MiB, or 18 and 20 MiB" if len(intervals) > 1 else "1 MiB or less"
        said = f"requests that size share a segment: this one was {size}, which any small tensor is"
        return Readings(intervals, (), said)
    sure = len(models) == 1
    made: dict[tuple[object, ...], Reading] = {}
    for low, high in intervals:
        adapters = [(each, models) for each in patterns_of_lora(run.rank, models)] if run.rank else []
        for pattern, having in (*patterns_of(models or _holdable(run.card_bytes)), *adapters):
            for reading in _matches(pattern, having, low, high, run, sure):
                key = reading.tensor, reading.factors, reading.itemsize
                made[key] = max(made.get(key, reading), reading, key=lambda each: each.points)
    found = list(made.values())
    if not models:
        found += [reading for interval in intervals for reading in _cubes(*interval)]
    written = _as_written(intervals, run, found)
    if written is not None:
        found = [written]
    elif not models:  # of all models some tensor has any size: only what the failing line makes counts
        found = [
            each for each in found if (each.kind in run.hints if run.hints else each.kind not in IN_LINES_OF_THEIR_OWN)
        ]
    ranked = sorted(found, key=lambda each: (-each.points, abs(each.nbytes - intervals[0][1]), each.tensor))
    such = ", of those that the failing line can make" if run.hints else ""
    none = "no product of the model's sizes gives it" if models else f"no tensor of a known model has its size{such}"
    known = replace(run, card_bytes=None) != RunClues()
    return Readings(
        intervals, tuple(_few_of_each(ranked)), "" if ranked else none, (sure and known) or written is not None
    )


def _as_written(intervals: Sequence[Interval], run: RunClues, found: Iterable[Reading]) -> Reading | None:
    """What the failing line spells out, by the name of the one reading that has its very shape."""
    if run.written is None:
        return None
    shape, itemsize = run.written
    plain = Reading(
        kind="written",
        tensor="the buffer that the failing line makes",
        itemsize=itemsize,
        models=(),
        known=True,
        factors=tuple(Factor(symbol="", value=side) for side in shape),
        points=OF_THE_RUN + RIGHT_LINE,
    )
    if not any(low <= plain.nbytes <= high for low, high in intervals):
        return None
    named = [
        each
        for each in found
        if each.nbytes == plain.nbytes and each.itemsize == itemsize and each.factors[-1].value == shape[-1]
    ]
    return replace(named[0], known=True, points=plain.points) if len(named) == 1 else plain


@lru_cache(maxsize=64)
def _holdable(card_bytes: int | None) -> tuple[Dimensions, ...]:
    """Models whose weights, at half a byte each, are no larger than the card."""
    known = known_dimensions()
    return known if card_bytes is None else tuple(each for each in known if (each.parameters or 0) // 2 <= card_bytes)


def _few_of_each(ranked: Iterable[Reading]) -> list[Reading]:
    """Two of one name at most: a power of two is attention scores of many shapes."""
    kept: list[Reading] = []
    for reading in ranked:
        if sum(each.tensor == reading.tensor for each in kept) < SAME_NAME and len(kept) < MAX_READINGS:
            kept.append(reading)
    return kept


def _matches(
    pattern: TensorPattern, having: tuple[Dimensions, ...], low: int, high: int, run: RunClues, sure: bool
) -> Iterator[Reading]:
    """`having`: the models that have such a tensor; none: it does not depend on the model."""
    positions = {model.positions for model in having if model.positions}
    for itemsize in pattern.itemsizes:
        each = math.prod((factor.value for factor in pattern.fixed), start=itemsize)
        for free, weight in _free(pattern, -(-low // each), high // each, run, positions, sure):
            able = having if sure else _able(having, pattern, free)
            points = weight + pattern.prior + _by_moment(pattern, run) - (not sure)
            points += WRONG_TYPE if run.precision == "fp32" and itemsize == 2 else 0
            if (points > 0 or (sure and points > -AHEAD)) and len(able) >= min(len(having), 1):
                yield Reading(
                    kind=pattern.kind,
                    tensor=pattern.tensor,
                    factors=(*free, *pattern.fixed),
                    itemsize=itemsize,
                    models=tuple(model.model for model in able),
                    known=weight >= KNOWN,
                    points=points,
                )


def _able(having: tuple[Dimensions, ...], pattern: TensorPattern, free: Sequence[Factor]) -> tuple[Dimensions, ...]:
    """The models that have rows as long: gpt2 has no attention scores of 32,768 tokens. Windows to calibrate on are of
    those that have just so many positions, if there are such."""
    if pattern.free in ("", "tokens"):
        return having
    length = max(factor.value for factor in free if factor.symbol == "tokens")
    just = tuple(model for model in having if model.positions == length) if pattern.free == "samples-length" else ()
    return just or tuple(model for model in having if model.positions is None or model.positions >= length)


def _by_moment(pattern: TensorPattern, run: RunClues) -> int:
    points = 0
    if run.hints:
        points += RIGHT_LINE if pattern.kind in run.hints else OTHER_LINE
    if run.phase and pattern.phases:
        points += RIGHT_PHASE if run.phase in pattern.phases else WRONG_PHASE
    return points


def _free(
    pattern: TensorPattern, low: int, high: int, run: RunClues, positions: Collection[int], sure: bool
) -> Iterator[tuple[tuple[Factor, ...], int]]:
    """The numbers of the run that, times what is fixed, lie between `low` and `high`; and how good a guess they are."""
    if low > high or high < 1:
        return
    low = max(low, 1)
    if pattern.free == "":
        if low <= 1 <= high:
            yield (), KNOWN if sure else SEARCHED_MODEL
    elif pattern.kind == "kv-cache" and pattern.kind in run.hints and run.batch_size and run.seq_len:
        yield from _so_far(low, high, run.batch_size, run.seq_len)
    elif pattern.free == "tokens":
        arbitrary = pattern.kind == "logits" and (sure or "logits" in run.hints)
        yield from _tokens(low, high, run, longest=max(positions, default=None), arbitrary=arbitrary)
    elif pattern.free == "samples-length":
        yield from _samples(low, high, run, positions, sure=sure)
    else:
        yield from _squares(low, high, run, rows=pattern.free == "rows-length-length")


def _tokens(
    low: int, high: int, run: RunClues, *, longest: int | None, arbitrary: bool
) -> Iterator[tuple[tuple[Factor, ...], int]]:
    rows, length = run.batch_size, run.seq_len
    if rows and length and low <= rows * length <= high:
        yield (Factor(symbol="rows", value=rows), Factor(symbol="tokens", value=length)), OF_THE_RUN
        return
    if length and low <= length <= high:
        yield (Factor(symbol="tokens", value=length),), KNOWN + (PART if rows and rows > 1 else 0)
        return
    if length and length < low:
        count = high // length
        if count * length >= low and count <= MAX_ROWS and rows is None:
            points = USUAL if count <= MOST_USUAL_ROWS else POSSIBLE
            yield (Factor(symbol="rows", value=count), Factor(symbol="tokens", value=length)), points
            return
    found = roundest(low, high)
    if found is None or not MIN_TOKENS <= found <= MAX_TOKENS:
        return
    tokens = Factor(symbol="tokens", value=found, least=low, most=high)
    # Rows are padded to the longest of them, so a batch may be smaller than the run's numbers, and never larger.
    beyond = 2 if rows and length and low > rows * length else 0
    beyond += 1 if longest and found > longest else 0  # then they are several rows, which is one thing more to guess
    if is_round(found):
        yield (tokens,), roundness(found) - (1 if rows and length else 0) - beyond
    elif arbitrary:
        yield (tokens,), ANY - beyond


def _so_far(low: int, high: int, rows: int, length: int) -> Iterator[tuple[tuple[Factor, ...], int]]:
    """Of a cache: as many tokens for each row as the prompt has, or more by what was made since."""
    least, most = max(-(-low // rows), length), high // rows
    if least <= most:
        tokens = Factor(symbol="tokens", value=least, least=least, most=most)
        yield (Factor(symbol="rows", value=rows), tokens), OF_THE_RUN if least < 2 * length else POSSIBLE


def _samples(
    low: int, high: int, run: RunClues, positions: Collection[int], *, sure: bool
) -> Iterator[tuple[tuple[Factor, ...], int]]:
    """Windows to calibrate on: as long as the run's, or, as the public code takes them, as the model can have them."""
    pruning = "calibration" in run.hints
    for samples in (run.nsamples,) if run.nsamples else CALIBRATION_SAMPLES:
        least, most = -(-low // samples), high // samples
        for length in sorted({*positions, *({run.seq_len} if run.seq_len else set())}):
            if least <= length <= most:
                usual = samples == CALIBRATION_SAMPLES[0] and (sure or pruning or length > MOST_USUAL_LENGTH)
                weight = KNOWN if run.nsamples else USUAL if usual else POSSIBLE
                yield (Factor(symbol="samples", value=samples), Factor(symbol="tokens", value=length)), weight
                return
        found = roundest(least, most) if pruning else None
        if found and found >= MIN_TOKENS and is_round(found):
            yield (Factor(symbol="samples", value=samples), Factor(symbol="tokens", value=found)), roundness(found) - 2
            return


def _squares(low: int, high: int, run: RunClues, *, rows: bool) -> Iterator[tuple[tuple[Factor, ...], int]]:
    """Rows times a length times the same length."""
    counts = (run.batch_size,) if run.batch_size and rows else (1, 2, 4, 8, 16, 32) if rows else (1,)
    for count in counts:
        least, most = root_above(-(-low // count), 2), root_below(high // count, 2)
        if run.seq_len and least <= run.seq_len <= most:
            length, weight = run.seq_len, OF_THE_RUN if run.batch_size else USUAL
        elif (found := roundest(least, most)) and found >= MIN_TOKENS and found // (found & -found) in (1, 3):
            length, weight = found, roundness(found) - (count > 1) - (1 if run.seq_len else 0)
        else:
            continue
        side = Factor(symbol="tokens", value=length)
        yield ((Factor(symbol="rows", value=count),) if rows else ()) + (side, side), weight


def _cubes(low: int, high: int) -> Iterator[Reading]:
    """Of no model: a cube or a square with a side that people choose."""
    for power, shape in ((3, "cube"), (2, "square")):
        for itemsize in (8, 4, 2):
            least, most = -(-low // itemsize), high // itemsize
            bottom = root_above(least, power)
            for side in round_decimals(bottom, root_below(most, power)):
                factors = (Factor(symbol="", value=side),) * power
                yield Reading(
                    kind="plain",
                    tensor=f"{shape} of {itemsize}-byte elements",
                    factors=factors,
                    itemsize=itemsize,
                    models=(),
                    known=False,
                    points=POSSIBLE if power == 3 else ANY,
                )
