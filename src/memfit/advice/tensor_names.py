"""Which tensor of a model has the size that could not be had: 1.16 GiB is 2,048 tokens x 152,064 words in fp32.

    readings(request_intervals(oom), dimensions, run=RunClues(batch_size=1, seq_len=2048))

What torch prints is the new segment, and rounded, so a request is an interval. Every product of the model's numbers and
the run's that lies in it is a reading. Several are normal: they are ranked by how much of them is known and by what was
going on, and one is called the likeliest only where it is well ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from memfit.advice.model_dimensions import Dimensions, known_dimensions
from memfit.advice.oom_message import Oom, Size
from memfit.units import GiB, KiB, MiB

SMALL_SEGMENT, LARGE_SEGMENT, SEGMENT_ROUNDING = 2 * MiB, 20 * MiB, 2 * MiB
"""What torch asks of the driver: small requests share the first, middling ones the second, large ones are rounded to
the third (c10/core/AllocatorConfig.h: kSmallBuffer, kLargeBuffer, kRoundLarge)."""
BLOCK = 512
WORKSPACE = 32 * MiB
MAX_READINGS, SAME_NAME = 6, 2
AHEAD = 3
"""By so many points must the first reading be ahead of the second to be called the likeliest."""
ROUNDEST = (1, 3, 5, 7, 9, 15)
"""Odd parts of numbers that people choose: 2,048 is 1 x 2^11, 1,536 is 3 x 2^9."""
MAX_ROWS, MIN_TOKENS, MAX_TOKENS = 1 << 12, 64, 1 << 20
CALIBRATION_SAMPLES = (128, 256, 512, 64, 32, 1024)

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClues:
    """What is known of the run."""

    batch_size: int | None = None
    seq_len: int | None = None
    rank: int | None = None
    nsamples: int | None = None
    phase: str | None = None
    hints: frozenset[str] = frozenset()
    """What the failing lines of code work on: logits, attention, attention-output, mlp, calibration, weights,
    kv-cache, hessian, sort."""


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
        size = self.itemsize
        for factor in self.factors:
            size *= factor.value
        return size

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
    def likeliest(self) -> Reading | None:
        """None where several are as likely, or where too little is known to prefer one."""
        if not self.grounded or not self.candidates or self.candidates[0].points < AHEAD:
            return None
        rest = self.candidates[1:]
        return self.candidates[0] if not rest or self.candidates[0].points - rest[0].points >= AHEAD else None


# -- what was asked for --------------------------------------------------------------------------------------------


def request_intervals(oom: Oom) -> tuple[Interval, ...]:
    """The sizes that the tensor itself can have had, in bytes, both ends included."""
    if oom.requested is None:
        return ()
    if oom.requests_exactly:
        return ((oom.requested.low, oom.requested.high),)
    return segment_intervals(oom.requested)


def segment_intervals(printed: Size) -> tuple[Interval, ...]:
    """A printed segment is what a request was rounded up to."""
    if printed.high <= KiB:
        return ((printed.low, printed.high),)
    if printed.may_be(SMALL_SEGMENT) and printed.high < SMALL_SEGMENT + MiB:
        return ((1, MiB),)
    if printed.may_be(LARGE_SEGMENT) and printed.high < LARGE_SEGMENT + MiB:
        return ((MiB + 1, 10 * MiB - 1), (18 * MiB + 1, LARGE_SEGMENT))
    if printed.low <= GiB:  # a whole number of 2 MiB; in the first releases of 128 KiB
        multiple = round(printed.middle / SEGMENT_ROUNDING) * SEGMENT_ROUNDING
        top = multiple if printed.may_be(multiple) else printed.high
        return ((max(top - SEGMENT_ROUNDING + 1, 1), top),)
    return ((max(printed.low - SEGMENT_ROUNDING + 1, 1), printed.high),)


def exact_interval(requested_bytes: int) -> tuple[Interval, ...]:
    """A recorded request, which the allocator has rounded up to its blocks."""
    return ((max(requested_bytes - BLOCK + 1, 1), requested_bytes),)


# -- what it can have been -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Fingerprint:
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


def _fingerprints(of: Dimensions) -> Iterator[_Fingerprint]:
    vocabulary, hidden = _factor("vocabulary", of.vocabulary), _factor("hidden", of.hidden)
    intermediate, heads = _factor("intermediate", of.intermediate), _factor("heads", of.heads)
    if vocabulary:
        loss = frozenset({"loss", "backward", "evaluation", "generation", "forward"})
        yield _Fingerprint("logits", "fp32 logits, their log-softmax or their gradient", vocabulary, (4,), "tokens",
                           loss, 1)  # fmt: skip
        yield _Fingerprint("logits", "16-bit logits or their gradient", vocabulary, (2,), "tokens", loss)
    if heads:
        yield _Fingerprint("attention", "attention scores", heads, (2, 4), "rows-length-length", _TRAINING)
        yield _Fingerprint("attention", "attention dropout mask", heads, (1,), "rows-length-length", _TRAINING, -1)
    if intermediate:
        yield _Fingerprint("mlp", "MLP activation", intermediate, (2, 4), "tokens", _TRAINING)
    if of.heads and of.head_dim:
        wide = (Factor(symbol="in all heads", value=of.heads * of.head_dim),)
        yield _Fingerprint("attention-output", "queries or output of attention", wide, (2, 4), "tokens", _TRAINING, -1)
    if hidden:
        yield _Fingerprint("hidden", "hidden states", hidden, (2, 4), "tokens", _TRAINING, -1)
        calibration = frozenset({"forward", "calibration", "evaluation", "data"})
        yield _Fingerprint("calibration", "calibration inputs or outputs", hidden, (2, 4), "samples-length",
                           calibration)  # fmt: skip
    yield from _of_weights(of, vocabulary, hidden, intermediate)
    if of.layers and of.kv_heads and of.head_dim:
        one = (Factor(symbol="kv heads", value=of.kv_heads), Factor(symbol="head dim", value=of.head_dim))
        every = (Factor(symbol="(keys, values)", value=2), Factor(symbol="layers", value=of.layers), *one)
        generating = frozenset({"generation", "evaluation", "forward"})
        yield _Fingerprint("kv-cache", "key-value cache of all layers", every, (2,), "tokens", generating, -1)
        yield _Fingerprint("kv-cache", "keys or values of one layer", one, (2,), "tokens", generating, -2)


def _of_weights(
    of: Dimensions, vocabulary: tuple[Factor, ...], hidden: tuple[Factor, ...], intermediate: tuple[Factor, ...]
) -> Iterator[_Fingerprint]:
    kept = "weight, gradient or optimizer moment"
    if vocabulary and hidden:
        yield _Fingerprint("weights", f"embedding or lm_head: {kept}", (*vocabulary, *hidden), (2, 4), "", _WEIGHTS, 1)
    if intermediate and hidden:
        matrix = (*hidden, *intermediate)
        yield _Fingerprint("weights", f"MLP matrix: {kept}", matrix, (2, 4), "", _WEIGHTS, 1)
        pruning = frozenset({"calibration", "forward"})
        yield _Fingerprint("sort", "int64 indices of a sort over an MLP matrix", matrix, (8,), "", pruning, -1)
        yield _Fingerprint("hessian", "Hessian of the MLP's down projection", (*intermediate, *intermediate), (4,), "",
                           pruning, -1)  # fmt: skip
    if hidden:
        square = (*hidden, *hidden)
        yield _Fingerprint("weights", f"attention matrix: {kept}", square, (2, 4), "", _WEIGHTS)
        yield _Fingerprint(
            "hessian", "Hessian of a hidden-sized input", square, (4,), "", frozenset({"calibration"}), -1
        )
    if of.parameters:
        whole = (Factor(symbol="parameters", value=of.parameters),)
        yield _Fingerprint("flat", "flat buffer of all parameters", whole, (2, 4), "", _WEIGHTS, 2)


def _factor(symbol: str, value: int | None) -> tuple[Factor, ...]:
    return (Factor(symbol=symbol, value=value),) if value else ()


_NO_MODEL = (
    _Fingerprint("attention", "attention mask", (), (1, 2, 4), "length-length", _TRAINING, -1),
)  # fmt: skip


def readings(intervals: Sequence[Interval], models: Sequence[Dimensions], run: RunClues | None = None) -> Readings:
    """Of one model, of a family, or (none given) of all that memfit knows."""
    return _readings(tuple(intervals), tuple(models), run or RunClues())


@lru_cache(maxsize=512)
def _readings(intervals: tuple[Interval, ...], models: tuple[Dimensions, ...], run: RunClues) -> Readings:
    if not intervals:
        return Readings((), (), "the size that was asked for is not known")
    if len(intervals) > 1 or intervals[0][0] <= 1:
        said = "between 1 and 10 MiB, or 18 and 20 MiB" if len(intervals) > 1 else "1 MiB or less"
        return Readings(
            intervals, (), f"requests that size share a segment: this one was {said}, which any small tensor is"
        )
    sure = len(models) == 1
    made: dict[tuple[str, tuple[Factor, ...], int], Reading] = {}
    for low, high in intervals:
        for fingerprint, names in _all_fingerprints(models or known_dimensions()):
            for reading in _matches(fingerprint, names, low, high, run, models, sure):
                key = reading.tensor, reading.factors, reading.itemsize
                made[key] = max(made.get(key, reading), reading, key=lambda each: each.points)
        if not models:
            for reading in _cubes(low, high):
                made[reading.tensor, reading.factors, reading.itemsize] = reading
    ranked = sorted(made.values(), key=lambda each: (-each.points, abs(each.nbytes - intervals[0][1]), each.tensor))
    why = (
        "" if ranked else "no product of the model's sizes gives it" if models else "no tensor of a known model has it"
    )
    return Readings(intervals, tuple(_few_of_each(ranked)), why, sure and run != RunClues())


def _few_of_each(ranked: Iterable[Reading]) -> list[Reading]:
    """Two of one name at most: a power of two is attention scores of many shapes."""
    kept: list[Reading] = []
    for reading in ranked:
        if sum(each.tensor == reading.tensor for each in kept) < SAME_NAME and len(kept) < MAX_READINGS:
            kept.append(reading)
    return kept


@lru_cache(maxsize=64)
def _all_fingerprints(models: tuple[Dimensions, ...]) -> tuple[tuple[_Fingerprint, tuple[str, ...]], ...]:
    """Models share sizes: each fingerprint once, with the models that have it."""
    found: dict[_Fingerprint, list[str]] = {fingerprint: [] for fingerprint in _NO_MODEL}
    for model in models:
        for fingerprint in _fingerprints(model):
            if fingerprint.kind == "flat" and len(models) > 1:
                continue  # some model has any number of parameters
            found.setdefault(fingerprint, []).append(model.model)
    return tuple((fingerprint, tuple(names)) for fingerprint, names in found.items())


def _matches(
    print_: _Fingerprint, names: tuple[str, ...], low: int, high: int, run: RunClues, models: Sequence[Dimensions],
    sure: bool,
) -> Iterator[Reading]:  # fmt: skip
    for itemsize in print_.itemsizes:
        each = itemsize
        for factor in print_.fixed:
            each *= factor.value
        positions = {model.positions for model in models if model.positions}
        for free, weight in _free(print_, -(-low // each), high // each, run, positions, sure):
            points = weight + print_.prior + _by_moment(print_, run) - (not sure)
            if points > 0 or (sure and points > -AHEAD):
                yield Reading(
                    kind=print_.kind, tensor=print_.tensor, factors=(*free, *print_.fixed), itemsize=itemsize,
                    models=names if not sure else names[:1], known=weight >= 6, points=points,
                )  # fmt: skip


def _by_moment(print_: _Fingerprint, run: RunClues) -> int:
    points = 0
    if run.hints:
        points += 5 if print_.kind in run.hints else -2
    if run.phase and print_.phases:
        points += 1 if run.phase in print_.phases else -3
    return points


def _free(
    print_: _Fingerprint, low: int, high: int, run: RunClues, positions: Iterable[int], sure: bool
) -> Iterator[tuple[tuple[Factor, ...], int]]:
    """The numbers of the run that, times what is fixed, lie between `low` and `high`; and how good a guess they are."""
    if low > high or high < 1:
        return
    low = max(low, 1)
    if print_.free == "":
        if low <= 1 <= high:
            yield (), 6 if sure else 4
    elif print_.free == "tokens":
        yield from _tokens(low, high, run, arbitrary=print_.kind == "logits" and (sure or "logits" in run.hints))
    elif print_.free == "samples-length":
        yield from _samples(low, high, run, positions)
    else:
        yield from _squares(low, high, run, rows=print_.free == "rows-length-length")


def _tokens(low: int, high: int, run: RunClues, *, arbitrary: bool) -> Iterator[tuple[tuple[Factor, ...], int]]:
    rows, length = run.batch_size, run.seq_len
    if rows and length and low <= rows * length <= high:
        yield (Factor(symbol="rows", value=rows), Factor(symbol="tokens", value=length)), 7
        return
    if length and low <= length <= high:
        yield (Factor(symbol="tokens", value=length),), 6
        return
    if length and length < low:
        count = high // length
        if count * length >= low and count <= MAX_ROWS and rows is None:
            yield (Factor(symbol="rows", value=count), Factor(symbol="tokens", value=length)), 5 if count < 65 else 2
            return
    found = _roundest(low, high)
    if found is None or not MIN_TOKENS <= found <= MAX_TOKENS:
        return
    tokens = Factor(symbol="tokens", value=found, least=low, most=high)
    # Rows are padded to the longest of them, so a batch may be smaller than the run's numbers, and never larger.
    beyond = 2 if rows and length and low > rows * length else 0
    if _is_round(found):
        yield (tokens,), _roundness(found) - (1 if rows and length else 0) - beyond
    elif arbitrary:
        yield (tokens,), 1 - beyond


def _samples(
    low: int, high: int, run: RunClues, positions: Iterable[int]
) -> Iterator[tuple[tuple[Factor, ...], int]]:  # fmt: skip
    for samples in (run.nsamples,) if run.nsamples else CALIBRATION_SAMPLES:
        least, most = -(-low // samples), high // samples
        for length in sorted({*positions, *({run.seq_len} if run.seq_len else set())}):
            if least <= length <= most:
                weight = 6 if run.nsamples else 5 if samples == CALIBRATION_SAMPLES[0] else 2
                yield (Factor(symbol="samples", value=samples), Factor(symbol="tokens", value=length)), weight
                return
        found = _roundest(least, most) if "calibration" in run.hints else None
        if found and found >= MIN_TOKENS and _is_round(found):
            yield (Factor(symbol="samples", value=samples), Factor(symbol="tokens", value=found)), _roundness(found) - 2
            return


def _squares(low: int, high: int, run: RunClues, *, rows: bool) -> Iterator[tuple[tuple[Factor, ...], int]]:
    """Rows times a length times the same length."""
    counts = (run.batch_size,) if run.batch_size and rows else (1, 2, 4, 8, 16, 32) if rows else (1,)
    for count in counts:
        least, most = _root_above(-(-low // count), 2), _root_below(high // count, 2)
        if run.seq_len and least <= run.seq_len <= most:
            length, weight = run.seq_len, 7 if run.batch_size else 5
        elif (found := _roundest(least, most)) and found >= MIN_TOKENS and found // (found & -found) in (1, 3):
            length, weight = found, _roundness(found) - (count > 1) - (1 if run.seq_len else 0)
        else:
            continue
        side = Factor(symbol="tokens", value=length)
        yield ((Factor(symbol="rows", value=count),) if rows else ()) + (side, side), weight


def _cubes(low: int, high: int) -> Iterator[Reading]:
    """Of no model: a cube or a square with a side that people choose."""
    for power, shape in ((3, "cube"), (2, "square")):
        for itemsize in (8, 4, 2):
            least, most = -(-low // itemsize), high // itemsize
            bottom = _root_above(least, power)
            for side in _round_decimals(bottom, _root_below(most, power)):
                factors = (Factor(symbol="", value=side),) * power
                yield Reading(kind="plain", tensor=f"{shape} of {itemsize}-byte elements", factors=factors,
                              itemsize=itemsize, models=(), known=False, points=2 if power == 3 else 1)  # fmt: skip


def _round_decimals(low: int, high: int) -> Iterator[int]:
    """Numbers such as 1,000 and 2,500, which no model has as a size."""
    for unit in (100_000, 10_000, 1_000, 500, 100):
        found = -(-low // unit) * unit
        if 100 <= found <= high:
            yield found
            return


# -- numbers -------------------------------------------------------------------------------------------------------


def _roundest(low: int, high: int) -> int | None:
    """Of the numbers between, the one divisible by the largest power of two: batches are padded to such."""
    if low > high or high < 1:
        return None
    return next(
        found
        for power in range(high.bit_length(), -1, -1)
        if (found := ((low + (1 << power) - 1) >> power) << power) <= high
    )


def _is_round(number: int) -> bool:
    return number // (number & -number) in ROUNDEST


def _roundness(number: int) -> int:
    return {1: 4, 3: 3, 5: 2, 7: 2}.get(number // (number & -number), 1)


def _root_below(number: int, power: int) -> int:
    """The largest whole number whose power is not above it."""
    if number < 1:
        return 0
    root = round(float(number) ** (1 / power))
    while root**power > number:
        root -= 1
    while (root + 1) ** power <= number:
        root += 1
    return root


def _root_above(number: int, power: int) -> int:
    below = _root_below(number, power)
    return below if below**power == number else below + 1
