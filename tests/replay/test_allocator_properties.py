"""Laws that hold for every sequence of calls, and a second, slow allocator written another way that must agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from support.addresses import rising_addresses
from support.allocators import holding
from support.quick import examples
from support.verify import check_invariants

from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.allocator import CachingAllocator, OutOfMemory
from memfit.replay.blocks import Block
from memfit.replay.driver import Driver
from memfit.units import MiB

EXAMPLES = settings(max_examples=examples(120), deadline=None)

PLAIN = (
    "",
    "roundup_power2_divisions:[1:2,16:4,>:8]",
    "max_split_size_mb:24",
    "max_split_size_mb:40,max_non_split_rounding_mb:64,roundup_power2_divisions:2",
    "large_segment_size_mb:11",
)
EXPANDABLE = (
    "expandable_segments:True",
    "expandable_segments:True,large_segment_size_mb:12,roundup_power2_divisions:4",
    "expandable_segments:True,max_split_size_mb:24",
)

# Sizes around every boundary in the rules, so that ties and near misses are common.
edges = [512, MiB, 2 * MiB, 9 * MiB, 10 * MiB, 12 * MiB, 19 * MiB, 20 * MiB, 24 * MiB, 40 * MiB, 60 * MiB]
sizes = st.one_of(
    st.tuples(st.sampled_from(edges), st.sampled_from([-512, -1, 0, 1, 512])).map(lambda pair: max(sum(pair), 1)),
    st.integers(1, 4096),
    st.integers(1, 2 * MiB),
    st.integers(1, 64 * MiB),
)
streams = st.sampled_from([0, 0, 0, 1, -1])
call = st.one_of(
    st.tuples(st.just("malloc"), sizes, streams),
    st.tuples(st.just("malloc"), sizes, streams),
    st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
    st.tuples(st.just("request"), st.integers(0, 1000), st.just(0)),
    st.tuples(st.just("complete"), st.integers(0, 1000), st.just(0)),
    st.tuples(st.just("empty"), st.just(0), st.just(0)),
)
# Hypothesis alone would draw lists of about five.
calls = st.sampled_from([0, 15, 50]).flatmap(lambda least: st.lists(call, min_size=least, max_size=70))
bounds = st.none() | st.integers(20, 150).map(lambda n: n * MiB)
Call = tuple[str, int, int]


@dataclass
class Program:
    """Makes calls and remembers what it holds."""

    allocator: CachingAllocator
    held: list[Block] = field(default_factory=list)
    failed: bool = False

    def make(self, call: Call) -> None:
        what, number, stream = call
        subject = self.allocator
        self.failed = False
        if what == "malloc":
            try:
                block = subject.malloc(number, stream)
            except OutOfMemory:
                self.failed = True
            else:
                assert block is not None and block.requested == number <= block.size
                self.held.append(block)
        elif what == "empty":
            subject.empty_cache()
        elif what == "complete":
            if subject.pending:
                subject.complete_free(list(subject.pending)[number % len(subject.pending)])
        elif self.held:
            block = self.held.pop(number % len(self.held))
            subject.free(block) if what == "free" else subject.request_free(block)


def program(conf: str, capacity: int | None) -> Program:
    return Program(CachingAllocator(AllocatorConfig.parse(conf), Driver(capacity)))


# -- laws ------------------------------------------------------------------------------------------------------


@given(st.sampled_from(PLAIN + EXPANDABLE), bounds, calls)
@EXAMPLES
def test_after_every_call_the_books_agree_with_the_blocks(
    conf: str, capacity: int | None, sequence: list[Call]
) -> None:
    run = program(conf, capacity)
    for call in sequence:
        run.make(call)
        check_invariants(run.allocator)


@given(st.sampled_from(PLAIN + EXPANDABLE), calls)
@EXAMPLES
def test_freeing_everything_and_emptying_the_cache_returns_every_byte(conf: str, sequence: list[Call]) -> None:
    run = program(conf, 400 * MiB)
    for call in sequence:
        run.make(call)
    for block in run.held:
        run.allocator.free(block)
    run.allocator.empty_cache()
    stats = run.allocator.stats
    assert (stats.reserved, stats.allocated, stats.active) == (0, 0, 0)
    assert run.allocator.segment_at == {}


@given(st.sampled_from(PLAIN + EXPANDABLE), bounds, calls, st.integers(1, 1000))
@EXAMPLES
def test_where_the_first_segment_lies_changes_nothing(
    conf: str, capacity: int | None, sequence: list[Call], shift: int
) -> None:
    def course(start: int) -> list[tuple[int, ...]]:
        config = AllocatorConfig.parse(conf)
        run = Program(CachingAllocator(config, Driver(capacity, rising_addresses(start))))
        seen = []
        for call in sequence:
            run.make(call)
            seen.append(tuple(block.address - start for block in run.held))
        return seen

    assert course(2 * MiB) == course(2 * MiB * (1 + shift))


@given(st.sampled_from(PLAIN), bounds, calls, calls)
@EXAMPLES
def test_a_layout_is_all_that_the_future_depends_on(
    conf: str, capacity: int | None, past: list[Call], future: list[Call]
) -> None:
    one = program(conf, capacity)
    for call in past:
        one.make(call)
    start = max((segment.address + 512 * MiB for segment in one.allocator.layout()), default=2 * MiB)
    config = AllocatorConfig.parse(conf)
    one.allocator.driver.next_address = rising_addresses(start)
    other = holding(one.allocator.layout(), config, Driver(capacity, rising_addresses(start)))
    at = {block.address: block for block in other.blocks()}
    two = Program(other, [at[block.address] for block in one.held])
    other.pending = {at[block.address]: None for block in one.allocator.pending}  # the order of their frees
    for call in future:
        one.make(call)
        two.make(call)
        assert one.failed == two.failed
        assert one.allocator.layout() == two.allocator.layout()


@given(st.sampled_from(PLAIN + EXPANDABLE), bounds, calls, calls)
@EXAMPLES
def test_a_twin_goes_on_as_the_one_it_was_made_of(
    conf: str, capacity: int | None, past: list[Call], future: list[Call]
) -> None:
    one = program(conf, capacity)
    for call in past:
        one.make(call)
    one.allocator.driver.next_address = rising_addresses(1 << 52)
    twin, stands_for = one.allocator.twin(capacity)
    twin.driver.next_address = rising_addresses(1 << 52)
    two = Program(twin, [stands_for[block] for block in one.held])
    check_invariants(twin)
    for call in future:
        one.make(call)
        two.make(call)
        check_invariants(twin)
        assert one.failed == two.failed
        assert one.allocator.layout() == twin.layout()
        assert one.allocator.stats == twin.stats


# -- a second opinion ------------------------------------------------------------------------------------------


@dataclass
class Piece:
    address: int
    size: int
    state: str = "inactive"
    requested: int = 0


@dataclass
class Slow:
    """The rules for plain segments as one reads them: no sorted lists, no links, everything looked up anew."""

    config: AllocatorConfig
    capacity: int | None
    next_address: Callable[[int, bool], int] = field(default_factory=rising_addresses)
    segments: list[tuple[bool, int, list[Piece]]] = field(default_factory=list)  # small, stream, pieces

    def reserved(self) -> int:
        return sum(piece.size for _, _, pieces in self.segments for piece in pieces)

    def allocated(self) -> int:
        return sum(p.size for _, _, pieces in self.segments for p in pieces if p.state == "active_allocated")

    def malloc(self, requested: int, stream: int) -> Piece | None:
        size, split_limit = self.config.rounded(requested), self.config.max_split_size or 1 << 62
        small = size <= MiB
        found = self.search(size, small, stream, split_limit) or self.new(size, small, stream, split_limit)
        if found is None:
            return None
        pieces, piece = found
        rest = piece.size - size
        if rest >= 512 if small else (rest > MiB and size < split_limit):
            pieces.insert(pieces.index(piece) + 1, Piece(piece.address + size, rest))
            piece.size = size
        piece.state, piece.requested = "active_allocated", requested
        return piece

    def search(self, size: int, small: bool, stream: int, split_limit: int) -> tuple[list[Piece], Piece] | None:
        fitting = [
            (piece.size, piece.address, pieces, piece)
            for is_small, its_stream, pieces in self.segments
            for piece in pieces
            if is_small == small and its_stream == stream and piece.state == "inactive" and piece.size >= size
        ]
        if not fitting:
            return None
        found, _, pieces, piece = min(fitting, key=lambda each: each[:2])
        excess = self.config.max_non_split_rounding or self.config.large_segment_size
        refused = found >= split_limit if size < split_limit else found >= size + excess
        return None if refused else (pieces, piece)

    def new(self, size: int, small: bool, stream: int, split_limit: int) -> tuple[list[Piece], Piece] | None:
        asked = self.config.segment_size(size)
        for release in (None, self.release_oversize, self.release_all):
            enough = release is None or release(size, small, stream, split_limit)
            if enough and (self.capacity is None or self.reserved() + asked <= self.capacity):
                piece = Piece(self.next_address(asked, small), asked)
                self.segments.append((small, stream, [piece]))
                return self.segments[-1][2], piece
        return None

    def idle(self) -> list[tuple[bool, int, list[Piece]]]:
        return [each for each in self.segments if len(each[2]) == 1 and each[2][0].state == "inactive"]

    def release_oversize(self, size: int, small: bool, stream: int, split_limit: int) -> bool:
        wanted = max(size, split_limit)
        mine = [each for each in self.idle() if each[:2] == (small, stream) and each[2][0].size >= split_limit]
        mine.sort(key=lambda each: (each[2][0].size, each[2][0].address))
        for each in mine:
            if each[2][0].size >= wanted:
                self.segments.remove(each)
                return True
        released = 0
        for each in reversed(mine):
            if released < wanted:
                released += each[2][0].size
                self.segments.remove(each)
        return released >= wanted

    def release_all(self, *arguments: object) -> bool:
        for _, _, pieces in self.segments:
            for piece in pieces:
                if piece.state == "active_pending_free":
                    piece.state = "inactive"
            self.join(pieces)
        for each in self.idle():
            self.segments.remove(each)
        return True

    def set_state(self, address: int, state: str) -> None:
        for _, _, pieces in self.segments:
            for piece in pieces:
                if piece.address == address:
                    piece.state = state
            self.join(pieces)

    @staticmethod
    def join(pieces: list[Piece]) -> None:
        at = 0
        while at + 1 < len(pieces):
            if pieces[at].state == pieces[at + 1].state == "inactive":
                pieces[at].size += pieces.pop(at + 1).size
            else:
                at += 1


def in_words(segments: list[tuple[bool, int, list[Piece]]]) -> list[tuple[bool, int, list[tuple[int, int, str]]]]:
    told = [(small, stream, [(p.address, p.size, p.state) for p in pieces]) for small, stream, pieces in segments]
    return sorted(told, key=lambda each: each[2])


@given(st.sampled_from(PLAIN), bounds, calls)
@settings(max_examples=examples(250), deadline=None)
def test_a_slow_allocator_written_another_way_comes_to_the_same_layout(
    conf: str, capacity: int | None, sequence: list[Call]
) -> None:
    config = AllocatorConfig.parse(conf)
    run = Program(CachingAllocator(config, Driver(capacity, rising_addresses())))
    slow = Slow(config, capacity)
    for what, number, stream in sequence:
        held, pending = list(run.held), list(run.allocator.pending)
        run.make((what, number, stream))
        if what == "malloc":
            piece = slow.malloc(number, stream)
            assert (piece is None) == run.failed
            assert run.failed or (piece is not None and piece.address == run.held[-1].address)
        elif what == "empty":
            slow.release_all()
        elif what == "complete" and pending:
            slow.set_state(pending[number % len(pending)].address, "inactive")
        elif what in ("free", "request") and held:
            state = "inactive" if what == "free" else "active_pending_free"
            slow.set_state(held[number % len(held)].address, state)
        layout = [
            (s.small, s.stream, [Piece(b.address, b.size, b.state) for b in s.blocks]) for s in run.allocator.layout()
        ]
        assert in_words(layout) == in_words(slow.segments)
        assert run.allocator.stats.reserved == slow.reserved()
        assert run.allocator.stats.allocated == slow.allocated()
