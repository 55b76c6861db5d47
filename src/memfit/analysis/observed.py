"""A recording, taken at its word: every block where it was seen to lie.

A snapshot names the address of each block but, of those that are gone, not the size: it is the rounded request, and in
the large pool perhaps a tail that was too small to split off. Which of the two it was shows in the free memory that the
block was cut from. So the free pieces are followed through all events, with nothing but a table of where each begins
and ends: no search, no model of what the allocator would have chosen, and pools and streams do not matter.

How memory lay when the recording began is found by undoing the driver's part of the events from the final state; what
was live then are the blocks without an ALLOC. Whatever contradicts itself is counted in `doubts`, and passed over.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from memfit.events import Action, Trace
from memfit.replay.alloc_config import MIN_BLOCK_SIZE, SMALL_SIZE, AllocatorConfig
from memfit.replay.driver import COMES, DRIVER_ACTIONS, DriverCall, Range, Ranges
from memfit.replay.timeline import (
    BEFORE,
    Ints,
    Lifetimes,
    Timeline,
    allocated_changes,
    check_total,
    lifetimes,
    rounded_sizes,
)
from memfit.snapshots.read import Snapshot

NEVER_SPLIT = 1 << 62
MAX_SEARCHED = 5_000_000  # steps of a search that an honest recording needs a few of


def observe(snapshot: Snapshot, device: int, config: AllocatorConfig) -> Timeline:
    trace = snapshot.traces[device]
    lives = lifetimes(trace)
    final = [segment for segment in snapshot.segments if segment.device == device]
    driver = tuple(_driver_events(trace))
    held, doubts = _undone(((s.address, s.address + s.total_size, s.is_expandable) for s in final), driver)
    rounded = rounded_sizes(trace, config)
    at_end = {b.address: b.size for segment in final for b in segment.blocks if b.state != "inactive"}
    memory = _Memory(trace, lives, rounded, config, held)
    memory.place_what_was_there(at_end)
    memory.play()
    size, start = memory.sizes(), held.total
    check_total(size)
    before = int(size[(lives.birth == BEFORE) & (lives.death != BEFORE)].sum())
    allocated = before + allocated_changes(trace, size).cumsum()
    reserved = start + _reserved_changes(trace, driver, start).cumsum()
    known = bool(final or driver) and bool((reserved >= allocated).all()) and start >= before
    return Timeline(
        trace=trace,
        size=size,
        address=np.frombuffer(trace.addresses, dtype=np.uint64),
        allocated=allocated,
        reserved=reserved if known else None,
        allocated_before=before,
        reserved_before=start,
        start=tuple(held),
        driver=driver,
        doubts=doubts + memory.doubts,
        known_lives=lives,
    )


def _driver_events(trace: Trace) -> Iterable[DriverCall]:
    actions = np.frombuffer(trace.actions, dtype=np.uint8)
    for event in np.flatnonzero(np.isin(actions, DRIVER_ACTIONS)).tolist():
        subject = trace.subjects[event]
        address, size, stream = (c[subject] for c in (trace.range_addresses, trace.range_sizes, trace.range_streams))
        yield event, Action(trace.actions[event]), address, size, stream


def _reserved_changes(trace: Trace, driver: tuple[DriverCall, ...], before: int) -> Ints:
    check_total(np.array([before, *(size for _, _, _, size, _ in driver)], dtype=np.float64))
    change = np.zeros(len(trace), dtype=np.int64)
    for event, action, _, size, _ in driver:
        change[event] += size if action in COMES else -size
    return change


def _undone(final: Iterable[Range], driver: tuple[DriverCall, ...]) -> tuple[Ranges, int]:
    held, doubts = Ranges(), 0
    for start, end, expandable in final:
        doubts += not held.do(Action.SEGMENT_MAP if expandable else Action.SEGMENT_ALLOC, start, end - start)
    for _, action, address, size, _ in reversed(driver):
        doubts += not held.undo(action, address, size)
    return held, doubts


class _Memory:
    """Free pieces by where they begin and by where they end. Pieces of two segments never merge."""

    def __init__(self, trace: Trace, lives: Lifetimes, rounded: Ints, config: AllocatorConfig, held: Ranges) -> None:
        self.trace, self.lives, self.config, self.held = trace, lives, config, held
        self.rounded = rounded.tolist()
        self.slack = _slack(rounded, config).tolist()
        self.size = list(self.rounded)
        self.end_of: dict[int, int] = {}
        self.start_of: dict[int, int] = {}
        self.edges = {start for start, _, expandable in held if not expandable}
        self.loose: set[int] = set()  # blocks that do not lie where they could
        self.doubts = self.searched = 0

    def sizes(self) -> Ints:
        return np.array(self.size, dtype=np.int64)

    def place_what_was_there(self, at_end: dict[int, int]) -> None:
        addresses = self.trace.addresses
        there = np.flatnonzero((self.lives.birth == BEFORE) & (np.array(self.rounded) > 0)).tolist()
        there.sort(key=lambda block: addresses[block])
        starts = [addresses[block] for block in there]
        stays = self.lives.gone == len(self.trace)
        at, which = 0, 0
        for start, end, expandable in self.held:
            which = bisect_left(starts, start, which)
            at = start
            while which < len(there) and starts[which] < end:
                block, address = there[which], starts[which]
                which += 1
                ceiling = min(starts[which], end) if which < len(there) else end
                known = at_end.get(address, 0) if stays[block] else 0
                size = known or self._tail(block, address, ceiling, expandable)
                if address < at or address + size > ceiling:
                    self._doubt(block)
                    continue
                self.size[block] = size
                self._free(at, address)
                at = address + size
            self._free(at, end)
        for block, address in zip(there, starts, strict=True):
            if self.held.holding(address) is None:
                self._doubt(block)

    def _tail(self, block: int, address: int, ceiling: int, expandable: bool) -> int:
        """Of a block that was freed during the recording: up to the next live one, if what lies between is so little
        that no free piece of the large pool is as small; or up to where a later block was seen to begin."""
        rounded, slack = self.rounded[block], self.slack[block]
        gap = ceiling - address - rounded
        if expandable or slack < SMALL_SIZE or gap <= 0:
            return int(rounded)
        if gap <= slack:
            return ceiling - address
        least, before = address + rounded, int(self.lives.gone[block])
        places, births = self._placements
        at = bisect_left(places, least)
        while at < len(places) and places[at] <= least + SMALL_SIZE and self.searched < MAX_SEARCHED:
            if births[at] < before:
                return places[at] - address
            at += 1
            self.searched += 1
        return int(rounded)

    @cached_property
    def _placements(self) -> tuple[list[int], list[int]]:
        """Where and when blocks were placed, by address."""
        born = np.flatnonzero(self.lives.birth != BEFORE)
        addresses = np.frombuffer(self.trace.addresses, dtype=np.uint64)[born]
        order = np.lexsort((self.lives.birth[born], addresses))
        return addresses[order].tolist(), self.lives.birth[born][order].tolist()

    def _free(self, start: int, end: int) -> None:
        if start < end:
            self.end_of[start], self.start_of[end] = end, start

    def _doubt(self, block: int) -> None:
        self.doubts += 1
        self.loose.add(block)

    def play(self) -> None:
        rounded, slack, size = self.rounded, self.slack, self.size
        addresses = self.trace.addresses.tolist()
        end_of, start_of, edges, loose = self.end_of, self.start_of, self.edges, self.loose
        alloc, requested = int(Action.ALLOC), int(Action.FREE_REQUESTED)
        ends = (int(Action.FREE), int(Action.FREE_COMPLETED))
        for action, subject in self.trace.events():
            if action == alloc:
                address, need = addresses[subject], rounded[subject]
                end = end_of.pop(address, -1)
                rest = end - address - need
                if rest > slack[subject]:
                    end_of[address + need], start_of[end] = end, address + need
                elif rest >= 0:
                    size[subject] = need + rest
                    start_of.pop(end, None)
                elif need:
                    if end >= 0:
                        end_of[address] = end
                    self._doubt(subject)
                elif end >= 0:
                    end_of[address] = end
            elif action in ends:
                address = addresses[subject]
                end = address + size[subject]
                if subject in loose or end == address:
                    continue
                if address not in edges:
                    address = start_of.pop(address, address)
                if end not in edges:
                    end = end_of.pop(end, end)
                end_of[address], start_of[end] = end, address
            elif action != requested:
                self._driver(action, subject)

    def _driver(self, action: int, subject: int) -> None:
        start = self.trace.range_addresses[subject] if action in DRIVER_ACTIONS else 0
        end = start + (self.trace.range_sizes[subject] if action in DRIVER_ACTIONS else 0)
        if action == Action.SEGMENT_ALLOC:
            self.edges.add(start)
            self._free(start, end)
        elif action == Action.SEGMENT_MAP:
            before, after = self.start_of.pop(start, start), self.end_of.pop(end, end)
            self._free(before, after)
        elif action in (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP):
            self.edges.discard(start)
            self._take(start, end)

    def _take(self, start: int, end: int) -> None:
        """A range goes back to the driver: it must be free, and may be the middle of a free piece."""
        left = start if start in self.end_of else self._piece_around(start)
        if left is None or self.end_of[left] < end:
            self.doubts += 1
            return
        right = self.end_of.pop(left)
        self.start_of.pop(right, None)
        self._free(left, start)
        self._free(end, right)

    def _piece_around(self, address: int) -> int | None:
        """A search from end to end: it happens where expandable memory shrinks, and only so often."""
        self.searched += len(self.end_of)
        if self.searched >= MAX_SEARCHED:
            return None
        return next((start for start, end in self.end_of.items() if start < address < end), None)


def _slack(rounded: Ints, config: AllocatorConfig) -> Ints:
    """How much too large a free piece may be for a request without being split: the rules of `allocator._split`."""
    if config.expandable_segments:
        return np.full(len(rounded), MIN_BLOCK_SIZE - 1, dtype=np.int64)
    slack = np.where(rounded <= SMALL_SIZE, MIN_BLOCK_SIZE - 1, SMALL_SIZE)
    if config.max_split_size is not None:
        slack[(rounded > SMALL_SIZE) & (rounded >= config.max_split_size)] = NEVER_SPLIT
    return slack
