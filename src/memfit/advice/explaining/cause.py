"""What happened, in one sentence, decided by the numbers alone; and whether fragmentation had a part in it.

Fragmentation is claimed only with evidence: enough was cached, expandable segments were off, and a snapshot shows that
the largest free piece was too small. The text of a message never has that evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memfit.advice.explaining.accounting import Account, size_text
from memfit.advice.explaining.clues import Clues
from memfit.advice.oom_message import Oom
from memfit.advice.tensor_names import request_intervals
from memfit.units import GiB, format_bytes

Kind = Literal[
    "shortage", "limit", "other-processes", "impossible-request", "corrupt-size", "private-pools", "fragmentation",
    "refused", "host-memory", "library", "no-numbers", "none",
]  # fmt: skip
Answer = Literal["yes", "no", "cannot tell"]

SIGNIFICANT = GiB // 2
"""Less than this of other processes is a desktop or a bare context, and not the cause."""


@dataclass(frozen=True, slots=True)
class Fragmentation:
    verdict: Answer
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    kind: Kind
    sentence: str
    certainty: str = "certain"
    short_bytes: int | None = None
    """By how much this one request was too large; what would have come after it is not in the message."""
    fragmentation: Fragmentation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a snapshot shows of the failed request."""

    requested_bytes: int
    cached_bytes: int | None
    largest_hole_bytes: int | None
    expandable: bool


def cause_of(oom: Oom, account: Account, clues: Clues, recorded: Recorded | None = None) -> Cause:
    if oom.form == "cpu":
        asked = size_text(oom.requested)
        return Cause(kind="host-memory", sentence=f"Host memory ran out, not the GPU's: {asked} was asked for at once.")
    if oom.form == "disguised":
        return _disguised(oom)
    if oom.over_an_exabyte:
        after = " After an NCCL timeout it is a consequence: look for the rank that failed first." if (
            clues.after_nccl_timeout) else ""  # fmt: skip
        said = "More than 2^60 bytes were asked for: a corrupt or negative size, never a real need."
        return Cause(kind="corrupt-size", sentence=said + after)
    fragmentation = fragmentation_of(oom, account, clues, recorded)
    if fragmentation.verdict == "yes":
        said = f"Memory was there, but in pieces: {fragmentation.why}."
        return Cause(kind="fragmentation", sentence=said, fragmentation=fragmentation)
    if oom.requested is None:
        said = "The GPU ran out of memory; the text has no numbers, so neither what was asked for nor who holds it is known."
        return Cause(kind="no-numbers", sentence=said, fragmentation=fragmentation)
    return _by_numbers(oom, account, fragmentation)


def _disguised(oom: Oom) -> Cause:
    said = oom.says[:1].upper() + oom.says[1:]
    sure = {"certain": "", "likely": " That is likely, not certain.", "possible": " That is only one possibility."}
    kind: Kind = "host-memory" if oom.where == "host" else "library"
    if not oom.remedy or oom.says.startswith("the name of the error"):
        kind, said = "no-numbers", "An out-of-memory error is named, but its message is missing"
    return Cause(kind=kind, sentence=f"{said}.{sure[oom.certainty]}", certainty=oom.certainty)


def _by_numbers(oom: Oom, account: Account, fragmentation: Fragmentation) -> Cause:
    assert oom.requested is not None
    asked, requested = oom.requested.text, oom.requested.middle
    whole = account.whole_bytes
    if whole is not None and oom.requested.low > whole:
        return Cause(kind="impossible-request", fragmentation=fragmentation, short_bytes=requested - whole, sentence=(
            f"{asked} was asked for at once, more than the whole card has ({size_text(oom.capacity)}): no setting of the "
            "allocator helps, the shape has to change."))  # fmt: skip
    if oom.allowed is not None:
        limited = _limited(oom, account, fragmentation)
        if limited is not None:
            return limited
    if oom.form == "mps":
        return _mps(oom, account, fragmentation)
    if account.free_bytes is None:
        return Cause(kind="shortage", sentence=f"The GPU was full: {asked} was asked for; how much was free is not in the "
                     f"text.{_holds(oom, account)}", fragmentation=fragmentation)  # fmt: skip
    short = requested - account.free_bytes
    if short <= 0:
        return Cause(kind="refused", certainty="likely", fragmentation=fragmentation, sentence=(
            f"{asked} was refused although {size_text(oom.free)} was free: a memory fraction that the message does not print "
            "(torch 2.1 to 2.4), or a limit of Windows, the driver or host memory. Which one cannot be told from it."))  # fmt: skip
    if account.others_bytes >= max(short, SIGNIFICANT):
        return Cause(kind="other-processes", short_bytes=short, fragmentation=fragmentation, sentence=(
            f"Other processes hold {format_bytes(account.others_bytes)} of the card: {asked} was asked for, "
            f"{size_text(oom.free)} was free, and without them it would have fitted.{_holds(oom, account)}"))  # fmt: skip
    if oom.private_pools is not None and oom.private_pools.low >= short:
        return Cause(kind="private-pools", short_bytes=short, fragmentation=fragmentation, sentence=(
            f"{asked} was asked for and {size_text(oom.free)} was free, {format_bytes(short)} too little, while "
            f"{oom.private_pools.text} lies free in private pools, which only their CUDA graphs may use."))  # fmt: skip
    return Cause(kind="shortage", short_bytes=short, fragmentation=fragmentation, sentence=(
        f"The GPU was full: {asked} was asked for and {size_text(oom.free)} was free, {format_bytes(short)} too "
        f"little.{_holds(oom, account)}"))  # fmt: skip


