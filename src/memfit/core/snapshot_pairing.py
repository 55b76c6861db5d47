"""Which free ends which allocation, for a million events at once.

An address is handed out, asked back and given back, again and again: alloc, free_requested, free_completed. Sorted by
address (and, within one, by time) the events of a well-kept history repeat this pattern, and each has its partner right
beside it. A history that breaks the pattern anywhere is not paired here: `None`, and it has to be read event by event.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memfit.core.events import Action

ALLOC, REQUESTED, COMPLETED = 100, 101, 102  # beside the numbers of `Action`, for what has none of its own
Ints = npt.NDArray[np.int64]
_START = 3
# which may follow which at one address: the row is the event before (or none), the column the event itself
_MAY_FOLLOW = np.array([[0, 1, 0], [0, 0, 1], [1, 0, 0], [1, 1, 0]], dtype=bool)


@dataclass(frozen=True, slots=True)
class Paired:
    """Events as a `Trace` has them. Blocks are numbered by their ALLOC; -1, -2, ... are those without one."""

    source: Ints  # of each event, its place among those given
    actions: npt.NDArray[np.uint8]
    subjects: Ints
    allocs: Ints  # places of the allocations, in order
    orphans: Ints  # places of the frees that show the end of something born before
    ranges: Ints  # places of what the driver did
    live: dict[int, int]  # address -> block, at the end
    leaving: dict[int, int]  # the same, between the two halves of a free


def paired(codes: npt.NDArray[np.uint8], addresses: npt.NDArray[np.uint64]) -> Paired | None:
    blocks = np.flatnonzero(codes >= ALLOC)
    by_address = blocks[np.argsort(addresses[blocks], kind="stable")]
    kind = codes[by_address].astype(np.int64) - ALLOC
    same = np.zeros(len(by_address), dtype=bool)
    same[1:] = addresses[by_address[1:]] == addresses[by_address[:-1]]
    before = np.where(same, np.roll(kind, 1), _START)
    if not _MAY_FOLLOW[before, kind].all():
        return None

    allocs, orphans = np.flatnonzero(codes == ALLOC), np.sort(by_address[(kind == 1) & (before == _START)])
    number = np.zeros(len(codes), dtype=np.int64)
    number[allocs] = np.arange(len(allocs))
    number[orphans] = -1 - np.arange(len(orphans))
    requests = np.flatnonzero((kind == 1) & (before == 0))
    number[by_address[requests]] = number[by_address[requests - 1]]
    completions = np.flatnonzero(kind == 2)
    number[by_address[completions]] = number[by_address[completions - 1]]

    actions = codes.copy()
    actions[codes == ALLOC] = Action.ALLOC
    actions[codes == REQUESTED] = Action.FREE_REQUESTED
    actions[codes == COMPLETED] = Action.FREE_COMPLETED
    at, asked = by_address[completions], by_address[completions - 1]
    at_once = at == asked + 1
    actions[asked[at_once]] = Action.FREE
    kept = np.ones(len(codes), dtype=bool)
    kept[at[at_once]] = False
    ranges = np.flatnonzero(codes < ALLOC)
    number[ranges] = np.arange(len(ranges))

    last = np.append(~same[1:], True) if len(same) else same
    ends = {
        state: dict(zip(addresses[found].tolist(), number[found].tolist(), strict=True))
        for state in (0, 1)
        for found in (by_address[last & (kind == state)],)
    }
    source = np.flatnonzero(kept)
    return Paired(source, actions[source], number[source], allocs, orphans, ranges, ends[0], ends[1])
