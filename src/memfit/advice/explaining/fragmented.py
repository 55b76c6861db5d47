"""Whether fragmentation had a part in it: `yes` only with evidence.

Enough was cached, expandable segments were off, and a snapshot shows that the largest free piece was too small. The
text of a message never has that evidence: there the answer is `no` or `cannot tell`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memfit.advice.explaining.accounting import Account
from memfit.advice.oom_message import Oom
from memfit.advice.request_size import request_intervals
from memfit.units import format_bytes

Answer = Literal["yes", "no", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Fragmentation:
    verdict: Answer
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a snapshot shows of the failed request."""

    requested_bytes: int
    cached_bytes: int | None
    largest_hole_bytes: int | None
    expandable: bool


def fragmentation_of(
    oom: Oom, account: Account, recorded: Recorded | None = None, *, expandable: bool = False
) -> Fragmentation:
    """`expandable`: the text tells that expandable segments are on."""
    if recorded is not None and recorded.cached_bytes is not None:
        return _by_record(recorded, recorded.cached_bytes)
    cached, asked = account.cached_bytes, request_intervals(oom)
    if cached is None or not asked:
        return Fragmentation("cannot tell", "what was cached, or what was asked for, is not in the text")
    if cached + _tolerance(oom) < asked[0][0]:
        little = f"only {format_bytes(cached)} was cached, less than was asked for"
        return Fragmentation("no", little if cached else "nothing was cached")
    if expandable:
        return Fragmentation("no", "expandable segments are on, which do not leave memory in pieces")
    said = f"{format_bytes(cached)} was cached, enough in sum; how large its largest piece was only a snapshot shows"
    return Fragmentation("cannot tell", said)


def _tolerance(oom: Oom) -> int:
    """Of what was cached, as it was printed: one number, or in old forms the difference of two."""
    printed = (oom.unallocated,) if oom.unallocated else (oom.reserved, oom.allocated)
    return sum(size.tolerance for size in printed if size)


def _by_record(recorded: Recorded, cached: int) -> Fragmentation:
    hole, asked = recorded.largest_hole_bytes, recorded.requested_bytes
    if cached < asked:
        said = f"only {format_bytes(cached)} was cached, less than the {format_bytes(asked)} asked for"
        return Fragmentation("no", said)
    if hole is None:
        return Fragmentation("cannot tell", "the snapshot does not show the free pieces")
    if hole >= asked:
        return Fragmentation("no", f"a free piece of {format_bytes(hole)} was there, in another pool or stream")
    pieces = f"{format_bytes(cached)} was cached, but its largest piece had {format_bytes(hole)}"
    if recorded.expandable:
        return Fragmentation("no", f"{pieces}; but expandable segments were on already")
    return Fragmentation("yes", f"{pieces}, and {format_bytes(asked)} was asked for")
