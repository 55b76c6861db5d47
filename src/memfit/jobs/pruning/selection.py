"""Which weights go, by their scores: exact counts, ties to the lowest index, in place, a few rows at a time.

Nothing of a matrix's size is made, and only Wanda's variant sorts. A row's k-th lowest score comes from a selection;
what lies below it goes, and of those that equal it as many as there is room for, from the left. A CPU and a GPU choose
the same weights. Scores must be finite (`check_finite`): no order is defined with NaN.

The lower the score, the sooner a weight goes. A scorer is called with some rows of a matrix and gives their scores in
fp32, so that no score of a whole matrix ever exists. Sums that a score needs are taken in fp64 and rounded once:
whatever the order of the sum, on a GPU or a CPU, the score has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from memfit.errors import InputError
from memfit.models.checkpoint import StoredTensor, WeightStore
from memfit.units import GiB, MiB

SCRATCH_BYTES = 32 * MiB
"""What pruning may use beside weights and statistics, whatever the size of a matrix (one row is the least)."""
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Scorer(Protocol):
    @property
    def bytes_per_weight(self) -> int:
        """Scratch for one weight while it is scored, the score included."""
        ...

    def __call__(self, rows: Tensor) -> Tensor:
        """Finite, not negative, fp32, contiguous, of the shape of `rows`."""
        ...


class Magnitude:
    """|W|."""

    bytes_per_weight = 4

    def __call__(self, rows: Tensor) -> Tensor:
        return _as_fp32(rows).abs_()


class Wanda:
    """|W_ij| * sqrt(s_j), with s_j the mean over sequences of the squared norm of input j (arXiv 2306.11695)."""

    bytes_per_weight = 8  # a CPU makes an fp32 copy of 16-bit rows first

    def __init__(self, squared_norms: Tensor) -> None:
        self._root = squared_norms.double().sqrt().float()  # MKL's fp32 root may be off by one bit

    def __call__(self, rows: Tensor) -> Tensor:
        scores = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        return torch.mul(rows, self._root, out=scores).abs_()


class Ria:
    """(|W_ij| / sum_i |W_ij| + |W_ij| / sum_j |W_ij|) * sqrt(s_j)^0.5 (ICLR 2024), in fp32; a row or a column of zeros
    scores zero."""

    bytes_per_weight = 12

    def __init__(self, weight: Tensor, squared_norms: Tensor) -> None:
        sums = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
        # A GPU shares longer columns between thread blocks, in a buffer many times the size of the rows.
        for rows in parts_of_rows(weight, 16, min(SCRATCH_BYTES, 16 * weight.shape[1] * 512)):
            sums += rows.double().abs_().sum(0)
        self._column_sums = _divisor(sums)
        self._scale = squared_norms.double().pow(0.25).float()

    def __call__(self, rows: Tensor) -> Tensor:
        magnitudes = _as_fp32(rows).abs_()
        row_sums = _divisor(magnitudes.sum(1, keepdim=True, dtype=torch.float64))
        scores = magnitudes / self._column_sums
        return scores.add_(magnitudes.div_(row_sums)).mul_(self._scale)


def parts_of_rows(
    weight: Tensor, bytes_per_weight: int, scratch_bytes: int, bytes_per_row: int = 0
) -> Iterator[Tensor]:
    """Views of consecutive rows, as many at a time as their scratch has room for, and one at least."""
    if weight.dim() != 2 or weight.dtype not in WEIGHT_DTYPES:
        kind = str(weight.dtype).removeprefix("torch.")
        raise InputError(f"cannot prune a {weight.dim()}-D {kind} weight", hint="matrices in fp32, fp16 or bf16 can be")
    each = max(1, weight.shape[1] * bytes_per_weight + bytes_per_row)
    step = max(1, scratch_bytes // each)
    for first in range(0, weight.shape[0], step):
        yield weight[first : first + step]


def _as_fp32(rows: Tensor) -> Tensor:
    """A copy whose rows lie one after the other, whatever the strides of the original."""
    return torch.empty(rows.shape, dtype=torch.float32, device=rows.device).copy_(rows)


def _divisor(sums: Tensor) -> Tensor:
    rounded = sums.float()
    return rounded.masked_fill_(rounded == 0, 1.0)


LONGEST_COMPARED_GROUP = 32
"""Longer groups are chosen from as rows are: comparing all pairs costs group^2."""


def removals(size: int, ratio: float) -> int:
    """How many of `size` weights a ratio removes; the product is cut off, as in the public code."""
    return int(size * ratio)


# -- rows ------------------------------------------------------------------------------------------------------------


def prune_rows_(weight: Tensor, scorer: Scorer, k: int) -> None:
    """Remove the k lowest of each row (Wanda, and RIA by rows)."""
    columns = weight.shape[1]
    if 0 < k < columns:
        for rows in parts_of_rows(weight, max(scorer.bytes_per_weight, 16), SCRATCH_BYTES):
            rows.masked_fill_(lowest_in_rows(scorer(rows), k), 0)
    elif k:
        weight.zero_()


def lowest_in_rows(scores: Tensor, k: int) -> Tensor:
    threshold = scores.kthvalue(k, dim=1, keepdim=True).values
    return _below_and_first_ties(scores, threshold, k)


def lowest_of_all(scores: Tensor, k: int) -> Tensor:
    """The k lowest of a contiguous matrix, ties by rows and then columns."""
    if k == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    flat = scores.view(-1)
    above = flat.numel() - k + 1
    if k <= above:
        threshold = flat.topk(k, largest=False, sorted=False).values.amax(0, keepdim=True)
    else:
        threshold = flat.topk(above, sorted=False).values.amin(0, keepdim=True)
    return _below_and_first_ties(flat.unsqueeze(0), threshold, k).view(scores.shape)


def _below_and_first_ties(scores: Tensor, threshold: Tensor, k: int) -> Tensor:
    chosen = scores < threshold
    room = k - chosen.sum(1, keepdim=True, dtype=torch.int32)
    tied = scores == threshold
    tied &= tied.cumsum(1, dtype=torch.int32) <= room
    return chosen.logical_or_(tied)


# -- groups of columns -------------------------------------------------------------------------------------------------


def prune_groups_(weight: Tensor, scorer: Scorer, removed: int, group: int) -> None:
    """Remove the `removed` lowest of each `group` consecutive columns of a row (N:M)."""
    if 0 < removed < group:
        least = 8 if group <= LONGEST_COMPARED_GROUP else 16
        for rows in parts_of_rows(weight, max(scorer.bytes_per_weight, least), SCRATCH_BYTES):
            rows.masked_fill_(lowest_in_groups(scorer(rows), removed, group), 0)
    elif removed:
        weight.zero_()


def check_groups(columns: int, group: int) -> None:
    if columns % group:
        raise InputError(f"{columns:,} columns cannot be cut into groups of {group}", hint="use another N:M")


def lowest_in_groups(scores: Tensor, removed: int, group: int) -> Tensor:
    if group <= LONGEST_COMPARED_GROUP:
        return _lowest_by_comparing(scores.unflatten(1, (-1, group)), removed).view(scores.shape)
    return lowest_in_rows(scores.view(-1, group), removed).view(scores.shape)


def _lowest_by_comparing(scores: Tensor, count: int) -> Tensor:
    """A score's rank is the number of those before it that are not above it, and of those after it that are below."""
    group = scores.shape[-1]
    rank = torch.zeros(scores.shape, dtype=torch.uint8, device=scores.device)
    for apart in range(1, group):
        later_is_lower = scores[..., apart:] < scores[..., :-apart]
        rank[..., :-apart] += later_is_lower
        rank[..., apart:] += later_is_lower.logical_not_()
    return rank < count


