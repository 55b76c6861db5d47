"""The numbers of a message, added up: what torch uses and holds, what lies outside it, who else is there, what is left.

    capacity = allocated + cached + outside torch + other processes + free + rest

The rest is what the driver keeps, or what a process holds that is not listed. Every number was printed with two
decimals, so sums have a tolerance; a rest below it means that the message is not what it seems, and that is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memfit.advice.oom_message import Oom, ProcessUse, Size
from memfit.advice.tensor_names import request_intervals
from memfit.units import GiB, MiB, format_bytes

MOST_OUTSIDE = 3 * GiB
"""Context, libraries and NCCL of one process: a process that holds more than that beside the tensors is another one."""
BARE_CONTEXT = (150 * MiB, 2560 * MiB)
"""A process that has only started CUDA and perhaps NCCL."""
ALIKE = 0.15
SEVERAL = 3


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    nbytes: int
    says: str


@dataclass(frozen=True, slots=True)
class Trap:
    """What makes a number mean something else than it says."""

    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Account:
    rows: tuple[Row, ...] = ()
    whole_bytes: int | None = None
    """What the rows sum to, in words of the message: the card's capacity."""
    allocated_bytes: int | None = None
    cached_bytes: int | None = None
    held_bytes: int | None = None
    """By torch in this process: allocated and cached."""
    own_bytes: int | None = None
    """By this process, with what lies outside torch."""
    others_bytes: int = 0
    other_pids: tuple[int, ...] = ()
    free_bytes: int | None = None
    rest_bytes: int | None = None
    tolerance_bytes: int = 0
    traps: tuple[Trap, ...] = ()

    @property
    def reachable_bytes(self) -> int | None:
        """What this process could have if the others stay: what it has and what is free."""
        if self.free_bytes is None or self.own_bytes is None:
            return None
        return self.free_bytes + self.own_bytes


def account_of(oom: Oom) -> Account:
    allocated, cached = oom.allocated, _cached(oom)
    held = None if allocated is None or cached is None else allocated.middle + cached
    own, others, notes = _processes(oom, held)
    free = oom.free.middle if oom.free else None
    whole = oom.capacity.middle if oom.capacity else None
    others_bytes = sum(use.used.middle for use in others if use.used)
    own_bytes = own.used.middle if own and own.used else None
    tolerance = sum(
        size.tolerance
        for size in (oom.capacity, oom.free, oom.allocated, oom.unallocated or oom.reserved,
                     *(use.used for use in oom.processes))
        if size is not None
    )  # fmt: skip
    made = _Sums(
        whole=whole, free=free, allocated=allocated.middle if allocated else None, cached=cached, held=held,
        own=own_bytes, others=others_bytes, pools=oom.private_pools.middle if oom.private_pools else 0,
        listed=bool(oom.processes), outside=oom.other_allocations.middle if oom.other_allocations else None,
    )  # fmt: skip
    return Account(
        rows=tuple(made.rows()), whole_bytes=whole, allocated_bytes=made.allocated, cached_bytes=cached,
        held_bytes=held, own_bytes=own_bytes, others_bytes=others_bytes,
        other_pids=tuple(use.pid for use in others if use.pid is not None), free_bytes=free, rest_bytes=made.rest,
        tolerance_bytes=tolerance, traps=(*notes, *_traps(oom, made, others, tolerance)),
    )  # fmt: skip


def _cached(oom: Oom) -> int | None:
    if oom.unallocated is not None:
        return oom.unallocated.middle
    if oom.reserved is None or oom.allocated is None:
        return None
    if oom.reserved.middle < oom.allocated.middle:  # before 1.4 "cached" was what is beyond the allocated
        return oom.reserved.middle
    return oom.reserved.middle - oom.allocated.middle


