"""The numbers of a message, added up, and what happened by them, in one sentence.

    capacity = allocated + cached + outside torch + other processes + free + rest

The rest is what the driver keeps, or what a process holds that is not listed. Every number was printed with two
decimals, so sums have a tolerance; a rest below it means that the message is not what it seems, and the traps say so.

Fragmentation had a part in it only with evidence: enough was cached, expandable segments were off, and a snapshot shows
that the largest free piece was too small. The text of a message never has that: there the answer is `no` or `cannot
tell`.

What happened is decided by the numbers alone: each rule looks at one thing and speaks up or stays silent; the first
that speaks is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from memfit.explaining.message import NAME_ONLY, Oom, ProcessUse, Size, request_intervals
from memfit.units import GiB, MiB, format_bytes

if TYPE_CHECKING:
    from memfit.explaining.job import Clues

MOST_OUTSIDE = 3 * GiB
"""Context, libraries and NCCL of one process: a process that holds more than that beside the tensors is another one."""

# -- the account -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AccountRow:
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
        return self.beside_bytes if self.beside_bytes is not None else _less(self.own_bytes, self.held_bytes)

    @property
    def rest_bytes(self) -> int | None:
        """What is left over when everything is counted; below 0 something is counted twice."""
        return _less(self.whole_bytes, self.free_bytes, self.own_bytes, self.others_bytes)

    @property
    def not_told_apart_bytes(self) -> int | None:
        """Where the message does not tell what this process holds: all that it does not name."""
        if self.own_bytes is not None:
            return None
        named = self.others_bytes + (self.cached_bytes or 0)
        return _less(self.whole_bytes, self.free_bytes, self.allocated_bytes, named)

    @property
    def reachable_bytes(self) -> int | None:
        """What this process could have if the others stay: what it has and what is free."""
        return _sum(self.free_bytes, self.own_bytes)

    def rows(self) -> Iterator[AccountRow]:
        if self.allocated_bytes is not None:
            yield AccountRow("allocated", self.allocated_bytes - self.pools_bytes, "live tensors of this process")
        if self.pools_bytes:
            yield AccountRow("private pools", self.pools_bytes, "free, but kept for CUDA graphs")
        if self.cached_bytes is not None:
            yield AccountRow("cached", self.cached_bytes, "held by torch, in pieces between live tensors")
        if self.outside_bytes is not None:
            what = ": CUDA context, libraries, NCCL" if self.beside_bytes is None else ""
            yield AccountRow("outside torch", self.outside_bytes, f"of this process{what}")
        if self.others_bytes:
            yield AccountRow("other processes", self.others_bytes, "on the same GPU")
        if self.not_told_apart_bytes is not None:
            said = "CUDA context, libraries, and processes that are not listed"
            cached = "" if self.cached_bytes is not None else "cached memory, "
            yield AccountRow("not told apart" if cached else "outside torch", self.not_told_apart_bytes, cached + said)
        if self.free_bytes is not None:
            yield AccountRow("free", self.free_bytes, "what the driver had left")
        if self.rest_bytes is not None:
            said = "kept by the driver, or rounding" if self.rest_bytes >= -self.tolerance_bytes else "does not add up"
            yield AccountRow("rest", self.rest_bytes, said)


def account_of(oom: Oom) -> Account:
    allocated, cached = _middle(oom.allocated), _cached(oom)
    own, others = _processes(oom, _sum(allocated, cached))
    printed = (oom.capacity, oom.free, oom.allocated, oom.unallocated or oom.reserved)
    return Account(
        whole_bytes=_whole(oom),
        free_bytes=_middle(oom.free),
        allocated_bytes=allocated,
        cached_bytes=cached,
        pools_bytes=_middle(oom.private_pools) or 0,
        beside_bytes=_middle(oom.other_allocations),
        own_bytes=_middle(own.used) if own else None,
        own_by_size=own.pid if own else None,
        others=others,
        tolerance_bytes=sum(size.tolerance for size in (*printed, *(use.used for use in oom.processes)) if size),
    )


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


def _less(whole: int | None, *parts: int | None) -> int | None:
    named = _sum(*parts)
    return None if whole is None or named is None else whole - named


def _middle(size: Size | None) -> int | None:
    return None if size is None else size.middle


def size_text(size: Size | None) -> str:
    return "n/a" if size is None else size.text


# -- fragmentation -----------------------------------------------------------------------------------------------------

Answer = Literal["yes", "no", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Fragmentation:
    verdict: Answer
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """What a snapshot shows of the failed request."""

    requested_bytes: int
    cached_bytes: int | None
    largest_hole_bytes: int | None
    expandable: bool


def fragmentation_of(
    oom: Oom, account: Account, recorded: RecordedRequest | None = None, *, expandable: bool = False
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


def _by_record(recorded: RecordedRequest, cached: int) -> Fragmentation:
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


# -- traps -------------------------------------------------------------------------------------------------------------

BARE_CONTEXT = (150 * MiB, 2560 * MiB)
"""A process that has only started CUDA and perhaps NCCL."""
ALIKE, SEVERAL = 0.15, 3
ONE_BLOCK_OF_INTEL = 4 * GiB


@dataclass(frozen=True, slots=True)
class Trap:
    kind: str
    text: str


def traps_of(oom: Oom, account: Account, clues: Clues) -> list[Trap]:
    of_numbers = (*_of_processes(oom, account), *_of_sums(account), *_of_the_card(oom), *_of_the_request(oom))
    return [Trap(kind, text) for kind, text in (*of_numbers, *_of_the_text(clues))]


def _of_processes(oom: Oom, account: Account) -> Iterator[tuple[str, str]]:
    if account.own_by_size is not None:
        said = f"process {account.own_by_size} holds what this one should: it most likely is this one, under the number"
        yield "own-process-by-size", f"{said} that it has outside the container"
    unknown = [use for use in oom.processes if use.used is None]
    if unknown:
        who = "this process" if unknown[0].pid is None else f"process {unknown[0].pid}"
        yield "process-size-unknown", f"what {who} holds is n/a: the driver does not tell it (WSL and some others)"
    if not oom.processes and oom.form in ("cuda", "hip") and oom.capacity and oom.unallocated:
        said = "no process is listed (Windows, a virtual GPU, or no NVML): who else is there is not known"
        yield "no-processes", said
    yield from _bare_contexts(account)


def _bare_contexts(account: Account) -> Iterator[tuple[str, str]]:
    low, high = BARE_CONTEXT
    sizes = [use.used.middle for use in account.others if use.used and low <= use.used.middle <= high]
    if len(sizes) >= SEVERAL and max(sizes) - min(sizes) <= ALIKE * max(sizes):
        said = f"{len(sizes)} other processes hold about {format_bytes(sizes[0])} each, the size of a bare CUDA context"
        cure = "then call torch.cuda.set_device(local_rank) before anything else"
        yield "ranks-on-one-card", f"{said}: if they are ranks of this job, they started CUDA on the wrong card; {cure}"


def _of_sums(account: Account) -> Iterator[tuple[str, str]]:
    whole, allocated, slack = account.whole_bytes, account.allocated_bytes, account.tolerance_bytes
    rest, outside = account.rest_bytes, account.outside_bytes
    if whole is not None and allocated is not None and allocated > whole + slack:
        said = f"{format_bytes(allocated)} is allocated on a card of {format_bytes(whole)}"
        yield "spilled", f"{said}: Windows has moved the rest to system memory, which is slow"
        return
    if rest is not None and rest < -slack:
        said = f"the parts are {format_bytes(-rest)} more than the card has"
        yield "does-not-add-up", f"{said}: a process is counted twice, or memory came free while the message was made"
    if outside is not None and outside < -slack:
        yield "does-not-add-up", "this process holds less than torch has reserved: part of it is not on the card"


def _of_the_card(oom: Oom) -> Iterator[tuple[str, str]]:
    if oom.capacity is not None and oom.free is not None and oom.free.low > oom.capacity.high:
        said = f"{oom.free.text} was free on a card of {oom.capacity.text}"
        yield "shared-memory", f"{said}: a GPU that shares the machine's memory, counted in two ways by its driver"
    if oom.form == "xpu" and oom.requested is not None and oom.requested.high >= ONE_BLOCK_OF_INTEL:
        yield "block-limit", f"many Intel GPUs give no single block of {format_bytes(ONE_BLOCK_OF_INTEL)} or more"


def _of_the_request(oom: Oom) -> Iterator[tuple[str, str]]:
    if oom.requested is None or oom.form == "snapshot":
        return
    if len(request_intervals(oom)) > 1:
        yield "segment", f"{oom.requested.text} is the segment that small requests share, not the size of the tensor"
    if oom.free is not None and oom.free.low >= oom.requested.high and oom.allowed is None:
        said = f"{oom.free.text} was free, more than was asked for"
        yield "free-but-refused", f"{said}: a limit is in the way that the message does not name"


def _of_the_text(clues: Clues) -> Iterator[tuple[str, str]]:
    if clues.after_nccl_timeout:
        said = "an NCCL timeout comes before it: this may be a consequence"
        yield "after-nccl-timeout", f"{said}; the rank that failed first tells more"
    if clues.handled:
        yield "handled", "the program went on after it, with a smaller batch or without this one"


# -- in one sentence ---------------------------------------------------------------------------------------------------

Kind = Literal[
    "shortage", "limit", "other-processes", "impossible-request", "corrupt-size", "private-pools", "fragmentation",
    "refused", "host-memory", "library", "no-numbers", "none",
]  # fmt: skip

SIGNIFICANT = GiB // 2
"""Less than this of other processes is a desktop or a bare context, and not the cause."""
SURENESS = {"certain": "", "likely": " (likely, not certain)", "possible": " (one possibility of several)"}


@dataclass(frozen=True, slots=True)
class Cause:
    kind: Kind
    sentence: str
    short_bytes: int | None = None
    """By how much this one request was too large; what would have come after it is not in the message."""
    certainty: str = "certain"
    fragmentation: Fragmentation | None = None


def cause_of(
    oom: Oom, account: Account, clues: Clues, recorded: RecordedRequest | None = None, *, card_bytes: int | None = None
) -> Cause:
    """`card_bytes`: what the card has, where the message does not say it."""
    if oom.form == "cpu":
        said = f"Host memory ran out, not the GPU's: {size_text(oom.requested)} was asked for at once."
        return Cause("host-memory", said)
    if oom.form == "disguised":
        return _disguised(oom)
    if oom.over_an_exabyte:
        said = "More than 2^60 bytes were asked for: a corrupt or negative size, never a real need"
        after = "; after an NCCL timeout it is a consequence, and the rank that failed first has the cause"
        return Cause("corrupt-size", f"{said}{after if clues.after_nccl_timeout else ''}.")
    fragmentation = fragmentation_of(oom, account, recorded, expandable=clues.expandable)
    if fragmentation.verdict == "yes":
        said = f"Memory was there, but in pieces: {fragmentation.why}{_why_no_more(oom)}."
        return Cause("fragmentation", said, fragmentation=fragmentation)
    if oom.requested is None:
        said = f"what was asked for is not in the text{_holds(oom, account)}"
        if account.allocated_bytes is None and account.own_bytes is None:
            said = "neither what was asked for nor who holds the rest is in the text"
        return Cause("no-numbers", f"The GPU ran out of memory; {said}.", fragmentation=fragmentation)
    case = _Numbers(oom, oom.requested, account, card_bytes)
    found = next(found for rule in RULES if (found := rule(case)) is not None)
    return replace(found, fragmentation=fragmentation)


def _disguised(oom: Oom) -> Cause:
    if oom.says == NAME_ONLY:
        return Cause("no-numbers", "An out-of-memory error is named, but its message is missing.")
    said = f"{oom.says[:1].upper()}{oom.says[1:]}{SURENESS[oom.certainty]}."
    return Cause("host-memory" if oom.where == "host" else "library", said, certainty=oom.certainty)


def _why_no_more(oom: Oom) -> str:
    """Beside fragmentation: why the driver gave nothing new."""
    if oom.free is None or oom.requested is None:
        return ""
    if oom.free.low < oom.requested.low:
        return f"; of the card only {oom.free.text} was free"
    limit = f"may hold {oom.allowed.text}" if oom.allowed else "has a limit of its own, a memory fraction"
    return f"; new memory was refused although {oom.free.text} of the card was free, so the process {limit}"


# -- by numbers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Numbers:
    oom: Oom
    requested: Size
    account: Account
    card_bytes: int | None

    @property
    def asked(self) -> str:
        return f"{self.requested.text} was asked for"

    @property
    def free(self) -> str:
        return f"{size_text(self.oom.free)} was free"

    @property
    def short_bytes(self) -> int:
        """Of what the driver had: torch has given back all that it could before it raised the error."""
        return max(self.requested.middle - (self.account.free_bytes or 0), 0)


def _impossible(case: _Numbers) -> Cause | None:
    whole = case.account.whole_bytes or case.card_bytes
    if whole is None or case.requested.low <= whole or (case.account.free_bytes or 0) > whole:
        return None
    has = case.oom.capacity.text if case.oom.capacity else format_bytes(whole)
    said = f"{case.asked} at once, more than the whole card has ({has}): no setting of the allocator helps, the"
    return Cause("impossible-request", f"{said} shape has to change.", case.requested.middle - whole)


def _beyond_the_limit(case: _Numbers) -> Cause | None:
    allowed = case.oom.allowed
    if allowed is None or case.requested.low <= allowed.high:
        return None
    said = f"{case.asked} at once, more than this process may hold in all ({allowed.text}): no setting of the allocator"
    return Cause("impossible-request", f"{said} helps.", case.requested.middle - allowed.middle)


def _limited(case: _Numbers) -> Cause | None:
    """By a memory fraction: what torch may hold is less than the card has."""
    allowed, account = case.oom.allowed, case.account
    held = account.allocated_bytes if account.held_bytes is None else account.held_bytes
    if allowed is None or held is None or case.oom.form == "mps":
        return None
    if held + case.requested.high + account.tolerance_bytes < allowed.low:
        return None
    if account.free_bytes is not None and account.free_bytes < case.requested.low:
        return None  # the card was full before the limit was reached
    said = f"The process's own limit was reached, not the card's: it may hold {allowed.text} (a memory fraction is set)"
    free = f"; {case.oom.free.text} of the card was free" if case.oom.free else ""
    said = f"{said}, held {format_bytes(held)}, and {case.requested.text} more was asked for{free}."
    return Cause("limit", said, max(held + case.requested.middle - allowed.middle, 0))


def _mps(case: _Numbers) -> Cause | None:
    oom = case.oom
    if oom.form != "mps":
        return None
    others = f" and {oom.other_allocations.text} beside it" if oom.other_allocations else ""
    limit = f" of {oom.allowed.text} allowed" if oom.allowed else ""
    said = f"MPS has used up its share of the machine's memory: {case.asked} with {size_text(oom.allocated)}"
    return Cause("limit" if oom.allowed else "shortage", f"{said} allocated by torch{others}{limit}.")


def _free_unknown(case: _Numbers) -> Cause | None:
    if case.account.free_bytes is not None:
        return None
    said = f"The GPU had no room for {case.requested.text}; how much was free is not in the text"
    return Cause("shortage", f"{said}{_holds(case.oom, case.account)}.")


def _refused(case: _Numbers) -> Cause | None:
    free = case.oom.free
    if free is None or free.low < case.requested.high:
        return None
    cut = case.oom.allocated is None or case.account.cached_bytes is None
    where = "may stand in the part of the message that is missing" if cut else "torch 2.1 to 2.4 do not print"
    said = f"{case.requested.text} was refused although {free.text} was free: by a memory fraction, which {where}"
    said += ", or by a limit of Windows, of the driver or of host memory; which one cannot be told."
    return Cause("refused", said, certainty="likely")


def _others(case: _Numbers) -> Cause | None:
    held, rest = case.account.others_bytes, case.account.rest_bytes
    if held < max(case.short_bytes, SIGNIFICANT):
        return None
    if rest is not None and rest < -case.account.tolerance_bytes:
        return None  # somebody is counted twice: how much the others really hold is not known
    said = f"Other processes hold {format_bytes(held)} of the card: {case.asked} and {case.free}, so without them it"
    return Cause("other-processes", f"{said} would have fitted{_holds(case.oom, case.account)}.", case.short_bytes)


def _private_pools(case: _Numbers) -> Cause | None:
    pools = case.oom.private_pools
    if pools is None or pools.low < case.short_bytes:
        return None
    said = f"{case.asked} and {case.free}, {format_bytes(case.short_bytes)} too little, while {pools.text} lies free in"
    return Cause("private-pools", f"{said} private pools, which only their CUDA graphs may use.", case.short_bytes)


def _shortage(case: _Numbers) -> Cause:
    little = f"{format_bytes(case.short_bytes)} too little" if case.short_bytes else "just too little"
    said = f"The GPU was full: {case.asked} and {case.free}, {little}{_holds(case.oom, case.account)}."
    return Cause("shortage", said, case.short_bytes)


RULES: tuple[Callable[[_Numbers], Cause | None], ...] = (
    _impossible, _beyond_the_limit, _limited, _mps, _free_unknown, _refused, _others, _private_pools, _shortage,
)  # fmt: skip


def _holds(oom: Oom, account: Account) -> str:
    allocated, own = oom.allocated, account.own_bytes
    if own is None:
        return f"; {allocated.text} is in live tensors of this process" if allocated else ""
    inside = f", {allocated.text} of it in live tensors" if allocated else ""
    of = f" of {oom.capacity.text}" if oom.capacity else ""
    return f"; this process holds {format_bytes(own)}{of}{inside}"
