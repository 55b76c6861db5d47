"""Kernels that read rows (norms, softmax), buffers of reductions, and temporary storage of cub's sorts and scans.

Layer norm, RMS norm and softmax read rows one after the other, and copy what does not lie so. Heads that are cut out of
one fused projection, as Persimmon's, or turned around, as in many attentions, do not.

A reduction that is split over thread blocks has a buffer. `sum`, `mean`, `norm`, `all`... run in one kernel whose
launch is chosen from the shape. When one output needs more values than the threads of one block should read, several
blocks share it and meet in a buffer of global memory. It is transient, and can be large: the gradient of a bias of
6,400 over 2,048 tokens takes 100 MiB for a moment.

The choice below follows `setReduceConfig` and `global_memory_size` of ATen/native/cuda/Reduce.cuh (2.11), and
reproduces every reduction measured on an H200 (`tests/data/h200-ops.json`).

cub's device-wide sorts and scans have temporary storage, in the parts that cub itself lays out. Read from CCCL's
cub/device/dispatch (dispatch_radix_sort.cuh, `InvokeOnesweep`; tuning/tuning_radix_sort.cuh, `Policy900`) with the
64-bit offsets that torch asks for (ATen/cuda/cub.cuh). Every size agrees with what was measured on an H200
(`tests/data/h200-ops.json`); tiles of other architectures hold fewer items, which is a few KiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.platform import Platform
from memfit.tracing.kernels.layouts import aligned, contiguous_copy, power_of_two_below

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer


aten = torch.ops.aten
Tensor = torch.Tensor
ROWS = torch.contiguous_format


# -- norms -----------------------------------------------------------------------------------------------------------


def _layer_norm(tracer: Tracer, x: Tensor, *others: Any) -> Any:
    """layer_norm_kernel.cu, layer_norm_cuda: the copy is there before the results."""
    if x.is_contiguous():
        return NotImplemented
    with tracer.temporaries() as hold:
        hold(contiguous_copy(x), "norm input, contiguous")
        with _disable_current_modes():
            results = aten.native_layer_norm(x, *others)
        for result in results:
            tracer.track(result, "aten.native_layer_norm.default", x)
    return results


def _layer_norm_backward(
    tracer: Tracer,
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    return _norm_backward(tracer, grad, x, shape, (weight, bias), wanted)


def _rms_norm_backward(
    tracer: Tracer,
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    return _norm_backward(tracer, grad, x, shape, (weight,), wanted)


def _norm_backward(
    tracer: Tracer,
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    weights: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """layer_norm_kernel.cu: the input is copied before the results are made, its gradient when the kernel begins."""
    with tracer.temporaries() as hold:
        hold(contiguous_copy(x), "norm input, contiguous")
        dx = torch.empty_like(x, memory_format=ROWS) if wanted[0] else None
        gradients = [
            torch.empty_like(weight) if asked and weight is not None else None
            for weight, asked in zip(weights, wanted[1:], strict=True)
        ]
        hold(contiguous_copy(grad), "norm gradient, contiguous")
        return dx, *_summed_in_parts(tracer, x, math.prod(shape), gradients)


def _summed_in_parts(tracer: Tracer, x: Tensor, width: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """layer_norm_kernel.cu: beyond 64 Ki rows a weight's gradient is summed over partial blocks, into a new tensor."""
    rows, columns = x.numel() // width, -(-width // 32)
    if rows <= 64 * 1024 or columns >= tracer.platform.sm_count // 2:
        return gradients
    parts = min(32 * 1024 // columns, -(-rows // 32))
    partial = [torch.empty(parts, width, dtype=x.dtype, device=x.device) if g is not None else None for g in gradients]
    for i, part in enumerate(partial):
        if part is not None:
            gradients[i] = part.sum(0)
    return gradients


# -- softmax ---------------------------------------------------------------------------------------------------------


def _softmax(tracer: Tracer, out: Tensor, x: Tensor, *_: Any, **__: Any) -> None:
    """SoftMax.cu, host_softmax."""
    with tracer.temporaries() as hold:
        hold(contiguous_copy(x), "softmax input, contiguous")


def _softmax_backward(tracer: Tracer, out: Tensor, grad: Tensor, result: Tensor, *_: Any, **__: Any) -> None:
    """SoftMax.cu: `grad * output` is made as a whole before the kernel, and laid out as the two are."""
    with _disable_current_modes():
        product = grad * result
    with tracer.temporaries() as hold:
        hold(product.numel() * product.element_size(), "softmax backward grad x output")
        hold(contiguous_copy(product), "softmax backward grad x output, contiguous")
        hold(contiguous_copy(result), "softmax backward output, contiguous")


def _log_softmax_backward(tracer: Tracer, out: Tensor, grad: Tensor, result: Tensor, *_: Any, **__: Any) -> None:
    with tracer.temporaries() as hold:
        hold(contiguous_copy(grad), "softmax backward gradient, contiguous")
        hold(contiguous_copy(result), "softmax backward output, contiguous")


def _safe_softmax(tracer: Tracer, out: Tensor, x: Tensor, *_: Any, **__: Any) -> None:
    """native/transformers/attention.cpp: rows that are masked entirely are looked for and set to zero."""
    with tracer.temporaries() as hold:
        hold(x.numel(), "masked positions")
        hold(x.numel() // x.shape[-1], "masked rows")
        hold(x.element_size(), "zero")


HIDDEN: dict[Any, Any] = {
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), _softmax),
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten._safe_softmax.default: _safe_softmax,
}
REPLACED: dict[Any, Any] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
}


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
    widest = power_of_two_below(width_limit) if width_limit < threads else threads
    highest = power_of_two_below(height_limit) if height_limit < threads else threads
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


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


