"""The model against a real H200 (torch 2.11): two recorded histories, to the byte.

`data/snap-train.pickle` is one training step of GPT-2; `data/snap-oom.pickle` runs out of memory under a cap of 6 GiB.
Both began after a first step, so how memory lay then is found by going backwards. The expected figures were printed by
torch in the recorded processes: `max_memory_allocated`, `max_memory_reserved` and the text of the error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from support.addresses import rising_addresses
from support.allocators import PlayerFrom, holding, replay_from
from support.quick import quick
from support.verify import check_invariants, final_layout, rewind, verify

from memfit.events import Action, Trace
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.blocks import SegmentRecord
from memfit.replay.driver import AddressSource, Driver, falling_addresses
from memfit.snapshots.read import read_snapshot
from memfit.units import GiB, MiB

DATA = Path(__file__).parents[1] / "data"

# measure_more.py set the fraction 6 GiB / total_memory; torch turns it back into bytes, rounding down.
H200 = 143_771 * MiB
CAP = AllocatorConfig(memory_fraction=6 * GiB / H200).limit_on(H200)


class Recording(NamedTuple):
    trace: Trace
    config: AllocatorConfig
    start: tuple[SegmentRecord, ...]
    end: tuple[SegmentRecord, ...]


@cache
def recording(name: str) -> Recording:
    snapshot = read_snapshot(DATA / f"{name}.pickle")
    config = AllocatorConfig.from_snapshot(snapshot.settings)
    trace, end = snapshot.traces[0], final_layout(snapshot)
    return Recording(trace, config, rewind(trace, end, config), end)


def up_to_the_error(trace: Trace) -> Trace:
    """The program's calls as far as the one that failed, and that one as an ordinary request."""
    [error] = [event for event, action in enumerate(trace.actions) if action == Action.OOM]
    assert Action.ALLOC not in trace.actions[error:], "else its row would look as if it had been there from the start"
    cut = Trace(origin="measured")
    for name in ("requested", "streams", "addresses", "category_of", "op_of", "module_of"):
        getattr(cut, name).extend(getattr(trace, name))
    cut.actions.extend(trace.actions[:error])
    cut.subjects.extend(trace.subjects[:error])
    cut.alloc(trace.range_sizes[trace.subjects[error]])
    return cut


def test_the_cap_is_6_gib_or_one_byte_less() -> None:
    assert CAP in (6 * GiB, 6 * GiB - 1)


def test_a_training_step_is_reproduced_block_by_block() -> None:
    run = recording("snap-train")
    assert sum(action == Action.ALLOC for action in run.trace.actions) == 1283
    assert verify(run.trace, run.config, start=run.start, end=run.end) == []


def test_expandable_segments_are_reproduced_map_by_map() -> None:
    run = recording("snap-expandable")
    assert run.config.expandable_segments
    assert len(set(run.trace.streams)) == 2
    assert verify(run.trace, run.config, start=run.start, end=run.end) == []


@pytest.mark.parametrize("limit", [CAP, 6 * GiB, 6 * GiB - 1, None])
def test_a_run_into_the_cap_is_reproduced_with_its_releases_and_its_error(limit: int | None) -> None:
    # With None the refusals are read off the recording; with the cap the model has to find them by itself.
    run = recording("snap-oom")
    assert verify(run.trace, run.config, limit=limit, start=run.start, end=run.end) == []


def test_a_lower_cap_would_have_released_segments_earlier() -> None:
    run = recording("snap-oom")
    [mismatch] = verify(run.trace, run.config, limit=6 * GiB - 64 * MiB, start=run.start)
    assert (mismatch.what, run.trace.actions[mismatch.event]) == ("driver calls", Action.ALLOC)


def test_the_error_comes_at_the_recorded_event_with_the_recorded_figures() -> None:
    run = recording("snap-oom")
    oom = replay_from(run.start, up_to_the_error(run.trace), run.config, capacity=CAP).oom
    assert oom is not None
    assert run.trace.actions[oom.event] == Action.OOM
    assert (oom.rounded, oom.alloc_size) == (50_331_648, 48 * MiB)  # "Tried to allocate 48.00 MiB"
    assert f"{oom.allocated / GiB:.2f} GiB" == "5.76 GiB"  # "is allocated by PyTorch"
    assert f"{(oom.reserved - oom.allocated) / MiB:.2f} MiB" == "198.88 MiB"  # "reserved by PyTorch but unallocated"


def test_4_mib_more_would_have_been_enough_for_that_request() -> None:
    run = recording("snap-oom")
    calls = up_to_the_error(run.trace)
    fits = [replay_from(run.start, calls, run.config, capacity=6 * GiB + n * MiB).oom is None for n in (2, 4)]
    assert fits == [False, True]  # 6100 MiB were reserved, and 6100 + 48 = 6144 + 4


@pytest.mark.parametrize("addresses", [None, rising_addresses, falling_addresses])
def test_the_peaks_of_the_training_step_are_those_that_torch_counted(
    addresses: Callable[[], AddressSource] | None,
) -> None:
    run = recording("snap-train")
    source = None if addresses is None else addresses()
    timeline = replay_from(run.start, run.trace, run.config, addresses=source)
    assert (timeline.peak_allocated, timeline.peak_reserved) == (2_569_738_240, 3_001_024_512)
    assert timeline.retries == 0


def test_the_step_before_the_recording_had_reserved_what_the_rewound_layout_holds() -> None:
    run = recording("snap-train")
    assert sum(segment.size for segment in run.start) == 2_789_212_160  # torch's figure after the first step


@pytest.mark.parametrize("name", quick(["snap-oom"], ["snap-train", "snap-oom"]))
def test_allocated_and_free_bytes_make_up_the_reserved_ones_after_every_event(name: str) -> None:
    run = recording(name)
    allocator = holding(run.start, run.config, Driver(CAP if name == "snap-oom" else None))
    check_invariants(allocator)
    player = PlayerFrom(run.trace, allocator)
    player.place_what_was_there()
    for action, subject in run.trace.events():
        if action == Action.ALLOC:
            player.live[subject] = allocator.malloc(run.trace.requested[subject], run.trace.streams[subject])
        else:
            player.do(action, subject)
        check_invariants(allocator)


@pytest.mark.parametrize("name", ["snap-train", "snap-oom"])
def test_what_was_live_before_the_recording_is_in_the_rewound_layout(name: str) -> None:
    run = recording(name)
    active = [block for segment in run.start for block in segment.blocks if block.state == "active_allocated"]
    assert len(active) == run.trace.facts["live_before"] == 447