# -- whole matrices, by magnitude ------------------------------------------------------------------------------------


def prune_matrix_(weight: Tensor, count: int) -> None:
    """Remove the `count` smallest magnitudes of a matrix, ties by rows and then columns.

    The order of magnitudes is the order of their bits, so counting bits finds the threshold without a sort.
    """
    if count == weight.numel():
        weight.zero_()
    elif count:
        threshold, room = _magnitude_threshold(weight, count)
        _prune_below_(weight, threshold, room)


def _prune_below_(weight: Tensor, threshold: Tensor, room: Tensor) -> None:
    """Remove what is below the threshold, and the first `room` of what equals it. Rows with all of their ties within
    the room get a threshold one higher; the one row in which the room ends is gone through column by column."""
    parts = parts_of_rows(weight, _magnitude_bytes(weight), SCRATCH_BYTES)
    ties = torch.cat([(_magnitude_bits(rows) == threshold).sum(1, dtype=torch.int32) for rows in parts])
    up_to = ties.cumsum(0)
    last = torch.searchsorted(up_to, room, right=True).clamp_(max=len(weight) - 1)
    bits = _magnitude_bits(weight.index_select(0, last))
    tied = bits == threshold
    tied &= tied.cumsum(1) <= room - up_to.gather(0, last) + ties.gather(0, last)
    cut = weight.index_select(0, last).masked_fill_(tied.logical_or_(bits < threshold), 0)
    limits = (threshold + (up_to <= room)).to(bits.dtype).unsqueeze(1)
    first = 0
    for rows in parts_of_rows(weight, _magnitude_bytes(weight), SCRATCH_BYTES):
        rows.masked_fill_(_magnitude_bits(rows) < limits[first : first + len(rows)], 0)
        first += len(rows)
    weight.index_copy_(0, last, cut)


