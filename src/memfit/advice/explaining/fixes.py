"""What to do, in words: by the cause, and where the job is not known by the phase and the tensor (`smaller_job`).

No saving is quoted here. What follows from the message alone (a process that holds so much, a tensor that is smaller at
another length) is a fact or arithmetic on its numbers, and called that.
"""

from __future__ import annotations

from collections.abc import Iterator

from memfit.advice.explaining.fix import Fix, in_words
from memfit.advice.explaining.smaller_job import of_the_tensor, smaller_job
from memfit.advice.explaining.withheld import Situation
from memfit.advice.request_size import request_intervals
from memfit.units import MiB, format_bytes

MOST_PIDS = 6
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, set before Python starts"
OF_THE_GPU = ("shortage", "other-processes", "limit", "refused", "impossible-request", "no-numbers")
"""Causes for which a smaller job is a cure."""


def fixes_in_words(case: Situation, *, predicted: bool) -> list[Fix]:
    """`predicted`: levers of the job are told elsewhere, with figures."""
    made = [*_of_the_cause(case), *_of_pieces(case)]
    if predicted:
        of_shape = case.cause.kind == "impossible-request"
        made += [fix for fix in of_the_tensor(case) if of_shape or fix.basis == "arithmetic"]
    if not predicted and case.cause.kind in OF_THE_GPU:
        made += smaller_job(case)
    return made


def _of_the_cause(case: Situation) -> Iterator[Fix]:
    oom, kind = case.oom, case.cause.kind
    if kind == "other-processes":
        yield _others(case)
    elif kind == "fragmentation":
        yield from _of_fragmentation(case)
    elif kind == "limit" and oom.form == "mps":
        yield in_words("close other programs", "MPS shares the machine's memory with everything else that runs")
    elif kind in ("limit", "impossible-request") and oom.allowed is not None and _has_more(case):
        said = f"torch.cuda.set_per_process_memory_fraction allows {oom.allowed.text}, and the card has more"
        yield in_words("raise the memory fraction", said, basis="message")
    elif kind == "private-pools":
        yield in_words(
            "fewer CUDA graphs", "capture fewer shapes, or let graphs share a pool: torch.cuda.graph(g, pool=...)"
        )
    elif kind == "refused":
        said = (
            "torch.cuda.get_per_process_memory_fraction(); on Windows the size of the page file; on the host `free -g`"
        )
        yield in_words("look for a limit", said)
    elif kind == "corrupt-size":
        yield in_words(
            "look at the shape", "print the sizes that go into the failing line: one is negative or was never set"
        )
    elif oom.remedy:
        yield in_words(oom.cure, oom.remedy)
    elif kind == "host-memory":
        said = "fewer data loader workers, memory-mapped data, weights loaded straight to the GPU (device_map)"
        yield in_words("less on the host", said)


def _has_more(case: Situation) -> bool:
    """Whether the card had what was asked for."""
    free, requested = case.oom.free, case.oom.requested
    return requested is not None and (free is None or requested.low <= free.high)


def _others(case: Situation) -> Fix:
    pids = case.account.other_pids
    named = ", ".join(map(str, pids[:MOST_PIDS])) + (" ..." if len(pids) > MOST_PIDS else "")
    who, end = (f"process {named} holds", "it") if len(pids) == 1 else (f"processes {named} hold", "them")
    said = f"{who} {format_bytes(case.account.others_bytes)}: end {end}"
    return in_words("free the card of the others", f"{said}, or choose another GPU by CUDA_VISIBLE_DEVICES",
                basis="message")  # fmt: skip


def _of_fragmentation(case: Situation) -> Iterator[Fix]:
    cached, held = case.account.cached_bytes or 0, case.account.held_bytes or 0
    said = "pieces that lie apart can then serve one request"
    if held > 4 * cached:
        said += f"; but only {format_bytes(cached)} of {format_bytes(held)} is in pieces, the rest is in use"
    yield in_words("expandable segments", said, basis="message",
               shell=EXPANDABLE)  # fmt: skip
    free, requested = case.oom.free, case.oom.requested
    if free is not None and requested is not None and free.low >= requested.high:
        said = f"{free.text} of the card was free: torch.cuda.set_per_process_memory_fraction is in the way"
        yield in_words("raise the memory fraction", said, basis="message")


def _of_pieces(case: Situation) -> Iterator[Fix]:
    """Where more was cached than was asked for: that it lies in pieces is likely, and to try costs nothing."""
    cached, asked = case.account.cached_bytes or 0, request_intervals(case.oom)
    untold = case.cause.fragmentation is not None and case.cause.fragmentation.verdict == "cannot tell"
    if not untold or case.cause.kind not in ("shortage", "limit") or len(asked) != 1 or not MiB < asked[0][1] <= cached:
        return
    told = any(name.startswith("expandable") for name in case.predicted)
    if not (told or case.clues.expandable or case.clues.windows or case.clues.split_size or case.oom.form != "cuda"):
        said = f"{format_bytes(cached)} was cached, enough for it: if that lay in pieces, this makes them one"
        yield in_words("expandable segments", said, basis="message", shell=EXPANDABLE)
