"""How memory lay when a recording began: the snapshot's final segments, with the recorded events undone from the last
to the first.

A recording that starts after the model was loaded has no events for what was there. But the snapshot shows every
segment and block at the end, and each event names its address; so going backwards, an `alloc` takes its block away, a
`free` puts one back, and what no live block covers is free.

One thing is not written anywhere: the size of a block that was there at the start and freed later. It is the rounded
request, and in the large pool perhaps a tail of up to 1 MiB that was too small to split off; see `_size`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from memfit.core.alloc_config import SMALL_SEGMENT_SIZE, SMALL_SIZE, AllocatorConfig
from memfit.core.blocks import ALLOCATED, FREE, PENDING, STATE_NAMES
from memfit.core.events import Action, Trace
from memfit.core.layout import BlockRecord, SegmentRecord
from memfit.core.snapshot import Snapshot
from memfit.errors import InputError


def final_layout(snapshot: Snapshot, device: int = 0) -> tuple[SegmentRecord, ...]:
    """The segments of one device in the default pools; private pools (CUDA graphs) are not modelled."""
    return tuple(
        SegmentRecord(
            segment.address,
            segment.total_size,
            segment.stream,
            segment.segment_type == "small",
            segment.is_expandable,
            tuple(BlockRecord(b.address, b.size, b.state, b.requested_size) for b in segment.blocks),
        )
        for segment in snapshot.segments
        if segment.device == device and segment.pool_id == (0, 0)
    )


def rewind(trace: Trace, final: tuple[SegmentRecord, ...], config: AllocatorConfig) -> tuple[SegmentRecord, ...]:
    """The layout before the first event of a recorded trace that ended in `final`."""
    past = _Past(trace, final, config)
    for event in range(len(trace) - 1, -1, -1):
        past.undo(event, trace.actions[event], trace.subjects[event])
    return tuple(past.layout())


@dataclass(slots=True)
class _Range:
    """Memory that the driver had handed out: a segment, or a mapped part of an expandable one."""

    address: int
    size: int
    stream: int
    small: bool
    expandable: bool

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass(slots=True)
class _Live:
    size: int  # 0: not known
    requested: int
    state: int
    freed_at: int = 0


class _Past:
    def __init__(self, trace: Trace, final: tuple[SegmentRecord, ...], config: AllocatorConfig) -> None:
        self.trace = trace
        self.config = config
        self.ranges = [_Range(s.address, s.size, s.stream, s.small, s.expandable) for s in final]
        self.live = {
            block.address: _Live(block.size, block.requested, STATE_NAMES.index(block.state))
            for segment in final
            for block in segment.blocks
            if block.state != STATE_NAMES[FREE]
        }

    def undo(self, event: int, action: int, subject: int) -> None:
        if action == Action.ALLOC:
            if self.trace.requested[subject] and self.live.pop(self.trace.addresses[subject], None) is None:
                raise InputError(f"event {event} allocates what is not in the snapshot's final state")
        elif action in (Action.FREE, Action.FREE_COMPLETED):
            state = ALLOCATED if action == Action.FREE else PENDING
            self.live[self.trace.addresses[subject]] = _Live(0, self.trace.requested[subject], state, event)
        elif action == Action.FREE_REQUESTED:
            if self.trace.addresses[subject] not in self.live:
                raise InputError(f"event {event} frees what is not in the snapshot's final state")
            self.live[self.trace.addresses[subject]].state = ALLOCATED
        elif action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
            self._take_away(event, self.trace.range_addresses[subject], self.trace.range_sizes[subject])
        elif action in (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP):
            self._give_back(subject, expandable=action == Action.SEGMENT_UNMAP)

    def _take_away(self, event: int, address: int, size: int) -> None:
        for at, held in enumerate(self.ranges):
            if held.address <= address and address + size <= held.end:
                parts = ((held.address, address), (address + size, held.end))
                self.ranges[at : at + 1] = [
                    _Range(start, end - start, held.stream, held.small, held.expandable)
                    for start, end in parts
                    if start < end
                ]
                return
        raise InputError(f"event {event} adds memory that is not in the snapshot's final state")

    def _give_back(self, subject: int, *, expandable: bool) -> None:
        address, size = self.trace.range_addresses[subject], self.trace.range_sizes[subject]
        given = _Range(address, size, self.trace.range_streams[subject], size == SMALL_SEGMENT_SIZE, expandable)
        if expandable:
            touching = [r for r in self.ranges if r.expandable and (r.end == address or r.address == given.end)]
            given.small = touching[0].small if touching else bool(size % self.config.large_segment_size)
            for held in touching:
                self.ranges.remove(held)
                given.address, given.size = min(given.address, held.address), given.size + held.size
        self.ranges.append(given)

    def layout(self) -> Iterator[SegmentRecord]:
        starts = sorted(self.live)
        for held in sorted(self.ranges, key=lambda each: each.address):
            inside = starts[bisect_left(starts, held.address) : bisect_left(starts, held.end)]
            blocks: list[BlockRecord] = []
            at = held.address
            for address, ceiling in zip(inside, [*inside, held.end][1:], strict=True):
                live = self.live[address]
                size = live.size or self._size(address, live, held, ceiling)
                if at < address:
                    blocks.append(BlockRecord(at, address - at, STATE_NAMES[FREE], 0))
                if address < at or address + size > ceiling:
                    raise InputError(f"the recorded events overlap at address {address:#x}")
                blocks.append(BlockRecord(address, size, STATE_NAMES[live.state], live.requested))
                at = address + size
            if at < held.end:
                blocks.append(BlockRecord(at, held.end - at, STATE_NAMES[FREE], 0))
            yield SegmentRecord(held.address, held.size, held.stream, held.small, held.expandable, tuple(blocks))

    def _size(self, address: int, live: _Live, held: _Range, ceiling: int) -> int:
        """Of a block that was freed during the recording. The next live block, or the end, is at `ceiling`."""
        rounded = self.config.rounded(live.requested)
        least = address + rounded
        if held.small or held.expandable or least >= ceiling:
            return rounded
        oversize = self.config.max_split_size is not None and rounded >= self.config.max_split_size
        if oversize or ceiling - least <= SMALL_SIZE:  # no free block of the large pool is as small as that
            return ceiling - address
        return self._next_start(least, live.freed_at, default=least) - address

    def _next_start(self, least: int, before: int, *, default: int) -> int:
        """Where a block was placed right behind, while the one in question lived: the free block there began so."""
        placed = self._placements[bisect_left(self._placements, (least, 0)) :]
        for address, event in placed:
            if address > least + SMALL_SIZE:
                break
            if event < before:
                return address
        return default

    @cached_property
    def _placements(self) -> list[tuple[int, int]]:
        events = enumerate(self.trace.events())
        return sorted((self.trace.addresses[b], event) for event, (action, b) in events if action == Action.ALLOC)
