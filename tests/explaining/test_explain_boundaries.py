"""Every rule of an explanation where it just holds and where it just does not; texts that are there, and absent."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from test_explain_answers import message, told, traps
from test_explain_tensors import of

from memfit.explaining.cause import Account, RecordedRequest, cause_of, fragmentation_of
from memfit.explaining.explain import explain
from memfit.explaining.fixes import _fixes_for_fragmentation
from memfit.explaining.job import Clues
from memfit.explaining.message import Oom, Size
from memfit.explaining.place import CodeFrame, place_from
from memfit.explaining.tensor import Factor, Reading, Readings, _able, patterns_of, preset_dimensions
from memfit.units import GiB, MiB

DATA = Path(__file__).parents[1] / "data"


# -- fragmentation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cached", "hole", "expandable", "verdict"), [
    (64 * MiB, 16 * MiB, False, "no"),  # a free piece of exactly the size was there
    (64 * MiB, 16 * MiB - 1, False, "yes"),
    (64 * MiB, 16 * MiB - 1, True, "no"),
    (64 * MiB, None, False, "cannot tell"),
    (16 * MiB, 1 * MiB, False, "yes"),  # exactly as much was cached as was asked for
    (16 * MiB - 1, 1 * MiB, False, "no"),
])  # fmt: skip
def test_a_snapshot_tells_fragmentation_by_its_largest_free_piece(
    cached: int, hole: int | None, expandable: bool, verdict: str
) -> None:
    recorded = RecordedRequest(
        requested_bytes=16 * MiB, cached_bytes=cached, largest_hole_bytes=hole, expandable=expandable
    )
    assert fragmentation_of(Oom(form="snapshot"), Account(), recorded).verdict == verdict


@pytest.mark.parametrize(("cached", "verdict"), [("1.16 GiB", "cannot tell"), ("1.15 GiB", "cannot tell"),
                                                 ("1.14 GiB", "no")])  # fmt: skip
def test_what_was_printed_as_cached_may_have_been_half_a_hundredth_more(cached: str, verdict: str) -> None:
    found = told(message(asked="1.16 GiB", cached=cached, allocated="20.00 GiB"))
    assert found.cause.fragmentation is not None
    assert found.cause.fragmentation.verdict == verdict


@pytest.mark.parametrize(("allocated", "cached", "said"), [(301, 100, True), (300, 100, False), (100, 100, False)])
def test_that_only_a_part_is_in_pieces_is_said_where_more_than_three_quarters_are_in_use(
    allocated: int, cached: int, said: bool
) -> None:
    account = Account(allocated_bytes=allocated * MiB, cached_bytes=cached * MiB)
    fix, *_ = _fixes_for_fragmentation(SimpleNamespace(account=account, oom=Oom(form="cuda")))  # type: ignore[arg-type]
    assert ("is in pieces, the rest is in use" in fix.says) is said
    if said:
        assert "but only 100.00 MiB of 401.00 MiB is in pieces" in fix.says


def test_of_a_real_snapshot_only_a_small_part_is_in_pieces() -> None:
    fix = explain(DATA / "snap-oom.pickle").fixes[0]
    assert "; but only 198.88 MiB of 5.96 GiB is in pieces, the rest is in use" in fix.says


@pytest.mark.parametrize(("asked", "worth"), [("300.00 MiB", True), ("302.00 MiB", False)])
def test_expandable_segments_are_worth_a_try_for_no_more_than_was_cached(asked: str, worth: bool) -> None:
    found = told(message(asked=asked, cached="300.25 MiB", free="10.00 MiB"))
    assert ("expandable segments" in {fix.name for fix in found.fixes}) is worth


def test_expandable_segments_are_not_proposed_where_they_are_on() -> None:
    text = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n" + message(asked="300.00 MiB", free="10.00 MiB")
    assert "expandable segments" not in {fix.name for fix in told(text).fixes}


# -- sums --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "said"), [
    (98, "kept by the driver, or rounding"), (102, "kept by the driver, or rounding"), (103, "does not add up"),
])  # fmt: skip
def test_a_rest_below_nothing_is_rounding_up_to_the_tolerance_of_the_printed_numbers(own: int, said: str) -> None:
    account = Account(whole_bytes=100, free_bytes=0, own_bytes=own, tolerance_bytes=2)
    assert [row.says for row in account.rows() if row.name == "rest"] == [said]


@pytest.mark.parametrize(("size", "is_own"), [("22.22 GiB", True), ("25.20 GiB", True), ("25.30 GiB", False),
                                              ("22.10 GiB", False)])  # fmt: skip
def test_a_process_is_this_one_if_it_holds_what_torch_holds_and_at_most_3_gib_beside(size: str, is_own: bool) -> None:
    found = told(message(own="", capacity="39.39 GiB", others={77: size}))
    assert (found.account.own_by_size == 77) is is_own
    assert found.account.other_pids == (() if is_own else (77,))


@pytest.mark.parametrize(("count", "said"), [(2, False), (3, True)])
def test_three_bare_contexts_are_ranks_on_one_card_and_two_are_not(count: int, said: bool) -> None:
    found = told(message(others={pid: f"{400 + pid}.00 MiB" for pid in range(1, count + 1)}))
    assert ("ranks-on-one-card" in traps(found)) is said


# -- the cause ---------------------------------------------------------------------------------------------------------


def exactly(count: int) -> Size:
    return Size(f"{count} bytes", count, count)


@pytest.mark.parametrize(("asked", "kind"), [(GiB, "shortage"), (GiB + 1, "impossible-request")])
def test_a_request_as_large_as_the_card_is_not_impossible_and_one_byte_more_is(asked: int, kind: str) -> None:
    oom = Oom(form="cuda", requested=exactly(asked))
    assert cause_of(oom, Account(), Clues(), card_bytes=GiB).kind == kind


@pytest.mark.parametrize(("others", "kind"), [("1.00 GiB", "shortage"), ("3.00 GiB", "other-processes")])
def test_others_are_the_cause_only_where_what_they_hold_would_have_been_enough(others: str, kind: str) -> None:
    found = told(message(asked="3.00 GiB", free="512.00 MiB", own="19.00 GiB", allocated="18.00 GiB",
                         others={77: others}))  # fmt: skip
    assert found.cause.kind == kind


@pytest.mark.parametrize(("free", "kind"), [("512.00 MiB", "shortage"), ("5.00 GiB", "limit")])
def test_a_limit_is_the_cause_only_where_the_card_had_room(free: str, kind: str) -> None:
    found = told(message(asked="1.00 GiB", free=free, allowed="18.00 GiB", own="18.00 GiB", allocated="17.50 GiB"))
    assert found.cause.kind == kind
    if kind == "limit":
        held = 17.5 * GiB + 300.25 * MiB
        assert found.cause.short_bytes == pytest.approx(held + GiB - 18 * GiB, abs=30 * MiB)


def test_a_limit_is_the_cause_whoever_else_is_on_the_card() -> None:
    found = told(message(asked="1.00 GiB", capacity="39.39 GiB", free="5.00 GiB", allowed="18.00 GiB", own="18.00 GiB",
                         allocated="17.50 GiB", others={77: "10.00 GiB"}))  # fmt: skip
    assert found.cause.kind == "limit"


def test_where_an_old_message_says_what_is_reserved_the_difference_is_cached() -> None:
    old = (
        "RuntimeError: CUDA out of memory. Tried to allocate 40.00 MiB (GPU 0; 10.76 GiB total capacity; 9.00 GiB "
        "already allocated; 14.00 MiB free; 9.50 GiB reserved in total by PyTorch)"
    )
    account = told(old).account
    assert (account.allocated_bytes, account.cached_bytes) == (9 * GiB, GiB // 2)


@pytest.mark.parametrize(("pools", "kind"), [("1.00 GiB", "private-pools"), ("100.00 MiB", "shortage")])
def test_private_pools_are_the_cause_only_where_they_have_what_was_missing(pools: str, kind: str) -> None:
    assert told(message(asked="1.16 GiB", free="512.00 MiB", pools=pools)).cause.kind == kind


# -- the tensor --------------------------------------------------------------------------------------------------------


def reading(points: int, tensor: str = "x") -> Reading:
    return Reading(kind="logits", tensor=tensor, factors=(), itemsize=4, models=(), known=True, points=points)


@pytest.mark.parametrize(("first", "second", "named"), [(9, 6, True), (9, 7, False), (9, None, True), (3, None, True),
                                                        (2, None, False), (3, 0, True)])  # fmt: skip
def test_the_first_reading_is_the_likeliest_with_a_lead_of_three_points(
    first: int, second: int | None, named: bool
) -> None:
    found = (reading(first), *([] if second is None else [reading(second, "y")]))
    assert (Readings((), found, grounded=True).likeliest is not None) is named
    assert Readings((), found, grounded=False).likeliest is None


def points(**moment: object) -> int:
    """Of the logits of 2,048 tokens."""
    found = of("1.16 GiB", "qwen2.5-7b", batch_size=1, seq_len=2048, **moment)
    return next(each.points for each in found.candidates if each.kind == "logits" and each.itemsize == 4)


def test_a_phase_in_which_the_tensor_is_made_counts_for_it_and_another_against_it() -> None:
    assert points(phase="loss") == points() + 1
    assert points(phase="optimizer step") == points() - 3


def test_a_line_that_works_on_the_tensor_counts_for_it_and_another_against_it() -> None:
    assert points(hints=frozenset({"logits"})) == points() + 5
    assert points(hints=frozenset({"mlp"})) == points() - 2


def test_of_an_fp32_job_16_bit_readings_lose_six_points() -> None:
    def halves(precision: str | None) -> int | None:
        found = of("594.00 MiB", "qwen2.5-7b", batch_size=1, seq_len=2048, precision=precision)
        return next((each.points for each in found.candidates if each.kind == "logits" and each.itemsize == 2), None)

    assert (halves(None), halves("fp32")) == (7, 1)


@pytest.mark.parametrize(("length", "able"), [(1024, True), (1025, False), (2048, False)])
def test_a_model_has_no_scores_of_more_tokens_than_it_has_positions(length: int, able: bool) -> None:
    gpt2 = preset_dimensions("gpt2")
    assert gpt2 is not None and gpt2.positions == 1024
    (scores, *_) = (each for each, _ in patterns_of((gpt2,)) if each.free == "rows-length-length")
    side = Factor(symbol="tokens", value=length)
    assert bool(_able((gpt2,), scores, (side, side))) is able


# -- the place ---------------------------------------------------------------------------------------------------------


def test_the_innermost_line_outside_of_libraries_is_shown() -> None:
    frames = [
        CodeFrame("/home/me/train.py", 10, "main", "trainer.train()"),
        CodeFrame("/home/me/model.py", 20, "forward", "self.mlp(x)"),
        CodeFrame("/venv/lib/python3.11/site-packages/torch/nn/functional.py", 30, "linear", "return F.linear(x)"),
    ]
    place = place_from(frames)
    assert place.shown is not None and (place.shown.path, place.shown.line) == ("/home/me/model.py", 20)
