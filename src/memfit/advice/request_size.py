"""How large the tensor was that could not be had: what torch prints is the segment that it asked of the driver.

    2.00 MiB  was a request of at most 1 MiB         20.00 MiB  one of 1 to 10 MiB, or of 18 to 20 MiB
    X MiB     one of at most X, by less than 2 MiB   X GiB      the same, and half a hundredth more or less

The first two are segments that requests share, so they say nothing about the tensor.
"""

from __future__ import annotations

from memfit.advice.oom_message import Oom, Size
from memfit.units import GiB, KiB, MiB

SMALL_SEGMENT, LARGE_SEGMENT, SEGMENT_ROUNDING = 2 * MiB, 20 * MiB, 2 * MiB
"""c10/core/AllocatorConfig.h: kSmallBuffer, kLargeBuffer, kRoundLarge."""
BLOCK = 512

Interval = tuple[int, int]
"""In bytes, both ends included."""


def request_intervals(oom: Oom) -> tuple[Interval, ...]:
    """The sizes that the tensor itself can have had."""
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
