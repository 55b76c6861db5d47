"""Rules of reductions, sorts, embeddings, pooling, dropout, scatter, and of all that has no file of its own here.

Two tables: ops whose hidden buffers come after their results (`HIDDEN`), and ops whose results and buffers
interleave and which are therefore written out (`REPLACED`). Each rule names its source in ATen/native/cuda (2.11);
all were measured on an H200, op by op (`tests/data/h200-ops.json`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.errors import TraceError
from memfit.tracing.kernels.indexing import positions_held, target_of
from memfit.tracing.kernels.layouts import contiguous_copy, is_dense
from memfit.tracing.kernels.rows import (
    INT32_MAX,
    accumulated_bytes,
    radix_sort_bytes,
    reduction_buffers,
    scan_bytes,
    segmented_sort_bytes,
)

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer

aten = torch.ops.aten
Tensor = torch.Tensor
Rule = Callable[..., Any]

BAG_MAX = 2
SMALL_SORT = 4096
"""Sort.h, should_use_small_sort."""
SHARED_ROWS = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800), (2**32, 400))
"""TensorTopK.cu, should_use_multiblock: up to so many rows, if they are at least so long."""
SELECT_BLOCKS_PER_SM = 6
"""TensorTopK.cu, get_items_per_thread: 65,536 registers, 40 for each of 256 threads."""


# -- reductions ------------------------------------------------------------------------------------------------------


def _reduce(
    tracer: Tracer, x: Tensor, dims: Sequence[int] | None, accumulator: int | None = None, per_thread: int = 4
) -> None:
    if x.numel() == 0 or x.dim() == 0:
        return
    size = accumulator or max(4, x.element_size())
    for buffers in reduction_buffers(x, dims, tracer.platform, accumulator=size, per_thread=per_thread):
        with tracer.temporaries() as hold:
            hold(buffers.values, "reduction across thread blocks")
            hold(buffers.semaphores, "reduction semaphores")


def _over_dims(tracer: Tracer, out: Any, x: Tensor, dims: Any = None, *_: Any, **__: Any) -> None:
    """ReduceOpsUtils.h, make_reduction: another dtype is converted as a whole first, but for half to float."""
    dims = [dims] if isinstance(dims, int) else dims
    if x.dtype == out.dtype or (x.dtype.is_floating_point and x.element_size() == 2 and out.dtype == torch.float32):
        with tracer.temporaries() as hold:
            if in_pieces := accumulated_bytes(x, dims, out):
                hold(in_pieces, "sum of pieces")
            _reduce(tracer, x, dims)
        return
    with tracer.temporaries() as hold:
        hold(x.numel() * out.element_size(), "reduction input in the output's dtype")
        _reduce(tracer, torch.empty_like(x, dtype=out.dtype), dims)


def reduced(tracer: Tracer, x: Tensor) -> None:
    """Into one number that has memory already."""
    _reduce(tracer, x, None)


def _over_all(tracer: Tracer, out: Any, x: Tensor, *_: Any, **__: Any) -> None:
    _over_dims(tracer, out, x)


def _norm(tracer: Tracer, out: Any, x: Tensor, order: float = 2, dims: Any = None, *_: Any, **__: Any) -> None:
    _reduce(tracer, x, dims)


def _largest(tracer: Tracer, out: Any, x: Tensor, dims: Any = None, *_: Any, **__: Any) -> None:
    """ReduceMaxValuesKernel.cu: the largest so far is kept in the tensor's own type, unlike a sum."""
    _reduce(tracer, x, [dims] if isinstance(dims, int) else dims, accumulator=x.element_size())


def _logical(tracer: Tracer, out: Any, x: Tensor, dims: Any = None, *_: Any, **__: Any) -> None:
    _reduce(tracer, x, [dims] if isinstance(dims, int) else dims, accumulator=1)


def _with_index(tracer: Tracer, out: Any, x: Tensor, dims: Any = None, *_: Any, **__: Any) -> None:
    _reduce(tracer, x, None if dims is None else [dims], accumulator=16)


