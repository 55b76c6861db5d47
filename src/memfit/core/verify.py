"""Is the model right? A recording says where each block was placed and what the driver gave and took back; the model,
fed with the program's calls alone, must arrive at the same places and make the same calls at the same moments.

    >>> snapshot = read_snapshot("snapshot.pickle")
    >>> trace, end = snapshot.traces[0], final_layout(snapshot)
    >>> config = AllocatorConfig.from_snapshot(snapshot.settings)
    >>> verify(trace, config, start=rewind(trace, end, config), end=end)
    []

Segments are bound to recorded ones by giving the model the recorded address whenever it asks for memory. Whether the
driver was out of memory is not recorded, but shows: where segments went back before one came, it had refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memfit.core.alloc_config import AllocatorConfig
from memfit.core.allocator import CachingAllocator, OutOfMemory
from memfit.core.blocks import BlockRecord, SegmentRecord
from memfit.core.driver import Driver, falling_addresses
from memfit.core.events import Action, Trace
from memfit.core.replay import DEFAULTS, Player

RELEASES = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
DRIVER_ACTIONS = (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where model and recording part. `nearby`: free blocks of about the size in question, in order of search."""

    event: int  # the number of events for a difference in the final layout
    what: str
    recorded: str
    modelled: str
    nearby: tuple[BlockRecord, ...] = ()

    def __str__(self) -> str:
        free = ", ".join(f"{block.size} at {block.address:#x}" for block in self.nearby) or "none"
        return (
            f"event {self.event}: {self.what}: recorded {self.recorded}, modelled {self.modelled}; free nearby: {free}"
        )


def verify(
    trace: Trace, config: AllocatorConfig = DEFAULTS, *, limit: int | None = None,
    start: Sequence[SegmentRecord] = (), end: Sequence[SegmentRecord] | None = None,
) -> list[Mismatch]:  # fmt: skip
    """Empty if the model agrees with the recording. It stops at the first event that differs, since what follows one
    says nothing; differences from the final layout `end` are all listed."""
    checker = _Checker(trace, config, limit, start)
    for event, (action, subject) in enumerate(trace.events()):
        mismatch = checker.step(event, action, subject)
        if mismatch is not None:
            return [mismatch]
    mismatch = checker.finish(len(trace))
    if mismatch is not None:
        return [mismatch]
    return [] if end is None else list(_differences(len(trace), end, checker.allocator.layout()))


@dataclass(frozen=True, slots=True)
class _Call:
    action: Action
    address: int
    size: int

    def __str__(self) -> str:
        return f"{self.action.name.lower()} of {self.size} at {self.address:#x}"


