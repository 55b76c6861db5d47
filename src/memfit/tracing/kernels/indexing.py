"""Indexing with tensors. With a mask, how much is selected depends on data, so it is asked like any other value.

`x[mask]`, `x[mask] = values`, `masked_select` and `where` all look for the true elements first
(native/cuda/Nonzero.cu): they are counted, and their positions written down as 64-bit numbers, one for each dimension.
Only filling through a single mask with a number needs no positions. Numbers in host memory, such as a list, move to the
device; those of 32 bits become 64-bit ones; several tensors of numbers must lie alike, and are copied if they do not
(native/TensorAdvancedIndexing.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.tracing.kernels.rows import reduce_bytes, select_bytes

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer

aten = torch.ops.aten
Tensor = torch.Tensor
Indices = Sequence[Tensor | None]


def _nonzero(tracer: Tracer, x: Tensor) -> Tensor:
    count = tracer.answers.count(x)
    with tracer.temporaries() as hold:
        hold(4, "number of true elements")
        tracer.temporary(reduce_bytes(x.numel(), 4, tracer.platform.sm_count), "count of true elements")
        found = torch.empty(x.dim(), count, dtype=torch.int64, device=x.device).t()
        tracer.temporary(select_bytes(x.numel()), "selection of true elements")
    return found


def _index(tracer: Tracer, x: Tensor, indices: Indices) -> Tensor:
    """native/IndexingUtils.h, `expandTensors`: a mask becomes one list of positions for each of its dimensions."""
    numbers: list[Tensor | None] = []
    for index in indices:
        if index is None or not _is_mask(index):
            numbers.append(index)
        else:
            numbers += _nonzero(tracer, index).unbind(1)
    found: Tensor = aten.index.Tensor(x, numbers)
    return found


def _masked_select(tracer: Tracer, x: Tensor, mask: Tensor) -> Tensor:
    both: Sequence[Tensor] = torch.broadcast_tensors(x, mask)  # type: ignore[no-untyped-call,unused-ignore]
    return _index(tracer, both[0], [both[1]])


def lists_on_host(index: Any) -> Any:
    """Of `x[[2, 3]]` and `x[:, [2, 1, 0]]` the lists as tensors: torch makes them where nobody sees what is in them."""
    if isinstance(index, tuple):
        return tuple(map(lists_on_host, index))
    if not isinstance(index, list) or not index or any(type(each) is not int for each in index):
        return index
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return torch.tensor(index, device="cpu")


def _copies(x: Tensor, indices: Indices) -> list[int]:
    return [*_from_host(x, indices), *_as_long(indices), *_to_lie_alike(indices)]


def _as_long(indices: Indices) -> list[int]:
    """`make_info`: the kernels read 64-bit numbers alone."""
    return [8 * index.numel() for index in indices if index is not None and index.dtype == torch.int32]


def _from_host(x: Tensor, indices: Indices) -> Iterator[int]:
    for index in indices:
        if index is not None and index.device.type != x.device.type:
            yield index.numel() * index.element_size()


def _to_lie_alike(indices: Indices) -> list[int]:
    numbers = [i for i in indices if i is not None and not _is_mask(i)]
    if len(numbers) < 2 or any(map(_is_mask, indices)):
        return []
    shape = torch.broadcast_shapes(*(i.shape for i in numbers))  # they may lie apart: those of the host move later
    spread = [i.expand(shape) for i in numbers]
    if len({i.stride() for i in spread}) == 1:
        return []
    return [i.numel() * i.element_size() for i in spread if not i.is_contiguous()]


def _index_by_numbers(tracer: Tracer, x: Tensor, indices: Indices) -> Any:
    copies = _copies(x, indices)
    if not copies:
        return NotImplemented
    with tracer.temporaries() as hold:
        for size in copies:
            hold(size, "index as the kernel reads it")
        with _disable_current_modes():
            result = aten.index.Tensor(x, indices)
        tracer.track(result, "aten.index.Tensor", x)
    return result


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _equal(tracer: Tracer, x: Tensor, y: Tensor) -> bool:
    """native/cuda/Equal.cpp: `at::eq(self, src).all().item()`."""
    if x.shape != y.shape:
        return False
    return bool(tracer.answers.value(aten.all.default(aten.eq.Tensor(x, y))))


def _all_close(tracer: Tracer, x: Tensor, y: Tensor, *tolerances: Any, **named: Any) -> bool:
    """native/TensorCompare.cpp: `at::isclose(...).all().item()`."""
    return bool(tracer.answers.value(aten.all.default(torch.isclose(x, y, *tolerances, **named))))


@dataclass(frozen=True)
class Target:
    """What an `index_put_` writes to."""

    masks: tuple[tuple[Tensor, int], ...]
    """Those whose positions are looked for, and how many there are."""
    numbers: int
    from_host: int
    """Bytes of a number that moves from the host."""
    copies: tuple[int, ...] = ()

    @property
    def positions(self) -> int:
        return max([self.numbers, *(count for _, count in self.masks)])


def target_of(tracer: Tracer, x: Tensor, indices: Indices, values: Tensor, accumulate: bool) -> Target:
    """native/TensorAdvancedIndexing.cpp: a number from the host only fills where there is a single mask
    (`canDispatchToMaskedFill`), and moves to the device otherwise."""
    masks = [i for i in indices if i is not None and _is_mask(i)]
    numbers = max((i.numel() for i in indices if i is not None and not _is_mask(i)), default=0)
    from_host = values.device.type != x.device.type
    if masks or from_host:
        tracer.rule_calls.as_traced()
    if from_host and len(masks) == 1 and not numbers and not accumulate:
        return Target((), 0, 0)
    return Target(
        masks=tuple((mask, _count(tracer, mask, values)) for mask in masks),
        numbers=numbers,
        from_host=values.element_size() * from_host,
        copies=() if accumulate else tuple(_copies(x, indices)),
    )


def _count(tracer: Tracer, mask: Tensor, values: Tensor) -> int:
    """Told by the values, where there is one for each."""
    told = values.shape[0] if values.dim() else 1
    return told if told > 1 else tracer.answers.most(mask)


@contextmanager
def positions_held(tracer: Tracer, target: Target) -> Iterator[None]:
    with tracer.temporaries() as hold:
        hold(target.from_host, "value from the host")
        for mask, count in target.masks:
            with tracer.temporaries() as inner:
                inner(4, "number of true elements")
                tracer.temporary(reduce_bytes(mask.numel(), 4, tracer.platform.sm_count), "count of true elements")
                hold(count * mask.dim() * 8, "positions of true elements")
                inner(select_bytes(mask.numel()), "selection of true elements")
        for size in target.copies:
            hold(size, "index as the kernel reads it")
        yield


def _unique(
    tracer: Tracer, x: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Its results; what the sort in it takes no rule tells."""
    count = tracer.answers.kinds(x)
    values = torch.empty(count, dtype=x.dtype, device=x.device)
    inverse = torch.empty(x.shape if return_inverse else 0, dtype=torch.int64, device=x.device)
    return values, inverse, torch.empty(count if return_counts else 0, dtype=torch.int64, device=x.device)


def _bincount(tracer: Tracer, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Its result; what the kernel takes beside it no rule tells."""
    kind = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    return torch.empty(tracer.answers.bins(x, minlength), dtype=kind, device=x.device)


DATA_DEPENDENT: dict[Any, Any] = {
    aten.bincount.default: _bincount,
    aten._unique2.default: _unique,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten.equal.default: _equal,
    aten.allclose.default: _all_close,
}
"""Tried where torch cannot tell a shape."""

REPLACED: dict[Any, Any] = {aten.index.Tensor: _index_by_numbers}

BY_INDEX = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
