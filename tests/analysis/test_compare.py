"""Two traces, event by event: what is the same, what only one has, and what lives longer in one."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.comparison import first_of, format_comparison
from support.quick import examples

from memfit.analysis.compare import Counts, EditBudget, Hunk, Lifetime, align, compare
from memfit.events import Action, Trace
from memfit.snapshots.read import read_snapshot

DATA = Path(__file__).parents[1] / "data"


def trace_of(text: str, **more: int) -> Trace:
    """`a100 b200 -a |forward c300@7` is: two allocations by name, a free, a mark, an allocation on stream 7."""
    trace = Trace()
    blocks: dict[str, int] = {}
    for word in text.split():
        if word.startswith("|"):
            trace.mark(word[1:], step=more.get("step", 1))
        elif word.startswith("-"):
            trace.free(blocks[word[1:]])
        else:
            size, _, stream = word[1:].partition("@")
            blocks[word[0]] = trace.alloc(int(size), op=f"op.{word[0]}", stream=int(stream or 0))
    return trace


def sizes(hunk: Hunk) -> tuple[list[int], list[int]]:
    return [item.size for item in hunk.only_a], [item.size for item in hunk.only_b]


# -- allocations -----------------------------------------------------------------------------------------------


def test_a_trace_is_the_same_as_itself() -> None:
    trace = trace_of("|load a1 b2 -a c3 -c -b")

    found = compare(trace, trace)

    assert found.same
    assert (found.allocs, found.frees) == (Counts(3, 0, 0), Counts(3, 0, 0))
    assert (found.hunks, found.lifetimes, found.totals, first_of(found)) == ((), (), (), None)
    assert format_comparison(trace, trace).startswith("the same, event by event\n")


def test_two_empty_traces_are_the_same() -> None:
    assert compare(Trace(), Trace()).same


@pytest.mark.parametrize("name", ["snap-train", "snap-oom"])
def test_addresses_driver_calls_and_names_do_not_matter(name: str) -> None:
    (recorded,) = read_snapshot(DATA / f"{name}.pickle").traces
    bare, new = Trace(), {}
    for block in range(recorded.facts["live_before"]):
        new[block] = bare.alloc(recorded.requested[block])
    for action, subject in recorded.events():
        if action == Action.ALLOC:
            new[subject] = bare.alloc(recorded.requested[subject])
        elif action == Action.FREE:
            bare.free(new[subject])

    found = compare(recorded, bare)

    # what was live before is a section of its own, and `bare` has none
    assert found.allocs == Counts(len(recorded.requested) - 447, 447, 447)
    assert found.lifetimes == ()


def test_an_allocation_that_only_one_side_makes_is_one_hunk_and_the_rest_still_matches() -> None:
    a = trace_of("a1 b2 c3 d4 -a -b -c -d")
    b = trace_of("a1 b2 x9 c3 d4 -a -b -c -d -x")

    found = compare(a, b)

    (hunk,) = found.hunks
    assert sizes(hunk) == ([], [9])
    assert (hunk.event_a, hunk.event_b, hunk.only_b[0].op) == (2, 2, "op.x")
    assert (found.allocs, found.frees) == (Counts(4, 0, 1), Counts(4, 0, 1))
    assert first_of(found) == hunk


def test_an_allocation_of_another_size_is_one_hunk_with_two_sides() -> None:
    found = compare(trace_of("a1 b2 c3"), trace_of("a1 b7 c3"))

    assert [sizes(hunk) for hunk in found.hunks] == [([2], [7])]


def test_the_same_bytes_on_another_stream_differ() -> None:
    found = compare(trace_of("a1 b2 c3"), trace_of("a1 b2@5 c3"))

    assert found.allocs == Counts(2, 1, 1)


def test_side_streams_are_known_by_order_not_by_pointer() -> None:
    assert compare(trace_of("a1 b2@7 c3@9"), trace_of("a1 b2@140001 c3@52")).same


def test_an_extra_allocation_in_each_of_many_equal_layers_is_found_in_each() -> None:
    layer = [512, 1024, 512, 2048, 512, 512, 4096]
    a, b = Trace(), Trace()
    for _ in range(40):
        for size in layer:
            a.alloc(size)
            b.alloc(size)
        b.alloc(77, op="aten.clone")

    found = compare(a, b)

    assert found.allocs == Counts(280, 0, 40)
    (total,) = found.totals
    assert (total.side, total.op, total.size, total.count, total.nbytes) == ("b", "aten.clone", 77, 40, 3080)


def test_a_long_part_that_only_one_side_has_is_jumped_over() -> None:
    common = [random.Random(1).randrange(1 << 20) for _ in range(200)]
    a, b = Trace(), Trace()
    for size in common:
        a.alloc(size)
        b.alloc(size)
    for _ in range(3000):
        b.alloc(5)
    for size in common:
        a.alloc(size)
        b.alloc(size)

    found = compare(a, b)

    assert found.allocs == Counts(400, 0, 3000)
    assert len(found.hunks) == 1


def test_marks_that_both_have_are_met_exactly() -> None:
    a = trace_of("|forward a5 b5 c5 |backward d5 e5 f5")
    b = trace_of("|forward a5 b5 |backward d5 e5 f5")

    (hunk,) = compare(a, b).hunks

    assert (sizes(hunk), hunk.phase) == (([5], []), "forward 1")
    assert hunk.only_a[0].op == "op.c"


def test_blocks_that_were_there_before_are_compared_with_each_other_only() -> None:
    a, b = trace_of("a1 b2 -a -b"), trace_of("a1 b2 -a -b")
    for trace in (a, b):
        trace.actions[0] = Action.EMPTY_CACHE  # the first block loses its beginning
    c = trace_of("b2 -b")

    assert compare(a, b).same
    assert compare(a, c).allocs == Counts(1, 1, 0)


def test_totals_are_sorted_by_bytes() -> None:
    found = compare(trace_of("a1 b100 c2"), trace_of("a1 x40 y40 c2"))

    assert [(total.side, total.nbytes) for total in found.totals] == [("a", 100), ("b", 40), ("b", 40)]


# -- lifetimes -------------------------------------------------------------------------------------------------


def test_a_free_that_comes_later_is_a_difference_of_lifetime() -> None:
    a = trace_of("a10 b20 -a c30 d5")
    b = trace_of("a10 b20 c30 -a d5")

    found = compare(a, b)

    assert found.allocs == Counts(4, 0, 0)
    assert found.frees == Counts(0, 0, 0, moved=1)
    (lifetime,) = found.lifetimes
    assert (lifetime.earlier, lifetime.apart, lifetime.count, lifetime.nbytes) == ("a", 1, 1, 10)
    assert [place.event for place in (lifetime.freed_a, lifetime.freed_b)] == [2, 3]
    around = lifetime.freed_b.after, lifetime.freed_b.before
    assert [item and item.op for item in around] == ["op.c", "op.d"]
    assert "requested peak: a 55 B, b 60 B" in format_comparison(a, b)


def test_the_order_of_frees_between_two_allocations_does_not_matter() -> None:
    assert compare(trace_of("a1 b2 -a -b c3"), trace_of("a1 b2 -b -a c3")).same


def test_a_block_that_one_side_never_frees_is_a_difference_of_lifetime() -> None:
    found = compare(trace_of("a1 b2 -a"), trace_of("a1 b2"))

    (lifetime,) = found.lifetimes
    assert (lifetime.earlier, lifetime.freed_b.event) == ("a", None)
    assert found.frees == Counts(0, 1, 0)
    assert not found.same


def test_blocks_freed_late_together_are_told_together() -> None:
    a = trace_of("a1 b2 c3 -a -b -c d4 e5")
    b = trace_of("a1 b2 c3 d4 -a -b -c e5")

    (lifetime,) = compare(a, b).lifetimes

    assert (lifetime.count, lifetime.nbytes) == (3, 6)
    assert [pair[0].op for pair in lifetime.pairs] == ["op.a", "op.b", "op.c"]


def test_lifetimes_are_judged_beside_allocations_that_only_one_side_has() -> None:
    a = trace_of("a1 b2 -a c3")
    b = trace_of("a1 x9 b2 y9 -a z9 c3")

    assert compare(a, b).lifetimes == ()


def test_a_free_on_another_stream_counts_from_its_request() -> None:
    a, b = trace_of("a1 b2 -a c3"), Trace()
    x = b.alloc(1)
    b.alloc(2)
    b.free_requested(x)
    b.alloc(3)
    b.free_completed(x)

    assert compare(a, b).same


def test_the_first_difference_is_the_earliest_of_either_kind() -> None:
    late_hunk = first_of(compare(trace_of("a1 b2 -a c3 d4"), trace_of("a1 b2 c3 -a d4 x5")))
    late_life = first_of(compare(trace_of("x9 a1 b2 -a c3 d4"), trace_of("a1 b2 c3 -a d4")))

    assert isinstance(late_hunk, Lifetime)
    assert late_hunk.event_a == 2
    assert isinstance(late_life, Hunk)


# -- in words --------------------------------------------------------------------------------------------------


def test_a_comparison_reads_as_text() -> None:
    a = trace_of("|forward a1048576 b2097152 -a c3145728 d512")
    b = trace_of("|forward a1048576 b2097152 c3145728 -a x4194304 d512")

    assert (
        format_comparison(a, b)
        == """\
                  both    only a    only b     moved
