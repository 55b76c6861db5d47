"""The loop over a trace's events, in which replays spend their time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memfit.events import Action
from memfit.replay.allocator import CachingAllocator
from memfit.replay.blocks import Block

if TYPE_CHECKING:
    from mypy_extensions import i64


class Calls:
    """A trace as the loop reads it. Lists are read faster than arrays, and one of these serves many replays."""

    __slots__ = ("actions", "requested", "streams", "subjects")

    def __init__(self, actions: bytes, subjects: list[int], requested: list[int], streams: list[int]) -> None:
        self.actions = actions
        self.subjects = subjects
        self.requested = requested
        self.streams = streams


class Progress:
    """How far a replay has come, and what it came to on the way."""

    __slots__ = ("event", "levels", "live", "risen", "sizes")

    def __init__(self, live: list[Block | None], sizes: list[int] | None) -> None:
        self.event: i64 = 0  # the next one to play
        self.live = live  # the block of the allocator that each block of the trace has now
        self.sizes = sizes  # what it took there, if anyone wants to know
        self.risen: list[int] = []  # the events that changed what is reserved
        self.levels: list[int] = []  # and what it was after each of them

    def twin(self, twins: dict[Block, Block]) -> Progress:
        """As far as this one, with other blocks in place of these."""
        other = Progress([None if held is None else twins[held] for held in self.live], None)
        other.event = self.event
        return other


def play(
    allocator: CachingAllocator, calls: Calls, progress: Progress, until: i64, seldom: Callable[[int, int], None]
) -> None:
    """Play events up to `until`; `seldom(action, subject)` does what is neither an allocation nor a plain free. Raises
    OutOfMemory, with `progress.event` the one that failed."""
    alloc: i64 = Action.ALLOC
    free: i64 = Action.FREE
    last_of_program: i64 = Action.EMPTY_CACHE  # what comes after it is a mark, or was seen of the driver
    actions = calls.actions
    subjects = calls.subjects
    requested = calls.requested
    streams = calls.streams
    live = progress.live
    sizes = progress.sizes
    stats = allocator.stats
    reserved: i64 = stats.reserved
    event: i64 = progress.event
    try:
        while event < until:
            action: i64 = actions[event]
            subject: i64 = subjects[event]
            if action == alloc:
                block = allocator.malloc(requested[subject], streams[subject])
                live[subject] = block
                if sizes is not None and block is not None:
                    sizes[subject] = block.size
            elif action <= last_of_program:
                held = live[subject] if action == free else None
                if held is not None:
                    live[subject] = None
                    allocator.free(held)
                else:
                    seldom(action, subject)
            if stats.reserved != reserved:
                reserved = stats.reserved
                progress.risen.append(event)
                progress.levels.append(reserved)
            event += 1
    finally:
        progress.event = event
