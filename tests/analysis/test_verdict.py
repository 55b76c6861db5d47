"""What a card must have for a job whose products it may pad: more than its replay, wherever that is asked."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from memfit.analysis.verdict import RANGE, fit_card, needed_with_room, smallest_card
from memfit.events import Trace
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.replay import Replays
from memfit.units import GiB, MiB

HELD, MORE, CONTEXT = 100 * MiB, 30 * MiB, 50 * MiB
ENDS = {
    "planned": "padded", "unpadded_bytes": 90 * MiB, "padded_bytes": HELD, "most_bytes": HELD + MORE,
    "unpadded_reserved_bytes": 90 * MiB, "padded_reserved_bytes": HELD,
}  # fmt: skip


def job(config: str = "", ends: Mapping[str, object] | None = ENDS) -> Replays:
    trace = Trace()
    trace.alloc(HELD)
    if ends is not None:
        trace.facts[RANGE] = dict(ends)
    return Replays(trace, AllocatorConfig.parse(config))


def test_the_most_counts_with_room_on_the_smallest_card_and_on_any_card() -> None:
    for more, ends in ((0, None), (MORE, ENDS)):
        needed = HELD + CONTEXT + more
        assert needed_with_room(job(ends=ends), CONTEXT) == smallest_card(job(ends=ends), CONTEXT) == needed
        assert fit_card(job(ends=ends), GiB, CONTEXT).device_bytes == needed
        assert fit_card(job(ends=ends), needed, CONTEXT).verdict == "tight"
        assert fit_card(job(ends=ends), needed - 1, CONTEXT).verdict == "fails"


def test_the_most_lies_within_the_share_of_the_card_that_a_process_may_reserve() -> None:
    half, card = "per_process_memory_fraction:0.5", 2 * (HELD + MORE)
    assert fit_card(job(half), card, CONTEXT).verdict == "tight"
    assert fit_card(job(half), card - 2 * MiB, CONTEXT).verdict == "fails"
    assert fit_card(job(half, None), card - 2 * MiB, CONTEXT).verdict == "safe"


@pytest.mark.parametrize(("more", "counts"), [(20 * MiB, MORE), (50 * MiB, 50 * MiB)])
def test_what_the_other_end_reserves_counts_where_it_is_more(more: int, counts: int) -> None:
    ends = {**ENDS, "unpadded_reserved_bytes": HELD + more}
    assert needed_with_room(job(ends=ends), CONTEXT) == HELD + CONTEXT + counts
