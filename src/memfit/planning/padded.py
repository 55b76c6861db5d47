"""Products that the card may pad or not: a job is planned both ways, and what a mixture of them may take is told.

torch times each product on the card and decides on it alone (pad_mm). A run with some of them padded may lie above one
with none and one with all: at a place where the unpadded code has its peak, a product is padded. That takes copies of
its operands, and where the kernel that makes them is timed at its first launch, a buffer as large as the L2 cache. It
is no such place where products or kernels are timed already: code that is being compiled makes no copies, and only one
thing is timed at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from memfit.events import Trace
from memfit.extrapolation.reused import COPIES, FLUSH
from memfit.replay.replay import Replay, replay
from memfit.replay.timeline import Ints, allocated_changes
from memfit.tracing.compiled.padding import OPERAND, products_padded
from memfit.units import format_bytes

NEGLIGIBLE = 1000
"""Copies of all products together that are so many times smaller than the peak are not planned by themselves."""


T = TypeVar("T")


def larger_of_two(
    first: T, again: Callable[[], T], trace_of: Callable[[T], Trace]
) -> tuple[T, dict[str, Any] | None, str]:
    """`first` was made with products unpadded, `again` makes it with all of them padded. The one to be told, the range
    of both unless padding is negligible, and what is said of it."""
    if padding_is_negligible(trace_of(first)):
        return first, None, negligible_in_words(trace_of(first))
    with products_padded():
        padded = again()
    ends = range_of(trace_of(first), trace_of(padded))
    return padded if ends["planned"] == "padded" else first, ends, range_in_words(ends)


def padding_is_negligible(trace: Trace) -> bool:
    return _copies(trace)[1] * NEGLIGIBLE < replay(trace).peak_allocated


def range_of(unpadded: Trace, padded: Trace) -> dict[str, Any]:
    """As it stands in the JSON document. Reserved is of torch's own settings of the allocator."""
    low, high = replay(unpadded), replay(padded)
    mixed = _peak_of_code(low, _buffer_of_more_kernels(low, high)) + _copies(unpadded)[0]
    return {
        "planned": "padded" if high.peak_allocated > low.peak_allocated else "unpadded",
        "unpadded_bytes": low.peak_allocated, "padded_bytes": high.peak_allocated,
        "most_bytes": max(low.peak_allocated, high.peak_allocated, mixed),
        "unpadded_reserved_bytes": low.peak_reserved, "padded_reserved_bytes": high.peak_reserved,
    }  # fmt: skip


def range_in_words(ends: dict[str, Any]) -> str:
    low, high, most = (ends[f"{name}_bytes"] for name in ("unpadded", "padded", "most"))
    if low == high == most:
        return f"at the peak {format_bytes(low)}, whether products are padded or not"
    both = f"at the peak {format_bytes(low)} without padded products, {format_bytes(high)} with all of them padded"
    if most == max(low, high):
        return f"{both}: the plan and the verdict are of the larger"
    return (
        f"{both}, with some of them at most {format_bytes(most)}: the plan is of the larger of the first two, what the"
        " device must have and the verdict are of the last"
    )


def negligible_in_words(trace: Trace) -> str:
    return f"padded, they would take at most {format_bytes(_copies(trace)[1])} more: planned unpadded"


def _copies(trace: Trace) -> tuple[int, int]:
    one, in_all = trace.facts.get(COPIES, (0, 0))
    return int(one), int(in_all)


def _peak_of_code(timeline: Replay, buffer: int) -> int:
    """The most that is allocated while no product is timed; with `buffer` where no kernel is."""
    kernels = _allocated_by(timeline, FLUSH)
    held = np.maximum(timeline.allocated, timeline.allocated - kernels + buffer)
    return int(held[_allocated_by(timeline, OPERAND) == 0].max(initial=timeline.allocated_before + buffer))


def _buffer_of_more_kernels(low: Replay, high: Replay) -> int:
    """Of those that make padded copies, if they are timed."""
    counts = [np.count_nonzero(_made_by(each.trace, FLUSH)) for each in (low, high)]
    return int(_allocated_by(high, FLUSH).max(initial=0)) if counts[1] > counts[0] else 0


def _allocated_by(timeline: Replay, op: str) -> Ints:
    """After each event."""
    sizes = np.where(_made_by(timeline.trace, op), timeline.size, 0)
    return allocated_changes(timeline.trace, sizes).cumsum()


def _made_by(trace: Trace, op: str) -> npt.NDArray[np.bool_]:
    number = trace.names.index(op) if op in trace.names else -1
    made: npt.NDArray[np.bool_] = np.frombuffer(trace.op_of, dtype=np.int32) == number
    return made
