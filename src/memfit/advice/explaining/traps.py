"""What makes a number of the message mean something else than it says: each is told beside the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memfit.advice.explaining.accounting import Account
from memfit.advice.explaining.clues import Clues
from memfit.advice.oom_message import Oom
from memfit.advice.request_size import request_intervals
from memfit.units import GiB, MiB, format_bytes

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
        yield (
            "no-processes",
            "no process is listed (Windows, a virtual GPU, or no NVML): who else is there is not known",
        )
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