def _moments(tracer: Tracer, out: Any, x: Tensor, dims: Any = None, *_: Any, **__: Any) -> None:
    _reduce(tracer, x, dims, accumulator=16, per_thread=2)


def _scan(tracer: Tracer, out: Tensor, x: Tensor, dim: int, *_: Any, **__: Any) -> None:
    """ScanKernels.cpp and ScanUtils.cuh: another dtype is converted first; a single row goes through cub."""
    with tracer.temporaries() as hold:
        if x.dtype != out.dtype:
            hold(out.numel() * out.element_size(), "scan input in the output's dtype")
        else:
            hold(contiguous_copy(x), "scan input, contiguous")
        if x.dim() and x.numel() == x.shape[dim]:
            hold(scan_bytes(x.numel(), out.element_size()), "scan")


def _masked_scatter(tracer: Tracer, out: Tensor, x: Tensor, mask: Tensor, *_: Any, **__: Any) -> None:
    """IndexKernel.cu: where each number goes is counted over the whole mask, which must lie in one piece."""
    with tracer.temporaries() as hold:
        hold(out.numel() * 8, "places of a masked scatter")
        hold(contiguous_copy(mask.expand(out.shape)), "mask, contiguous")
        hold(scan_bytes(out.numel()), "scan")


def _histogram(tracer: Tracer, out: Tensor, x: Tensor, bins: int = 100, low: float = 0, high: float = 0) -> None:
    """SummaryOps.cu: without bounds, the smallest and the largest value are looked for."""
    for _ in range(2 if low == high else 0):
        with tracer.temporaries() as hold:
            hold(x.element_size(), "bound of a histogram")
            _reduce(tracer, x, None)


def _isinf(tracer: Tracer, x: Tensor) -> Tensor:
    """native/TensorCompare.cpp."""
    return x.abs() == math.inf if x.is_floating_point() else torch.zeros_like(x, dtype=torch.bool)


def _logsumexp(tracer: Tracer, x: Tensor, dims: list[int], keepdim: bool = False) -> Any:
    """native/ReduceOps.cpp, `logsumexp_out_impl`: the largest is taken out first, unless it is infinite."""
    if x.numel() == 0 or not x.is_floating_point():
        return NotImplemented
    largest = x.amax(dims, keepdim=True)
    largest.masked_fill_(largest.abs() == math.inf, 0)
    return (x - largest).exp_().sum(dims, keepdim)


def _log_sigmoid(tracer: Tracer, x: Tensor) -> tuple[Tensor, Tensor]:
    """native/cuda/Activation.cpp: the buffer is for the CPU alone."""
    return torch.empty_like(x), x.new_empty(0)


def _softplus_backward(tracer: Tracer, grad: Tensor, x: Tensor, *_: Any) -> Tensor:
    """Laid out as any result of the two; torch's shape-only kernel says contiguous."""
    with _disable_current_modes():
        like = grad * x
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def _power_of_number(tracer: Tracer, out: Tensor, base: float, exponent: Tensor) -> None:
    """native/Pow.cpp: the number is put on the device in 64 bits."""
    if base != 1:
        tracer.temporary(8, "base of a power")


# -- written out -----------------------------------------------------------------------------------------------------