class _RecordedDriver(Driver):
    """Gives what the recording shows that the driver gave, and refuses where it shows that memory had to be released."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[_Call] = []
        self.made: list[_Call] = []
        self.ran_out = False
        self._elsewhere = falling_addresses()  # for what the recording does not show: it will be reported anyway
        self.next_address = self._recorded_address

    def expect(self, calls: list[_Call], *, ran_out: bool = False) -> None:
        self.recorded, self.made, self.ran_out = calls, [], ran_out

    def has_room_for(self, size: int) -> bool:
        coming = self._coming()
        return not self.ran_out if coming is None else coming.action not in RELEASES

    def gave(self, action: Action, address: int, size: int, stream: int) -> None:
        super().gave(action, address, size, stream)
        self.made.append(_Call(action, address, size))

    def took_back(self, action: Action, address: int, size: int, stream: int) -> None:
        super().took_back(action, address, size, stream)
        self.made.append(_Call(action, address, size))

    def _coming(self) -> _Call | None:
        return self.recorded[len(self.made)] if len(self.made) < len(self.recorded) else None

    def _recorded_address(self, size: int, small: bool) -> int:
        """An expandable segment reserves its addresses before it is refused memory: look past the releases."""
        coming = (call.address for call in self.recorded[len(self.made) :] if call.action not in RELEASES)
        return next(coming, None) or self._elsewhere(size, small)


class _Checker:
    def __init__(
        self, trace: Trace, config: AllocatorConfig, limit: int | None, start: Sequence[SegmentRecord]
    ) -> None:
        self.trace = trace
        self.driver = _RecordedDriver()
        self.allocator = CachingAllocator.from_segments(start, config, limit=limit, driver=self.driver)
        self.player = Player(trace, self.allocator)
        self.player.place_what_was_there()
        self.calls: list[_Call] = []  # seen of the driver since the last call of the program
        self.emptied = False

    def step(self, event: int, action: int, subject: int) -> Mismatch | None:
        if action in DRIVER_ACTIONS:
            address, size = self.trace.range_addresses[subject], self.trace.range_sizes[subject]
            self.calls.append(_Call(Action(action), address, size))
            return None
        if action == Action.MARK:
            return None
        if action == Action.ALLOC:
            return self._alloc(event, subject)
        if action == Action.OOM:
            return self._oom(event, self.trace.range_sizes[subject], self.trace.range_streams[subject])
        mismatch = self.finish(event)
        if action == Action.EMPTY_CACHE:
            self.emptied = True
        else:
            self.player.do(action, subject)
        return mismatch

    def finish(self, event: int) -> Mismatch | None:
        """Nothing else explains what the driver was seen to do but a call of `empty_cache`."""
        return self._empty_cache(event) if self.calls or self.emptied else None

    def _alloc(self, event: int, block: int) -> Mismatch | None:
        requested, stream = self.trace.requested[block], self.trace.streams[block]
        mismatch = self._explain_releases(event, requested, stream)
        if mismatch is not None or not requested:
            return mismatch
        self._expect(self.calls)
        try:
            held = self.allocator.malloc(requested, stream)
        except OutOfMemory:
            return self._mismatch(event, "an allocation", "a block", "out of memory", requested, stream)
        assert held is not None
        self.player.live[block] = held
        if self.driver.made != self.driver.recorded:
            return self._mismatch(event, "driver calls", *self._both(), requested, stream)
        recorded = self.trace.addresses[block]
        if held.address != recorded:
            return self._mismatch(
                event, f"the place of {requested} bytes", f"{recorded:#x}", f"{held.address:#x}", requested, stream
            )
        return None

    def _oom(self, event: int, rounded: int, stream: int) -> Mismatch | None:
        mismatch = self._explain_releases(event, rounded, stream)
        if mismatch is not None:
            return mismatch
        self._expect(self.calls, ran_out=True)
        try:
            self.allocator.malloc(rounded, stream)
        except OutOfMemory as error:
            if error.rounded != rounded:
                return self._mismatch(event, "a failed request", str(rounded), str(error.rounded), rounded, stream)
            if self.driver.made != self.driver.recorded:
                return self._mismatch(event, "driver calls", *self._both(), rounded, stream)
            return None
        return self._mismatch(event, f"a request of {rounded} bytes", "out of memory", "served", rounded, stream)

    def _explain_releases(self, event: int, requested: int, stream: int) -> Mismatch | None:
        """Segments went back before a request that the cache could serve: not on its behalf, but by `empty_cache`."""
        releases = bool(self.calls) and self.calls[0].action in RELEASES
        if self.emptied or (releases and requested and self.allocator.peek(requested, stream) is not None):
            return self._empty_cache(event)
        return None

    def _empty_cache(self, event: int) -> Mismatch | None:
        count = next((i for i, call in enumerate(self.calls) if call.action not in RELEASES), len(self.calls))
        released, rest = self.calls[:count], self.calls[count:]
        self._expect(released)
        self.calls, self.emptied = rest, False
        self.allocator.empty_cache()
        if self.driver.made != released:
            return self._mismatch(event, "released by empty_cache", *self._both(), 0, 0)
        return None

    def _expect(self, calls: list[_Call], *, ran_out: bool = False) -> None:
        self.driver.expect(calls, ran_out=ran_out)
        self.calls = []

    def _both(self) -> tuple[str, str]:
        return _listed(self.driver.recorded, self.driver.made), _listed(self.driver.made, self.driver.recorded)

    def _mismatch(self, event: int, what: str, recorded: str, modelled: str, requested: int, stream: int) -> Mismatch:
        size = self.allocator.config.rounded(requested)
        shelf = self.allocator.shelf_for(size, stream)
        at = shelf.first_of(size)
        nearby = tuple(BlockRecord(b.address, b.size, "inactive", 0) for b in shelf.blocks[max(at - 3, 0) : at + 3])
        return Mismatch(event, what, recorded, modelled, nearby)


def _listed(calls: list[_Call], others: list[_Call]) -> str:
    """From the first that differs; a burst can have hundreds."""
    first = next(
        (i for i, (a, b) in enumerate(zip(calls, others, strict=False)) if a != b), min(len(calls), len(others))
    )
    shown = ", ".join(str(call) for call in calls[first : first + 3])
    return f"{len(calls)} calls" + (f", the {first + 1}th of them {shown}" if shown else "")


def _differences(
    event: int, recorded: Iterable[SegmentRecord], modelled: Iterable[SegmentRecord]
) -> Iterable[Mismatch]:
    ours = {segment.address: segment for segment in modelled}
    theirs = {segment.address: segment for segment in recorded}
    for address in sorted(ours.keys() | theirs.keys()):
        left, right = _shape(theirs.get(address)), _shape(ours.get(address))
        if left != right:
            yield Mismatch(event, f"the segment at {address:#x}", left, right)


def _shape(segment: SegmentRecord | None) -> str:
    """Everything but the requested size of free blocks, which is stale in snapshots."""
    if segment is None:
        return "nothing"
    kind = "small" if segment.small else "large"
    blocks = " ".join(
        f"{b.size}:{b.state}" + (f":{b.requested}" if b.state != "inactive" else "") for b in segment.blocks
    )
    return f"{segment.size} bytes, {kind}, stream {segment.stream}, expandable {segment.expandable}: {blocks}"