allocations          4         0         1
frees                0         0         0         1
requested peak: a 5.00 MiB, b 9.00 MiB (+4.00 MiB)

@ event 5 of a, 5 of b, forward 1
  +     4.00 MiB  op.x

freed earlier in a than in b: 1.00 MiB in 1 block
  =     1.00 MiB  op.a
    a: event 3, forward 1, after 2.00 MiB op.b, before 3.00 MiB op.c
    b: event 4, forward 1, after 3.00 MiB op.c, before 4.00 MiB op.x

only on one side, by bytes:
  b      4.00 MiB  = 1 x 4.00 MiB  op.x"""
    )


def test_long_lists_are_cut_and_say_so() -> None:
    a, b = Trace(), Trace()
    for i in range(100):
        a.alloc(i)
        b.alloc(i)
        a.alloc(1000 + i)

    text = format_comparison(a, b, limit=3)

    assert text.count("@ event") == 3
    assert "  ... and 97 more places" in text
    assert "  ... and 97 more kinds" in text


def test_what_is_not_listed_is_still_counted() -> None:
    a, b = Trace(), Trace()
    for i in range(100):
        a.alloc(i)
        b.alloc(i)
        a.alloc(1000 + i)

    found = compare(a, b, detail=10)

    assert (len(found.hunks), found.left_out) == (10, 90)
    assert found.allocs == Counts(100, 100, 0)
    assert len(found.totals) == 100


def test_names_that_would_steer_a_terminal_do_not() -> None:
    a = Trace()
    a.mark("\x1b[2Jphase")
    a.alloc(1, op="\x1b[31mred\n")

    assert "\x1b" not in format_comparison(a, Trace())


# -- aligning --------------------------------------------------------------------------------------------------


def longest(a: list[int], b: list[int]) -> int:
    """The length of the longest common subsequence, by the textbook."""
    row = [0] * (len(b) + 1)
    for x in a:
        above = row
        row = [0]
        for j, y in enumerate(b):
            row.append(above[j] + 1 if x == y else max(row[j], above[j + 1]))
    return row[-1]


SHORT = st.lists(st.integers(0, 3), max_size=11)  # shorter than AGREE: the exact diff all the way


@settings(max_examples=examples(300), deadline=None)
@given(SHORT, SHORT)
def test_what_is_aligned_is_equal_in_order_and_for_short_sequences_the_most_there_is(
    a: list[int], b: list[int]
) -> None:
    runs = list(align(np.array(a, dtype=np.int64), np.array(b, dtype=np.int64), EditBudget()))

    i = j = 0
    for at_a, at_b, n in runs:
        assert (n > 0, at_a >= i, at_b >= j) == (True, True, True)
        assert a[at_a : at_a + n] == b[at_b : at_b + n]
        i, j = at_a + n, at_b + n
    assert sum(n for _, _, n in runs) == longest(a, b)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 400), st.integers(1, 6), st.floats(0, 1))
def test_sequences_with_any_rate_of_differences_are_aligned_soundly(
    seed: int, length: int, alphabet: int, rate: float
) -> None:
    chance = random.Random(seed)
    a = [chance.randrange(alphabet) for _ in range(length)]
    b = [x if chance.random() > rate else chance.randrange(alphabet) for x in a if chance.random() > rate / 3]

    i = j = 0
    for at_a, at_b, n in align(np.array(a, dtype=np.int64), np.array(b, dtype=np.int64), EditBudget()):
        assert (n > 0, at_a >= i, at_b >= j) == (True, True, True)
        assert a[at_a : at_a + n] == b[at_b : at_b + n]
        i, j = at_a + n, at_b + n


def test_a_hundred_thousand_nearly_equal_events_take_a_moment() -> None:
    chance = random.Random(3)
    a, b = Trace(), Trace()
    for i in range(50_000):
        size = 512 * (i % 23 + 1)
        a.free(a.alloc(size))
        if chance.random() < 0.99:
            b.free(b.alloc(size))

    start = time.process_time()
    found = compare(a, b)

    assert time.process_time() - start < 5  # about 0.2 s
    assert found.allocs.both == len(b.requested)


def test_traces_that_have_nothing_in_common_take_seconds_not_hours() -> None:
    a, b = Trace(), Trace()
    for i in range(40_000):
        a.alloc(2 * i)
        b.alloc(2 * i + 1)

    start = time.process_time()
    found = compare(a, b)

    assert time.process_time() - start < 20  # about 2 s
    assert found.allocs == Counts(0, 40_000, 40_000)