def _native_dropout(tracer: Tracer, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Dropout.cu: the bool mask is made before the output."""
    mask = torch.empty_like(x, dtype=torch.bool)
    return torch.empty_like(x), mask


def _loss_by_position(
    tracer: Tracer, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
) -> tuple[Tensor, Tensor]:
    """NLLLoss2d.cu: the sum of weights is made before the loss."""
    weights = x.new_empty(())
    return x.new_empty(() if reduction else target.shape), weights


def _embedding(tracer: Tracer, weight: Tensor, indices: Tensor, *_: Any) -> Any:
    """native/Embedding.cpp: indices are taken in a row, and copied where they do not lie so."""
    if indices.dim() < 2 or indices.is_contiguous():
        return NotImplemented
    in_a_row = indices.reshape(-1)
    found = weight.new_empty(*indices.shape, *weight.shape[1:])
    del in_a_row
    return found


def _bags(
    tracer: Tracer,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    by_frequency: bool = False,
    mode: int = 0,
    sparse: bool = False,
    factors: Tensor | None = None,
    last: bool = False,
    padding: int = -1,
) -> Any:
    """EmbeddingBag.cu, `_embedding_bag_cuda`."""
    bags = offsets.shape[0] - last
    sizes = indices.new_empty(bags)
    owners = indices.new_empty(indices.shape[0])
    out = weight.new_empty(bags, weight.shape[1])
    return out, owners, sizes, indices.new_empty((bags, weight.shape[1]) if mode == BAG_MAX else 0)


def _bags_backward(
    tracer: Tracer,
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    owners: Tensor,
    sizes: Tensor,
    largest: Tensor,
    rows: int,
    by_frequency: bool,
    mode: int,
    sparse: bool,
    factors: Tensor | None,
    padding: int = -1,
) -> Any:
    """The gradient of a table's rows is summed as that of an embedding, however few there are."""
    if sparse:
        return NotImplemented
    if mode == BAG_MAX:
        return grad.new_empty(rows, grad.shape[-1])
    return _summed_by_index(tracer, grad, indices, rows, by_frequency, few=0)


def _pool_backward(tracer: Tracer, out: Tensor, grad: Tensor, x: Tensor, *_: Any, **__: Any) -> None:
    """DilatedMaxPool2d.cu: the gradient is read as the input lies."""
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    with tracer.temporaries() as hold:
        read = grad.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        hold(0 if read else grad.numel() * grad.element_size(), "pooling gradient, as the kernel reads it")


def _roll(tracer: Tracer, x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """native/TensorTransformations.h, `roll_common`: one dimension after the other."""
    if len(dims) < 2:
        return NotImplemented
    once = torch.empty_like(x)
    for _ in dims[1:]:
        once = torch.empty_like(once)
    return once


def _columns(tracer: Tracer, x: Tensor, kernel: Sequence[int], *rest: Any) -> Tensor:
    """Im2Col.cu: a result like the input is made first, and grows."""
    with tracer.temporaries() as hold:
        hold(x.numel() * x.element_size(), "unfolded, before it grows")
        with _disable_current_modes():
            shape = aten.im2col(x, kernel, *rest).shape
        return x.new_empty(shape)


def _from_columns(tracer: Tracer, x: Tensor, size: Sequence[int], *rest: Any) -> Tensor:
    """Col2Im.cu: a result like the input is made, and shrinks, which gives nothing back."""
    result = torch.empty_like(x)
    with _disable_current_modes():
        return result.resize_(aten.col2im(x, size, *rest).shape)


def _nothing(tracer: Tracer, *_: Any, **__: Any) -> None:
    """A fused optimizer works in place."""


def _embedding_backward(
    tracer: Tracer, grad: Tensor, indices: Tensor, rows: int, padding: int, by_frequency: bool
) -> Tensor:
    """Embedding.cu, embedding_dense_backward_cuda."""
    with tracer.temporaries() as hold:
        hold(contiguous_copy(indices), "embedding backward indices, contiguous")
        hold(contiguous_copy(grad), "embedding backward gradient, contiguous")
        return _summed_by_index(tracer, grad, indices, rows, by_frequency)


def _summed_by_index(
    tracer: Tracer, grad: Tensor, indices: Tensor, rows: int, by_frequency: bool, few: int = 3072
) -> Tensor:
    """EmbeddingBackwardKernel.cu: few indices go straight into the table's gradient; more than 3,072 are sorted, and
    the rows of equal indices are summed in runs of ten into fp32."""
    count, width = indices.numel(), grad.shape[-1]
    if count <= few and not by_frequency:
        return grad.new_empty(rows, width)
    index = indices.element_size()
    runs = min(count, rows)
    partial_runs = count // 10 + runs
    with tracer.temporaries() as hold:
        hold(count * index, "embedding backward sorted indices")
        hold(count * index, "embedding backward original positions")
        with tracer.temporaries() as inner:
            inner(count * index, "embedding backward positions")
            inner(radix_sort_bytes(count, index, index), "radix sort")
        result = grad.new_empty(rows, width)
        hold(count * index, "embedding backward runs")
        hold(index, "embedding backward number of runs")
        with tracer.temporaries() as inner:
            inner(count * index, "embedding backward run keys")
            inner(scan_bytes(0), "unique")
        hold(runs * index, "embedding backward parts of runs")
        hold(runs * index, "embedding backward offsets of runs")
        tracer.temporary(scan_bytes(runs), "scan")
        hold(index, "embedding backward number of parts")
        hold(partial_runs * index, "embedding backward offsets of parts")
        hold(partial_runs * width * max(4, grad.element_size()), "embedding backward partial sums")
    return result


def _into_fresh_zeros(tracer: Tracer, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Backward formulas scatter into zeros they have just made: in place on CUDA, out of place under a dispatch mode
    (`areAnyTensorSubclassLike` in FunctionsManual.cpp). Elsewhere these ops do make a new tensor."""
    return x if tracer.in_backward and not tracer.modules.depth_above_backward else torch.empty_like(x)


def _index_put(
    tracer: Tracer, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    result = _into_fresh_zeros(tracer, x)
    _sort_of_indices(tracer, None, x, indices, values, accumulate)
    return result


def _index_copy(tracer: Tracer, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    """native/TensorAdvancedIndexing.cpp; torch's shape-only kernel lets pass what CUDA's does not."""
    if x.dtype != source.dtype:
        raise TraceError(
            f"the job itself fails: index_copy_() of {source.dtype} into {x.dtype}",
            hint="a static cache under autocast does this where keys and values differ in dtype: take a dynamic one",
        )
    return NotImplemented


def _foreach_norm(
    tracer: Tracer, tensors: list[Tensor], order: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """ForeachReduceOp.cu: one accumulator for each chunk of 65,536 elements of the largest tensor, for all tensors."""
    chunks = max((-(-t.numel() // 65536) for t in tensors), default=0)
    kind = dtype or tensors[0].dtype
    width = max(4, kind.itemsize)
    with tracer.temporaries() as hold:
        hold(len(tensors) * chunks * width, "foreach norm partial norms")
        tracer.counts(tensors)
        return [t.new_empty((), dtype=kind) for t in tensors]


def _sort_of_indices(
    tracer: Tracer,
    out: Any,
    x: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    *_: Any,
) -> None:
    """Indexing.cu: accumulation sorts linear indices so that equal ones are added in order, by as many bits as the
    highest of them has."""
    target = target_of(tracer, x, indices, values, accumulate)
    with positions_held(tracer, target):
        if accumulate:
            _sort_of_positions(tracer, x, indices, target.positions)


def _sort_of_positions(tracer: Tracer, x: Tensor, indices: Sequence[Tensor | None], count: int) -> None:
    last = max((at for at, index in enumerate(indices) if index is not None), default=0)
    highest = max(x.numel() - 1, 0) // max(math.prod(x.shape[last + 1 :]), 1)
    with tracer.temporaries() as hold:
        with tracer.temporaries() as inner:
            inner(count * 8, "index_put index")
            hold(count * 8, "index_put linear index")
        for label in ("sorted indices", "original positions", "positions"):
            hold(count * 8, f"index_put {label}")
        hold(radix_sort_bytes(count, 8, 8, bits=max(1, highest.bit_length())), "radix sort")


# -- sorting and drawing ---------------------------------------------------------------------------------------------


def _sort(tracer: Tracer, out: Any, x: Tensor, dim: int = -1, *_: Any, **__: Any) -> None:
    """Sort.cpp: up to 4,096 in a row are sorted in place, beside one row of positions; longer rows must lie one after
    the other, and are copied where they do not."""
    if x.dim() == 0 or x.numel() == 0:
        return
    with tracer.temporaries() as hold:
        if x.shape[dim] <= SMALL_SORT:
            hold(x.shape[dim] * 8, "sort positions")
            return
        in_place = x.stride(dim) == 1
        if not in_place or not is_dense(x):
            hold(x.numel() * x.element_size(), "sort input, row by row")
        if not in_place:
            hold(x.numel() * x.element_size(), "sort values, row by row")
            hold(x.numel() * 8, "sort indices, row by row")
        _sort_rows(tracer, x.numel() // x.shape[dim], x.shape[dim], x.element_size())


def _sort_rows(tracer: Tracer, rows: int, row: int, size: int) -> None:
    """SortStable.cu: one row or very long ones go one by one, fewer than 128 all at once and then by their row, more
    through a segmented sort; in batches below 2^31 elements."""
    batch = max(INT32_MAX // row, 1)
    for some in (min(batch, rows - start) for start in range(0, rows, batch)):
        count = some * row
        with tracer.temporaries() as hold:
            if some == 1 or row >= 1_000_000:
                hold(row * 8, "sort positions")
                for _ in range(some):
                    tracer.temporary(radix_sort_bytes(row, size, 8), "radix sort")
            elif some < 128:
                hold(count * 8, "sort positions and rows")
                hold(count * 8, "sort positions and rows, by value")
                with tracer.temporaries() as inner:
                    inner(count * size, "sort keys")
                    inner(radix_sort_bytes(count, size, 8), "radix sort")
                tracer.temporary(radix_sort_bytes(count, 8, 0, bits=max(1, (some - 1).bit_length())), "radix sort")
            else:
                hold(count * 8, "sort positions")
                hold(segmented_sort_bytes(count, size, 8), "segmented sort")


def _topk(
    tracer: Tracer, out: Any, x: Tensor, k: int, dim: int = -1, largest: bool = True, ordered: bool = True
) -> None:
    """TensorTopK.cu: several thread blocks share a row if rows are long for their number; then the k are sorted."""
    if x.dim() == 0 or x.numel() == 0 or k == 0:
        return
    row, size = x.shape[dim], x.element_size()
    rows = x.numel() // row
    with tracer.temporaries() as hold:
        hold(contiguous_copy(x), "topk input, contiguous")
        if row >= next((least for most, least in SHARED_ROWS if rows <= most), math.inf):
            _radix_select(tracer, rows, row, size)
    if ordered and k > SMALL_SORT:
        with tracer.temporaries() as hold:
            hold(rows * k * 8, "topk sorted indices")
            hold(rows * k * size, "topk sorted values")
            _sort_rows(tracer, rows, k, size)
            hold(rows * k * 8, "topk indices in order")


def _radix_select(tracer: Tracer, rows: int, row: int, size: int) -> None:
    """TensorTopK.cu, mbtopk::launch: digits are counted for each of the blocks that share a row."""
    threads = 256
    each = -(-rows * row // (tracer.platform.sm_count * SELECT_BLOCKS_PER_SM * threads))
    blocks = rows * -(-row // (threads * min(max(each, 4), 64)))
    with tracer.temporaries() as hold:
        hold(rows * size, "topk k-th values")
        hold(rows * 2 * 4, "topk ranks")
        hold(rows * 2 * max(4, size), "topk digits")
        hold(blocks * 256 * 2, "topk counts")
        hold(rows * 256 * 4, "topk sums of counts")
        hold(blocks * 4, "topk counts within k")
        hold(blocks * 4, "topk counts of the k-th")
        for _ in range(2):
            tracer.temporary(scan_bytes(0), "scan by row")


def _isin(tracer: Tracer, elements: Tensor, test: Tensor, *, assume_unique: bool = False, invert: bool = False) -> Any:
    """native/TensorCompare.cpp and cuda/TensorCompare.cu: each is compared with each, unless there are many."""
    if test.numel() >= 10 * elements.numel() ** 0.145:
        return NotImplemented
    found = torch.empty_like(elements, dtype=torch.bool)
    same = elements.unsqueeze(-1) == test.view(*[1] * elements.dim(), -1)
    same.any(-1)
    return found


def _median(tracer: Tracer, x: Tensor) -> Tensor:
    """native/cuda/Sorting.cpp, `median_impl`: everything is sorted, and NaN is looked for at the end."""
    ordered = x.flatten().sort()[0]
    return torch.where(ordered[-1].isnan(), ordered[-1], ordered[(x.numel() - 1) // 2])


def _multinomial(tracer: Tracer, x: Tensor, count: int, replacement: bool = False, **_: Any) -> Tensor:
    """Distributions.cpp: one draw, or draws without replacement, check the distribution, divide it by exponential
    noise of its size, and take the largest."""
    drawn = x.new_empty((*x.shape[:-1], count), dtype=torch.int64)
    if count > 1 and replacement:
        with tracer.temporaries() as hold:
            for name in ("rows", "distribution", "sums"):
                hold(x.numel() * x.element_size(), f"multinomial {name}")
        return drawn
    largest = x.max()
    finite = largest < math.inf
    smallest = x.min()
    positive = smallest >= 0
    valid = finite & positive
    del largest, finite, smallest, positive
    sums = x.sum(-1)
    empty = sums == 0
    empty = empty.any() if x.dim() > 1 else empty
    del sums
    empty.logical_not()
    noise = torch.empty_like(x)
    if count == 1:
        _with_index(tracer, None, noise, -1)
    else:
        torch.topk(noise, count)
    del noise, empty, valid
    return drawn


HIDDEN: dict[Any, Rule] = {
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim), _over_dims),
    **dict.fromkeys((aten.sum.default, aten.mean.default, aten.prod.default), _over_all),
    **dict.fromkeys((aten.amax.default, aten.amin.default, aten.max.default, aten.min.default), _largest),
    aten.linalg_vector_norm.default: _norm,
    **dict.fromkeys(
        (aten.all.default, aten.any.default, aten.all.dim, aten.any.dim, aten.all.dims, aten.any.dims), _logical
    ),
    **dict.fromkeys((aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim), _with_index),
    **dict.fromkeys((aten.var.correction, aten.std.correction, aten.var_mean.correction), _moments),
    **dict.fromkeys((aten.cumsum.default, aten.cumprod.default), _scan),
    **dict.fromkeys((aten.masked_scatter.default, aten.masked_scatter_.default), _masked_scatter),
    aten.topk.default: _topk,
    **dict.fromkeys((aten.sort.default, aten.sort.stable), _sort),
    aten.index_put_.default: _sort_of_indices,
    aten._index_put_impl_.default: _sort_of_indices,
    aten.histc.default: _histogram,
    aten.pow.Scalar: _power_of_number,
    aten.max_pool2d_with_indices_backward.default: _pool_backward,
}

REPLACED: dict[Any, Rule] = {
    aten.native_dropout.default: _native_dropout,
    aten.multinomial.default: _multinomial,
    aten.nll_loss2d_forward.default: _loss_by_position,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    **dict.fromkeys(
        (aten.scatter_add.default, aten.scatter.src, aten.scatter.value, aten.index_add.default), _into_fresh_zeros
    ),
    aten.index_put.default: _index_put,
    aten.index_copy_.default: _index_copy,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.median.default: _median,
    aten.isinf.default: _isinf,
    aten.isin.Tensor_Tensor: _isin,
    aten.logsumexp.default: _logsumexp,
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.softplus_backward.default: _softplus_backward,
    aten._embedding_bag.default: _bags,
    aten._embedding_bag_forward_only.default: _bags,
    aten._embedding_bag_backward.default: _bags_backward,
    aten.roll.default: _roll,
    aten.im2col.default: _columns,
    aten.col2im.default: _from_columns,
    aten._fused_sgd_.default: _nothing,
}