@dataclass(frozen=True, kw_only=True)
class _Sums:
    whole: int | None
    free: int | None
    allocated: int | None
    cached: int | None
    held: int | None
    own: int | None
    others: int
    pools: int
    listed: bool
    outside: int | None

    @property
    def own_outside(self) -> int | None:
        if self.outside is not None:
            return self.outside
        return None if self.own is None or self.held is None else self.own - self.held

    @property
    def rest(self) -> int | None:
        if self.whole is None or self.free is None or self.own is None:
            return None
        return self.whole - self.free - self.own - self.others

    @property
    def not_told_apart(self) -> int | None:
        """Where no process is listed: context, libraries and other processes are one number."""
        if self.listed or self.whole is None or self.free is None or self.held is None:
            return None
        return self.whole - self.free - self.held

    def rows(self) -> Iterator[Row]:
        if self.allocated is not None:
            yield Row("allocated", self.allocated - self.pools, "live tensors of this process")
        if self.pools:
            yield Row("private pools", self.pools, "free, but kept for CUDA graphs")
        if self.cached is not None:
            yield Row("cached", self.cached, "held by torch, in pieces between live tensors")
        if self.own_outside is not None:
            yield Row("outside torch", self.own_outside, "of this process: CUDA context, libraries, NCCL")
        if self.others:
            yield Row("other processes", self.others, "on the same GPU")
        if self.not_told_apart is not None:
            yield Row("outside torch", self.not_told_apart, "CUDA context, libraries, and other processes if any")
        if self.free is not None:
            yield Row("free", self.free, "what the driver had left")
        if self.rest is not None:
            yield Row("rest", self.rest, "kept by the driver, or rounding" if self.rest >= 0 else "does not add up")


# -- who is who ----------------------------------------------------------------------------------------------------


def _processes(oom: Oom, held: int | None) -> tuple[ProcessUse | None, tuple[ProcessUse, ...], tuple[Trap, ...]]:
    """The process that failed, the others, and what had to be concluded."""
    own = next((use for use in oom.processes if use.pid is None), None)
    others = tuple(use for use in oom.processes if use.pid is not None)
    if own is not None or not others or held is None:
        return own, others, ()
    alike = [use for use in others if use.used and 0 <= use.used.high - held <= MOST_OUTSIDE]
    if not alike:
        return None, others, ()
    found = min(alike, key=lambda use: use.used.middle if use.used else 0)
    text = (
        f"process {found.pid} holds what this one should: it most likely is this one, under the number that it has "
        "outside the container"
    )
    return found, tuple(use for use in others if use is not found), (Trap("own-process-by-size", text),)


def _traps(oom: Oom, made: _Sums, others: Sequence[ProcessUse], tolerance: int) -> Iterator[Trap]:
    unknown = [use for use in oom.processes if use.used is None]
    if unknown:
        who = "this process" if unknown[0].pid is None else f"process {unknown[0].pid}"
        yield Trap("process-size-unknown", f"what {who} holds is n/a: the driver does not tell it (WSL and some others)")
    if made.whole is not None and made.allocated is not None and made.allocated > made.whole + tolerance:
        yield Trap("spilled", f"{format_bytes(made.allocated)} is allocated on a card of {format_bytes(made.whole)}: "
                   "Windows has moved the rest to system memory, which is slow")  # fmt: skip
    elif made.rest is not None and made.rest < -tolerance:
        yield Trap("does-not-add-up", f"the parts are {format_bytes(-made.rest)} more than the card has: a process is "
                   "counted twice, or memory was given back while the message was made")  # fmt: skip
    if made.own_outside is not None and made.own_outside < -tolerance:
        yield Trap("does-not-add-up", "this process holds less than torch has reserved: part of it is not on the card")
    if not oom.processes and oom.form in ("cuda", "hip") and oom.unallocated is not None:
        yield Trap("no-processes", "no process is listed (Windows, a virtual GPU, or no NVML): who else is on the card is "
                   "not known")  # fmt: skip
    yield from _bare_contexts(others)
    yield from _of_the_request(oom, made)


def _bare_contexts(others: Sequence[ProcessUse]) -> Iterator[Trap]:
    sizes = [use.used.middle for use in others if use.used and BARE_CONTEXT[0] <= use.used.middle <= BARE_CONTEXT[1]]
    if len(sizes) >= SEVERAL and max(sizes) - min(sizes) <= ALIKE * max(sizes):
        yield Trap("ranks-on-one-card", f"{len(sizes)} other processes of about {format_bytes(sizes[0])} each, the size "
                   "of a bare CUDA context: ranks that started CUDA on this card instead of their own; call "
                   "torch.cuda.set_device(local_rank) before anything else")  # fmt: skip


def _of_the_request(oom: Oom, made: _Sums) -> Iterator[Trap]:
    asked = request_intervals(oom)
    if oom.requested is not None and len(asked) > 1:
        yield Trap("segment", f"{oom.requested.text} is the segment that small requests share, not the tensor's size")
    if (
        made.free is not None and oom.requested is not None and made.free >= oom.requested.high
        and oom.allowed is None
    ):  # fmt: skip
        yield Trap("free-but-refused", f"{size_text(oom.free)} was free, more than was asked for: a limit is in the way "
                   "that the message does not name")  # fmt: skip


def size_text(size: Size | None) -> str:
    return "n/a" if size is None else size.text