def _magnitude_bytes(weight: Tensor) -> int:
    return 8 if weight.element_size() == 2 else 18


def _magnitude_bits(rows: Tensor) -> Tensor:
    if rows.element_size() == 2:
        return rows.view(torch.int16).bitwise_and(0x7FFF).contiguous()
    return rows.view(torch.int32).bitwise_and(0x7FFFFFFF).contiguous()


def _magnitude_threshold(weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The count-th smallest magnitude as bits, and how many of that magnitude go. 16-bit floats have 32,768 magnitudes:
    one histogram. fp32 takes two, of the upper bits and then of the lower ones within the bin."""
    room = torch.full((1,), count, dtype=torch.int64, device=weight.device)
    parts = (_magnitude_bits(rows).view(-1) for rows in parts_of_rows(weight, _magnitude_bytes(weight), SCRATCH_BYTES))
    if weight.element_size() == 2:
        at, room = _bin_of(_histogram(1 << 15, ((bits, None) for bits in parts), weight.device), room)
        return at.short(), room
    upper, room = _bin_of(_histogram(1 << 16, ((bits >> 15, None) for bits in parts), weight.device), room)
    parts = (_magnitude_bits(rows).view(-1) for rows in parts_of_rows(weight, _magnitude_bytes(weight), SCRATCH_BYTES))
    within = ((bits & 0x7FFF, (bits >> 15) == upper) for bits in parts)
    lower, room = _bin_of(_histogram(1 << 15, within, weight.device), room)
    return ((upper << 15) | lower).int(), room


def _histogram(bins: int, parts: Iterator[tuple[Tensor, Tensor | None]], device: torch.device) -> Tensor:
    counts = torch.zeros(bins, dtype=torch.int32, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    for index, counted in parts:
        counts.index_add_(0, index.int(), one.expand(index.shape) if counted is None else counted.int())
    return counts


def _bin_of(counts: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """The bin that holds the room-th item, and how many items of that bin there is room for."""
    up_to = counts.cumsum(0)
    at = torch.searchsorted(up_to, room)
    return at, room - up_to.gather(0, at) + counts.gather(0, at)


# -- Wanda's variant ---------------------------------------------------------------------------------------------------

TOLERANCE = 0.001
LOWEST, HIGHEST = 0.0, 0.8
LEVELS, PASSES = 5, 2


def prune_variant_(weight: Tensor, scorer: Scorer, ratio: float) -> None:
    """Remove from each row what makes up the share alpha of its summed scores; one alpha for the matrix, found by
    bisection so that `ratio` of the matrix goes.

    The bisection can only visit the alphas of a tree, so a pass over the rows counts for all of the next few levels,
    and nothing has to be asked of the device. Sums of scores are taken in fp64.
    """
    thresholds = _bisected(weight, scorer, ratio)
    first = 0
    for rows in parts_of_rows(weight, max(scorer.bytes_per_weight, 8), SCRATCH_BYTES):
        rows.masked_fill_(scorer(rows) <= thresholds[first : first + len(rows)], 0)
        first += len(rows)


def _bisected(weight: Tensor, scorer: Scorer, ratio: float) -> Tensor:
    """A threshold for each row."""
    alphas = torch.tensor(_alphas(), dtype=torch.float64, device=weight.device)
    power, offset = (torch.tensor(each, device=weight.device) for each in _subtree())
    at = torch.zeros(1, dtype=torch.int64, device=weight.device)
    for _ in range(PASSES):
        nodes = (at + 1) * power - 1 + offset
        thresholds, counts = _thresholds_and_counts(weight, scorer, alphas.gather(0, nodes))
        local = torch.zeros_like(at)
        for _ in range(LEVELS):
            over = counts.gather(0, local).double() / weight.numel() - ratio
            local = torch.where(over.abs() > TOLERANCE, 2 * local + 1 + (over <= 0), local)
        at = nodes.gather(0, local)
    return thresholds.index_select(1, local)


@cache
def _alphas() -> tuple[float, ...]:
    """All that the bisection may come to, as a heap: the children of i are 2i+1, if too many went, and 2i+2."""
    nodes = [((LOWEST + HIGHEST) / 2, LOWEST, HIGHEST)]
    for alpha, low, high in nodes:
        if high - low >= TOLERANCE:
            nodes += [((alpha + low) / 2, low, alpha), ((alpha + high) / 2, alpha, high)]
    assert len(nodes) == 2 ** (LEVELS * PASSES + 1) - 1
    return tuple(alpha for alpha, _, _ in nodes)


@cache
def _subtree() -> tuple[list[int], list[int]]:
    """Node i of the heap that begins at node r of the large one is node (r + 1) * power[i] - 1 + offset[i] there."""
    levels = range(LEVELS + 1)
    return [2**level for level in levels for _ in range(2**level)], [i for level in levels for i in range(2**level)]


def _thresholds_and_counts(weight: Tensor, scorer: Scorer, alphas: Tensor) -> tuple[Tensor, Tensor]:
    """For each of these alphas a threshold for each row, and how many weights of the matrix go by them."""
    counts = torch.zeros(len(alphas), dtype=torch.int64, device=weight.device)
    thresholds = torch.empty(len(weight), len(alphas), dtype=torch.float32, device=weight.device)
    sorting, counting, first = 52, 32 * len(alphas), 0
    for rows in parts_of_rows(weight, scorer.bytes_per_weight + sorting, SCRATCH_BYTES, bytes_per_row=counting):
        ordered = scorer(rows).sort(dim=1).values
        here = thresholds[first : first + len(rows)].copy_(_row_thresholds(ordered, alphas))
        counts += torch.searchsorted(ordered, here, right=True).sum(0)
        first += len(rows)
    return thresholds, counts


def _row_thresholds(ordered: Tensor, alphas: Tensor) -> Tensor:
    """For each row and alpha the last score within that share of the row's sum; -1 where there is none."""
    sums = ordered.cumsum(1, dtype=torch.float64)
    within = torch.searchsorted(sums, sums[:, -1:] * alphas, right=True)
    threshold = ordered.gather(1, (within - 1).clamp_(min=0))
    return threshold.masked_fill_(within == 0, -1.0)


# -- what has no order -------------------------------------------------------------------------------------------------


LOOK_UP_TO = 8 * GiB
PIECE = 32 * MiB
EXPONENTS = {
    "F64": (torch.int64, 0x7FF << 52), "F32": (torch.int32, 0xFF << 23), "F16": (torch.int16, 0x1F << 10),
    "BF16": (torch.int16, 0xFF << 7),
}  # fmt: skip


def check_files(weights: WeightStore) -> None:
    """Raises for the first tensor with NaN or infinity, before any work, by one look at the files.

    A number is not finite exactly if all bits of its exponent are set, which needs no arithmetic. A model of more than
    a few GiB is not looked through beforehand, for reading it twice would take as long as the work; there each block is
    checked when its turn comes, and what was done before it is kept."""
    tensors = [tensor for tensor in weights.stored.values() if tensor.dtype in EXPONENTS]
    if sum(tensor.nbytes for tensor in tensors) > LOOK_UP_TO:
        return
    for tensor in tensors:
        bad = _not_finite(weights, tensor)
        if bad:
            path = weights.files[tensor.file].path
            raise InputError(
                f"weight '{tensor.name}' has {bad:,} values that are NaN or infinite ({path})",
                hint="the checkpoint is damaged, or its training had diverged; nothing was written",
            )


def _not_finite(weights: WeightStore, tensor: StoredTensor) -> int:
    kind, exponent = EXPONENTS[tensor.dtype]
    room, bad = bytearray(min(PIECE, tensor.nbytes)), 0
    for start in range(0, tensor.nbytes, PIECE):
        part = memoryview(room)[: min(PIECE, tensor.nbytes - start)]
        weights.read_into(tensor.name, part, start)
        found = torch.frombuffer(part, dtype=kind) & exponent
        if int(found.max()) == exponent:
            bad += int(found.eq(exponent).sum())
    return bad


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """An InputError that names the first of these that holds NaN or infinity. Asks the device once for all."""
    some = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    if not some:
        return
    finite = torch.stack([_is_finite(tensor) for tensor in some.values()])
    if _all_true(finite):
        return
    name = next(name for name, is_finite in zip(some, finite.tolist(), strict=True) if not is_finite)
    raise InputError(
        f"{name}: NaN or infinite values",
        hint="a damaged weight, or values beyond fp16's 65,504 on the way there; --dtype bf16 or fp32 holds those",
    )


def _is_finite(tensor: Tensor) -> Tensor:
    """From the extremes: one pass and no copy, also for a transposed view. NaN is an extreme."""
    low, high = torch.aminmax(tensor.mT if tensor.dim() == 2 and tensor.mT.is_contiguous() else tensor)
    return torch.isfinite(low) & torch.isfinite(high)


def _all_true(flags: Tensor) -> bool:
    """The only question that this module asks of the device."""
    return bool(flags.all())