def _limited(oom: Oom, account: Account, fragmentation: Fragmentation) -> Cause | None:
    """By a memory fraction: what torch may hold is less than the card has."""
    assert oom.allowed is not None and oom.requested is not None
    held, requested = account.held_bytes, oom.requested.middle
    if held is None:
        held = account.allocated_bytes
    if oom.form == "mps":
        return None
    if oom.requested.low > oom.allowed.high:
        return Cause(kind="impossible-request", fragmentation=fragmentation, short_bytes=requested - oom.allowed.middle,
                     sentence=f"{oom.requested.text} was asked for at once, more than this process may hold in all "
                     f"({oom.allowed.text}, by a memory fraction): no setting of the allocator helps.")  # fmt: skip
    if held is None or held + requested + account.tolerance_bytes < oom.allowed.middle:
        return None
    if account.free_bytes is not None and account.free_bytes < oom.requested.low:
        return None  # the card was full before the limit was
    short = held + requested - oom.allowed.middle
    free = f"; {oom.free.text} of the card was free" if oom.free else ""
    return Cause(kind="limit", short_bytes=max(short, 0), fragmentation=fragmentation, sentence=(
        f"The process's own limit was reached, not the card's: it may hold {oom.allowed.text} (a memory fraction is set), "
        f"held {format_bytes(held)}, and {oom.requested.text} more was asked for{free}."))  # fmt: skip


def _mps(oom: Oom, account: Account, fragmentation: Fragmentation) -> Cause:
    others = f" and {oom.other_allocations.text} beside it" if oom.other_allocations else ""
    limit = f"; {oom.allowed.text} is allowed" if oom.allowed else ""
    return Cause(kind="limit" if oom.allowed else "shortage", fragmentation=fragmentation, sentence=(
        f"{size_text(oom.requested)} was asked for with {size_text(oom.allocated)} allocated by torch{others}{limit}: "
        "the share of the machine's memory that MPS may use is spent."))  # fmt: skip


def _holds(oom: Oom, account: Account) -> str:
    if account.own_bytes is None:
        if oom.allocated is None:
            return ""
        return f" {oom.allocated.text} is in live tensors of this process."
    inside = f", {oom.allocated.text} of it in live tensors" if oom.allocated else ""
    of = f" of {oom.capacity.text}" if oom.capacity else ""
    return f" This process holds {format_bytes(account.own_bytes)}{of}{inside}."


# -- fragmentation -------------------------------------------------------------------------------------------------


def fragmentation_of(oom: Oom, account: Account, clues: Clues, recorded: Recorded | None) -> Fragmentation:
    if recorded is not None and recorded.cached_bytes is not None:
        return _by_record(recorded)
    cached = account.cached_bytes
    asked = request_intervals(oom)
    if cached is None or not asked:
        return Fragmentation("cannot tell", "what was cached, or what was asked for, is not in the text")
    if cached + account.tolerance_bytes < asked[0][0]:
        return Fragmentation("no", f"only {format_bytes(cached)} was cached, less than was asked for")
    if clues.expandable:
        return Fragmentation("no", "expandable segments are on, which do not leave memory in pieces")
    return Fragmentation(
        "cannot tell",
        f"{format_bytes(cached)} was cached, enough in sum; how large its largest piece was only a snapshot shows",
    )


def _by_record(recorded: Recorded) -> Fragmentation:
    cached, hole, asked = recorded.cached_bytes or 0, recorded.largest_hole_bytes, recorded.requested_bytes
    if cached < asked:
        return Fragmentation("no", f"only {format_bytes(cached)} was cached, less than the {format_bytes(asked)} asked for")
    if hole is None:
        return Fragmentation("cannot tell", "the snapshot does not show the free pieces")
    pieces = f"{format_bytes(cached)} was cached, but its largest piece had {format_bytes(hole)}"
    if hole >= asked:
        return Fragmentation("no", f"a free piece of {format_bytes(hole)} was there, in another pool or stream")
    if recorded.expandable:
        return Fragmentation("no", f"{pieces}; but expandable segments were on already")
    return Fragmentation("yes", f"{pieces}, and {format_bytes(asked)} was asked for")
