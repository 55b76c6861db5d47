"""What happened, in one sentence, decided by the numbers alone.

Each rule looks at one thing and speaks up or stays silent; the first that speaks is the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from memfit.explaining.account import Account, Fragmentation, RecordedRequest, fragmentation_of, size_text
from memfit.explaining.clues import Clues
from memfit.explaining.message import NAME_ONLY, Oom, Size
from memfit.units import GiB, format_bytes

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