ALIGN = 256
RADIX_BITS = 8
RADIX_DIGITS = 1 << RADIX_BITS
LARGEST_PORTION = (1 << 28) - 1
# By bytes of key and value (0: keys alone): threads of a tile, and how many 4-byte items each of them holds.
ONESWEEP_TILES = {
    (1, 8): (384, 18),
    (2, 8): (512, 23),
    (4, 8): (384, 29),
    (8, 8): (384, 24),
    (4, 4): (384, 17),
    (8, 0): (384, 30),
}
SINGLE_TILE = (256, 19)
SCAN_TILES = {2: (8, 3520), 4: (8, 1920), 8: (16, 896)}  # by item: bytes of a look-back state, items of a tile
REDUCE_TILE = 256 * 16
REDUCE_BLOCKS_PER_SM = 8 * 5
SELECT_TILE = 384 * 11


def _laid_out(*parts: int) -> int:
    """Each part aligned, and room to align the first (`alias_temporaries`)."""
    return sum(aligned(part, ALIGN) for part in parts) + ALIGN - 1


def radix_sort_bytes(count: int, key: int, value: int, bits: int | None = None) -> int:
    """Histograms of all passes, a look-back row a tile, the second halves of the double buffers, and counters; nothing
    to speak of where one thread block sorts all. `bits` is how many of a key's are looked at."""
    if count <= 0:
        return 0
    if count <= _items(SINGLE_TILE, key, value):
        return 1
    tile = _items(ONESWEEP_TILES[key, value], key, value)
    portion = LARGEST_PORTION // tile * tile
    passes, portions = -(-(bits or 8 * key) // RADIX_BITS), -(-count // portion)
    tiles = -(-min(count, portion) // tile)
    histograms, look_back = portions * passes * RADIX_DIGITS * 8, tiles * RADIX_DIGITS * 4
    doubled = (count * key, count * value) if passes > 1 else ()
    return _laid_out(histograms, look_back, *doubled, portions * passes * 4)


def _items(threads_and_items: tuple[int, int], key: int, value: int) -> int:
    threads, items = threads_and_items
    return threads * max(1, items * 4 // max(4, key, value))


def segmented_sort_bytes(count: int, key: int, value: int) -> int:
    """A thread block sorts each segment, so there are only the second halves of the double buffers."""
    return _laid_out(count * key, count * value)


def scan_bytes(count: int, item: int = 8) -> int:
    """Look-back states, one a tile and 32 before them."""
    state, items = SCAN_TILES.get(item, SCAN_TILES[8])
    return aligned(state * (32 + max(1, -(-count // items))), ALIGN) + 511


def reduce_bytes(count: int, item: int, sm_count: int) -> int:
    """Partial results of as many blocks as the card can hold, five times over; a single tile needs none
    (dispatch_reduce.cuh)."""
    return 1 if count <= REDUCE_TILE else _laid_out(item * sm_count * REDUCE_BLOCKS_PER_SM)


def select_bytes(count: int) -> int:
    """Look-back states, one a tile and 32 before them (dispatch_select_if.cuh)."""
    return aligned(8 * (32 + -(-count // SELECT_TILE)), ALIGN) + 511
