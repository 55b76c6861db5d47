"""Replays at the edge: what is held after a failure, capacities that more memory makes worse, exact refusals."""

from __future__ import annotations

import pytest
from test_allocator import allocator, give, log, take

from memfit.events import Action, Trace
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.allocator import CachingAllocator
from memfit.replay.driver import Ranges
from memfit.replay.replay import Player, Replays, replay
from memfit.units import MiB


def made(*rows: tuple[str, float] | tuple[str, float, int]) -> Trace:
    """Rows allocate a name with so many MiB (on a stream), or free it with nothing."""
    trace, blocks = Trace(), dict[str, int]()
    for name, size, *stream in rows:
        if size:
            blocks[name] = trace.alloc(int(size * MiB), stream=int(*stream))
        else:
            trace.free(blocks[name])
    return trace


def test_a_request_that_fails_has_released_what_it_could_and_that_is_what_stays_reserved() -> None:
    trace = made(("kept", 12), ("cached", 30), ("cached", 0), ("too large", 100))
    trace.free(0)
    timeline = replay(trace, capacity=60 * MiB)
    assert timeline.oom is not None and timeline.oom.event == 3
    assert [n // MiB for n in timeline.reserved] == [12, 42, 42, 12, 12]
    assert [n // MiB for n in timeline.allocated] == [12, 42, 12, 12, 12]
    assert (timeline.peak_reserved, timeline.reserved_peak_event) == (42 * MiB, 1)
    assert timeline.oom.reserved == 12 * MiB


# Worked out by trying: with the margin of 1/64 more each of these takes another course and fails.
WORSE_WITH_MORE = {
    "max_split_size_mb:24": (
        made(("a", 40), ("a", 0), ("b", 14), ("b", 0), ("c", 32.5, 1), ("c", 0), ("d", 3, 1), ("e", 17.5), ("f", 2.5)),
        52, 54, 58,
    ),
    "": (
        made(
            ("a", 4.5), ("a", 0), ("b", 30), ("b", 0), ("c", 33), ("c", 0), ("d", 12, 1), ("d", 0), ("e", 10.5),
            ("f", 40), ("g", 30), ("h", 12),
        ),
        94, 96, 102,
    ),
}  # fmt: skip


@pytest.mark.parametrize("conf", WORSE_WITH_MORE)
def test_a_capacity_with_which_a_little_more_fails_is_not_the_answer(conf: str) -> None:
    trace, enough, more, answer = WORSE_WITH_MORE[conf]
    config = AllocatorConfig.parse(conf)
    assert replay(trace, config, capacity=enough * MiB).oom is None
    assert replay(trace, config, capacity=more * MiB).oom is not None
    assert Replays(trace, config).smallest_capacity() == answer * MiB
    assert replay(trace, config, capacity=answer * MiB).oom is None


def test_an_answer_that_was_only_concluded_is_tried_itself() -> None:
    """An expandable segment has addresses in proportion to the capacity: what a replay with more memory reached is not
    what one with just that much reaches."""
    trace = made(
        ("a", 30), ("b", 20), ("a", 0), ("c", 22), ("d", 19.5), ("e", 22), ("c", 0), ("f", 3), ("b", 0), ("g", 12, 1),
        ("e", 0), ("g", 0), ("h", 29.5), ("i", 39.5),
    )  # fmt: skip
    config = AllocatorConfig.parse("expandable_segments:True")
    assert replay(trace, config, capacity=100 * MiB).oom is not None
    assert Replays(trace, config).smallest_capacity() == 120 * MiB
    assert replay(trace, config, capacity=120 * MiB).oom is None


def test_a_capacity_of_exactly_what_was_refused_is_another_course() -> None:
    replays = Replays(made(("a", 30), ("a", 0), ("b", 40)))
    refused = replays.outcome(60 * MiB)
    assert (refused.fits, refused.retries, refused.smallest_refusal) == (True, 1, 70 * MiB)
    assert refused.is_also_that_of(70 * MiB - 1) and not refused.is_also_that_of(70 * MiB)
    assert replays.outcome(70 * MiB).retries == 0


def test_a_capacity_of_exactly_the_peak_that_was_reached_is_the_same_course() -> None:
    replays = Replays(made(("a", 30), ("a", 0), ("b", 40)))
    known = replays.outcome(60 * MiB)
    assert known.reserved_peak == 40 * MiB
    assert known.is_also_that_of(40 * MiB) and not known.is_also_that_of(40 * MiB - 1)
    assert replays.outcome(40 * MiB) is known


def test_expandable_segments_settle_no_other_capacity() -> None:
    plain = made(("a", 30), ("a", 0), ("b", 40))
    for config, kept in (("", True), ("expandable_segments:True", False)):
        replays = Replays(plain, AllocatorConfig.parse(config))
        assert (replays.outcome(60 * MiB) is replays.outcome(60 * MiB)) is kept


def test_too_little_that_is_oversize_is_no_success_though_the_driver_had_the_rest() -> None:
    """torch then waits for the device and releases everything, although one attempt more would have done."""
    subject = allocator("max_split_size_mb:30", capacity=130 * MiB)
    give(subject, *take(subject, 28 * MiB, 40 * MiB))
    log(subject).clear()
    take(subject, 90 * MiB)
    assert log(subject) == [("SEGMENT_FREE", 40), ("SEGMENT_FREE", 28), ("SEGMENT_ALLOC", 90)]
    assert subject.stats.num_alloc_retries == 1


def test_a_twin_is_in_the_same_state_and_goes_its_own_way() -> None:
    """What waits for another stream is part of it."""
    subject = allocator()
    waiting, *others = take(subject, 30 * MiB, 40 * MiB, 50 * MiB)
    give(subject, others[0])
    take(subject, 60 * MiB)
    give(subject, others[1])
    subject.request_free(waiting)
    other, twins = subject.twin(None)
    assert list(other.pending) == [twins[waiting]]
    before = subject.layout()
    assert other.layout() == before
    other.empty_cache()
    assert (other.stats.reserved, other.stats.active) == (60 * MiB, 60 * MiB)
    assert subject.layout() == before
    subject.empty_cache()
    assert subject.stats == other.stats


def test_who_goes_on_from_the_middle_lets_go_of_what_waited_there() -> None:
    """A request to free that another stream has yet to let through is between the two halves."""
    trace = made(("kept", 12), ("waits", 30, 1))
    trace.free_requested(1)
    trace.free_completed(1)
    first = Player(trace, CachingAllocator(AllocatorConfig.parse("")))
    assert first.play(until=3) is None
    assert first.allocator.stats.active == 42 * MiB
    second = first.twin(100 * MiB)
    for player in (second, first):
        assert player.play() is None
        assert player.allocator.stats.active == 12 * MiB


def test_expandable_ranges_that_touch_are_one_from_either_side() -> None:
    held = Ranges()
    assert held.do(Action.SEGMENT_MAP, 10, 5) and held.do(Action.SEGMENT_MAP, 0, 10)
    assert list(held) == [(0, 15, True)]
    assert held.do(Action.SEGMENT_MAP, 15, 5)
    assert list(held) == [(0, 20, True)]
    assert held.do(Action.SEGMENT_ALLOC, 20, 5)
    assert list(held) == [(0, 20, True), (20, 25, False)], "a plain segment stays one by itself"
