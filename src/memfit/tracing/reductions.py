"""The buffer of a reduction that is split over thread blocks.

`sum`, `mean`, `norm`, `all`... run in one kernel whose launch is chosen from the shape. When one output needs more
values than the threads of one block should read, several blocks share it and meet in a buffer of global memory. It
is transient, and can be large: the gradient of a bias of 6,400 over 2,048 tokens takes 100 MiB for a moment.

The choice below follows `setReduceConfig` and `global_memory_size` of ATen/native/cuda/Reduce.cuh (2.11), and
reproduces every reduction measured on an H200 (`tests/data/h200-ops.json`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memfit.tracing.platform import Platform

MAX_THREADS = 512
WARP = 32
MIN_VALUES, MAX_VALUES = 16, 256
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ReductionBuffers:
    values: int
    semaphores: int


def reduction_buffers(
    tensor: torch.Tensor, dims: Sequence[int] | None, platform: Platform, *, accumulator: int, per_thread: int = 4
) -> list[ReductionBuffers]:
    """One entry for each kernel launched: a tensor beyond 32-bit offsets is reduced in pieces."""
    reduced, kept = _ordered_dims(tensor, dims)
    item = tensor.element_size()
    return [
        buffers
        for r, k in _pieces_within_32_bits(reduced, kept, item)
        if (buffers := _buffers(r, k, item, int(tensor.storage_offset()), platform, accumulator, per_thread))
    ]


def accumulated_bytes(tensor: torch.Tensor, dims: Sequence[int] | None, out: torch.Tensor) -> int:
    """`gpu_reduce_kernel`: where 16-bit numbers are summed in pieces, the pieces meet in fp32 and not in the result."""
    half = all(t.is_floating_point() and t.element_size() == 2 for t in (tensor, out))
    in_pieces = half and len(_pieces_within_32_bits(*_ordered_dims(tensor, dims), tensor.element_size())) > 1
    return 4 * out.numel() if in_pieces else 0


Dims = list[tuple[int, int]]  # (length, stride in elements), fastest first


def _ordered_dims(tensor: torch.Tensor, dims: Sequence[int] | None) -> tuple[Dims, Dims]:
    """TensorIterator's order: reduced dimensions first, each group by stride and merged where it is contiguous."""
    rank = tensor.dim()
    chosen = set(range(rank)) if not dims else {d % rank for d in dims}
    pairs = [(tensor.shape[d], tensor.stride(d), d in chosen) for d in range(rank) if tensor.shape[d] != 1]
    pairs.sort(key=lambda p: p[1])
    return _merged([(n, s) for n, s, r in pairs if r]), _merged([(n, s) for n, s, r in pairs if not r])


def _merged(dims: Dims) -> Dims:
    merged: Dims = []
    for length, stride in dims:
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * length, merged[-1][1])
        else:
            merged.append((length, stride))
    return merged


def _pieces_within_32_bits(reduced: Dims, kept: Dims, item: int) -> list[tuple[Dims, Dims]]:
    dims = reduced + kept
    if 1 + sum((n - 1) * s for n, s in dims) * item <= INT32_MAX:
        return [(reduced, kept)]
    widest = max(range(len(dims)), key=lambda i: (dims[i][0] - 1) * dims[i][1])
    length, stride = dims[widest]
    pieces = []
    for part in (length // 2, length - length // 2):
        halved = [*dims[:widest], (part, stride), *dims[widest + 1 :]]
        pieces += _pieces_within_32_bits(halved[: len(reduced)], halved[len(reduced) :], item)
    return pieces


def _buffers(
    reduced: Dims, kept: Dims, item: int, offset: int, platform: Platform, accumulator: int, per_thread: int
) -> ReductionBuffers | None:
    outputs, inputs = _count(kept), _count(reduced)
    along_rows = not kept or (bool(reduced) and reduced[0][1] < kept[0][1])
    output_vector = 1
    if along_rows:
        width_limit, height_limit = inputs, outputs
        if reduced and reduced[0][1] == 1 and inputs > 128 and len(reduced) + len(kept) == 1:
            width_limit //= per_thread
    else:
        if kept[0][1] == 1:
            output_vector = _output_vector(reduced, kept, offset)
        width_limit, height_limit = outputs // output_vector, inputs
    width, height = _block(width_limit, height_limit, MAX_THREADS // output_vector)

    input_step, output_step = (width, 1) if along_rows else (1, width)
    split_over_warps = _ceil(inputs, input_step) >= min(height * MIN_VALUES, MAX_VALUES)
    if not split_over_warps:
        return None
    input_step *= height
    values = _ceil(inputs, input_step)
    grid = _ceil(outputs // output_vector, output_step)
    target = platform.sm_count * (platform.max_threads_per_sm // (width * height))
    if values < MAX_VALUES or grid > target:
        return None
    blocks = max(min(_ceil(target, grid), _ceil(values, MIN_VALUES)), _ceil(values, MAX_VALUES))
    if blocks <= 1:
        return None
    lanes = 1 if along_rows else width * output_vector
    return ReductionBuffers(values=accumulator * outputs * blocks * lanes, semaphores=4 * grid)


def _block(width_limit: int, height_limit: int, threads: int) -> tuple[int, int]:
    widest = _power_of_two_below(width_limit) if width_limit < threads else threads
    highest = _power_of_two_below(height_limit) if height_limit < threads else threads
    height = min(highest, threads // min(widest, WARP))
    return min(widest, threads // height), height


def _output_vector(reduced: Dims, kept: Dims, offset: int) -> int:
    vector = 4
    for number in (offset, kept[0][0], *(s for _, s in reduced), *(s for _, s in kept[1:])):
        while number % vector:
            vector //= 2
    return vector


def _count(dims: Dims) -> int:
    total = 1
    for length, _ in dims:
        total *= length
    return total


def _power_of_two_below(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
