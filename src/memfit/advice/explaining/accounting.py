"""The numbers of a message, added up: what torch uses and holds, what lies outside it, who else is there, what is left.

    capacity = allocated + cached + outside torch + other processes + free + rest

The rest is what the driver keeps, or what a process holds that is not listed. Every number was printed with two
decimals, so sums have a tolerance; a rest below it means that the message is not what it seems (`traps.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memfit.advice.oom_message import Oom, ProcessUse, Size
from memfit.units import GiB

MOST_OUTSIDE = 3 * GiB
"""Context, libraries and NCCL of one process: a process that holds more than that beside the tensors is another one."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    nbytes: int
    says: str


@dataclass(frozen=True, kw_only=True)
class Account:
    """None is a number that the message does not give."""

    whole_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    cached_bytes: int | None = None
    pools_bytes: int = 0
    """Free in private pools; the message counts it as allocated."""
    beside_bytes: int | None = None
    """Of MPS: of this process, beside torch."""
    own_bytes: int | None = None
    """By this process, with what lies outside torch."""
    own_by_size: int | None = None
    """The number of the process that is this one by its size alone, where the message does not say which it is."""
    others: tuple[ProcessUse, ...] = ()
    tolerance_bytes: int = 0

    @property
    def held_bytes(self) -> int | None:
        """By torch in this process."""
        return _sum(self.allocated_bytes, self.cached_bytes)

    @property
    def others_bytes(self) -> int:
        return sum(use.used.middle for use in self.others if use.used)

    @property
    def other_pids(self) -> tuple[int, ...]:
        return tuple(use.pid for use in self.others if use.pid is not None)

    @property
    def outside_bytes(self) -> int | None:
        """Of this process, not by torch: the context and libraries."""
        return self.beside_bytes if self.beside_bytes is not None else _sum(self.own_bytes, _minus(self.held_bytes))

    @property
    def rest_bytes(self) -> int | None:
        """What is left over when everything is counted; below 0 something is counted twice."""
        return _sum(self.whole_bytes, _minus(self.free_bytes), _minus(self.own_bytes), -self.others_bytes)

    @property
    def not_told_apart_bytes(self) -> int | None:
        """Where the message does not tell what this process holds: all that it does not name."""
        if self.own_bytes is not None:
            return None
        named = self.others_bytes + (self.cached_bytes or 0)
        return _sum(self.whole_bytes, _minus(self.free_bytes), _minus(self.allocated_bytes), -named)

    @property
    def reachable_bytes(self) -> int | None:
        """What this process could have if the others stay: what it has and what is free."""
        return _sum(self.free_bytes, self.own_bytes)

    def rows(self) -> Iterator[Row]:
        if self.allocated_bytes is not None:
            yield Row("allocated", self.allocated_bytes - self.pools_bytes, "live tensors of this process")
        if self.pools_bytes:
            yield Row("private pools", self.pools_bytes, "free, but kept for CUDA graphs")
        if self.cached_bytes is not None:
            yield Row("cached", self.cached_bytes, "held by torch, in pieces between live tensors")
        if self.outside_bytes is not None:
            said = "of this process: CUDA context, libraries, NCCL"
            yield Row("outside torch", self.outside_bytes, said if self.beside_bytes is None else "of this process")
        if self.others_bytes:
            yield Row("other processes", self.others_bytes, "on the same GPU")
        if self.not_told_apart_bytes is not None:
            said = "CUDA context, libraries, and processes that are not listed"
            cached = "" if self.cached_bytes is not None else "cached memory, "
            yield Row("not told apart" if cached else "outside torch", self.not_told_apart_bytes, cached + said)
        if self.free_bytes is not None:
            yield Row("free", self.free_bytes, "what the driver had left")
        if self.rest_bytes is not None:
            said = "kept by the driver, or rounding" if self.rest_bytes >= -self.tolerance_bytes else "does not add up"
            yield Row("rest", self.rest_bytes, said)


def account_of(oom: Oom) -> Account:
    allocated, cached = _middle(oom.allocated), _cached(oom)
    own, others = _processes(oom, _sum(allocated, cached))
    printed = (oom.capacity, oom.free, oom.allocated, oom.unallocated or oom.reserved)
    return Account(
        whole_bytes=_whole(oom), free_bytes=_middle(oom.free), allocated_bytes=allocated, cached_bytes=cached,
        pools_bytes=_middle(oom.private_pools) or 0, beside_bytes=_middle(oom.other_allocations),
        own_bytes=_middle(own.used) if own else None, own_by_size=own.pid if own else None, others=others,
        tolerance_bytes=sum(size.tolerance for size in (*printed, *(use.used for use in oom.processes)) if size),
    )  # fmt: skip


def _whole(oom: Oom) -> int | None:
    """Where more is free than the card has, the two are not of the same memory, and nothing adds up to either."""
    shared = oom.capacity is not None and oom.free is not None and oom.free.low > oom.capacity.high
    return None if shared else _middle(oom.capacity)


def _cached(oom: Oom) -> int | None:
    if oom.unallocated is not None:
        return oom.unallocated.middle
    if oom.reserved is None or oom.allocated is None:
        return None
    if oom.reserved.middle < oom.allocated.middle:  # before 1.4 "cached" was what is beyond the allocated
        return oom.reserved.middle
    return oom.reserved.middle - oom.allocated.middle


def _processes(oom: Oom, held: int | None) -> tuple[ProcessUse | None, tuple[ProcessUse, ...]]:
    """The process that failed, and the others. In a container the driver knows it by another number: then it is the
    one that holds what torch holds and a little more."""
    own = next((use for use in oom.processes if use.pid is None), None)
    others = tuple(use for use in oom.processes if use.pid is not None)
    if own is not None or held is None:
        return own, others
    alike = [(use.used.middle, use) for use in others if use.used and 0 <= use.used.high - held <= MOST_OUTSIDE]
    found = min(alike, key=lambda each: each[0])[1] if alike else None
    return found, tuple(use for use in others if use is not found)


def _sum(*parts: int | None) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _minus(part: int | None) -> int | None:
    return None if part is None else -part


def _middle(size: Size | None) -> int | None:
    return None if size is None else size.middle


def size_text(size: Size | None) -> str:
    return "n/a" if size is None else size.text
