"""What a snapshot says is what the trace says: real files from a GPU, and small ones written out here."""

from __future__ import annotations

import gzip
import json
import pickle
import pickletools
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError, UsageError
from memfit.events import Action, Trace
from memfit.snapshots.read import Snapshot, SnapshotBlock, SnapshotSegment, read_snapshot
from memfit.snapshots.write import save_snapshot, snapshot_dict

DATA = Path(__file__).parents[1] / "data"
BASE = 0x7F00_0000_0000
MiB = 1 << 20


def event(action: str, addr: int, size: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 0, **more}


def freed(addr: int, size: int) -> list[dict[str, Any]]:
    return [event("free_requested", addr, size), event("free_completed", addr, size)]


def segment(*blocks: tuple[int, str], address: int = BASE, **more: Any) -> dict[str, Any]:
    """Blocks as (size, state); the first letter of the state is enough."""
    states = {"a": "active_allocated", "p": "active_pending_free", "i": "inactive"}
    return {
        "device": 0, "address": address, "total_size": sum(size for size, _ in blocks), "stream": 0,
        "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
        "blocks": [{"size": size, "requested_size": size - 8, "state": states.get(s, s)} for size, s in blocks], **more,
    }  # fmt: skip


def opened(tmp_path: Path, raw: Any) -> Snapshot:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(raw, protocol=4))
    return read_snapshot(path)


def history(tmp_path: Path, *events: dict[str, Any], segments: Any = (), **more: Any) -> Snapshot:
    settings = {"allocator_settings": {"expandable_segments": False}}
    return opened(tmp_path, {"segments": list(segments), "device_traces": [list(events)], **settings, **more})


def told(trace: Trace) -> list[tuple[str, int]]:
    return [(Action(action).name, subject) for action, subject in trace.events()]


# -- real files ------------------------------------------------------------------------------------------------


def test_a_real_training_step_has_the_events_that_were_counted_on_the_machine() -> None:
    snapshot = read_snapshot(DATA / "snap-train.pickle")

    (trace,) = snapshot.traces
    counts = Counter(Action(action).name for action in trace.actions)
    assert counts == {"ALLOC": 1283, "FREE": 1283, "SEGMENT_ALLOC": 3}
    assert counts["ALLOC"] + 2 * counts["FREE"] + counts["SEGMENT_ALLOC"] == 3852  # as in snapshots.jsonl
    assert trace.origin == "measured"


def test_a_real_out_of_memory_history_ends_in_the_request_that_failed() -> None:
    snapshot = read_snapshot(DATA / "snap-oom.pickle")

    (trace,) = snapshot.traces
    counts = Counter(Action(action).name for action in trace.actions)
    assert counts == {"ALLOC": 98, "FREE": 98, "SEGMENT_FREE": 55, "SEGMENT_ALLOC": 27, "OOM": 1}
    assert counts.total() + counts["FREE"] == 377
    at = next(subject for action, subject in trace.events() if action == Action.OOM)
    assert trace.range_sizes[at] == 48 * MiB  # "Tried to allocate 48.00 MiB"
    assert trace.range_addresses[at] == 142926282752  # "133.11 GiB is free"


@pytest.mark.parametrize("name", ["snap-train", "snap-oom"])
def test_the_bytes_live_at_the_end_of_a_real_history_are_those_of_its_final_state(name: str) -> None:
    snapshot = read_snapshot(DATA / f"{name}.pickle")

    (trace,) = snapshot.traces
    live = set(range(len(trace.requested)))
    live -= {subject for action, subject in trace.events() if action == Action.FREE}
    final = {
        (block.address, block.requested_size)
        for part in snapshot.segments
        for block in part.blocks
        if block.state == "active_allocated"
    }
    assert {(trace.addresses[block], trace.requested[block]) for block in live} == final


@pytest.mark.parametrize("name", ["snap-train", "snap-oom"])
def test_a_real_recording_that_began_after_loading_the_model_says_so(name: str) -> None:
    snapshot = read_snapshot(DATA / f"{name}.pickle")

    (warning,) = snapshot.warnings
    assert "recording began after memory was in use" in warning
    assert snapshot.traces[0].facts["live_before"] == 447


@pytest.mark.parametrize("name", ["snap-train", "snap-oom"])
def test_a_real_pickle_holds_no_opcode_that_imports_or_calls(name: str) -> None:
    names = {opcode.name for opcode, _, _ in pickletools.genops((DATA / f"{name}.pickle").read_bytes())}

    assert not names & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ", "NEWOBJ_EX", "INST", "OBJ", "BINPERSID"}


def test_a_forward_allocation_names_its_code_line_and_a_backward_one_has_no_frames() -> None:
    snapshot = read_snapshot(DATA / "snap-train.pickle")

    (trace,) = snapshot.traces
    first = trace.facts["live_before"]
    assert trace.op(first) == "measure_more.py:29:train_steps"
    assert str(snapshot.frames(0, first)[0]) == "measure_more.py:29:train_steps"
    assert len(snapshot.frames(0, first)) == 3
    without = [block for block in range(first, len(trace.requested)) if not snapshot.frames(0, block)]
    assert len(without) == 614
    assert {trace.op(block) for block in without} == {""}


def test_annotations_point_at_the_event_they_come_before() -> None:
    snapshot = read_snapshot(DATA / "snap-train.pickle")

    start, end, *_ = snapshot.annotations
    assert (start.name, start.stage, end.stage) == ("Optimizer.step#AdamW.step", "START", "END")
    times = snapshot.times[0]
    assert times[start.event - 1] < start.time_us <= times[start.event]
    assert start.event < end.event <= len(snapshot.traces[0])


def test_the_same_file_gzipped_or_as_json_gives_the_same_snapshot(tmp_path: Path) -> None:
    source = (DATA / "snap-oom.pickle").read_bytes()
    (tmp_path / "a.pickle.gz").write_bytes(gzip.compress(source))
    (tmp_path / "b.json").write_text(json.dumps(pickle.loads(source)))
    (tmp_path / "c.json.gz").write_bytes(gzip.compress((tmp_path / "b.json").read_bytes()))

    expected = read_snapshot(DATA / "snap-oom.pickle")
    for name in ("a.pickle.gz", "b.json", "c.json.gz"):
        assert read_snapshot(tmp_path / name) == expected, name


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_from_2_on_is_read(tmp_path: Path, protocol: int) -> None:
    raw = pickle.loads((DATA / "snap-oom.pickle").read_bytes())
    (tmp_path / "again.pickle").write_bytes(pickle.dumps(raw, protocol=protocol))

    assert read_snapshot(tmp_path / "again.pickle") == read_snapshot(DATA / "snap-oom.pickle")


# -- events ----------------------------------------------------------------------------------------------------


def test_the_two_halves_of_an_ordinary_free_are_one_event(tmp_path: Path) -> None:
    snapshot = history(tmp_path, event("alloc", 512, 100), *freed(512, 100))

    assert told(snapshot.traces[0]) == [("ALLOC", 0), ("FREE", 0)]


def test_a_free_that_waits_for_another_stream_stays_two_events(tmp_path: Path) -> None:
    request, complete = freed(512, 100)

    snapshot = history(tmp_path, event("alloc", 512, 100), request, event("alloc", 1024, 7), complete)

    assert told(snapshot.traces[0]) == [("ALLOC", 0), ("FREE_REQUESTED", 0), ("ALLOC", 1), ("FREE_COMPLETED", 0)]


def test_an_address_used_twice_is_two_blocks(tmp_path: Path) -> None:
    snapshot = history(tmp_path, event("alloc", 512, 100), *freed(512, 100), event("alloc", 512, 60), *freed(512, 60))

    trace = snapshot.traces[0]
    assert told(trace) == [("ALLOC", 0), ("FREE", 0), ("ALLOC", 1), ("FREE", 1)]
    assert list(trace.requested) == [100, 60]


def test_a_block_freed_but_not_allocated_in_the_history_is_a_row_without_an_alloc(tmp_path: Path) -> None:
    snapshot = history(tmp_path, event("alloc", 512, 100), *freed(4096, 50), *freed(512, 100))

    trace = snapshot.traces[0]
    assert told(trace) == [("ALLOC", 1), ("FREE", 0), ("FREE", 1)]  # what was there before comes first
    assert list(trace.requested) == [50, 100]
    assert trace.facts["live_before"] == 1


def test_a_block_live_all_through_is_a_row_without_any_event(tmp_path: Path) -> None:
    frames = [{"filename": "/home/me/train.py", "line": 3, "name": "main"}]
    held = segment((2 * MiB, "a"), (2 * MiB, "i"))
    held["blocks"][0]["frames"] = frames

    snapshot = history(tmp_path, segments=[held])

    trace = snapshot.traces[0]
    assert (len(trace), list(trace.requested), list(trace.addresses)) == (0, [2 * MiB - 8], [BASE])
    assert trace.op(0) == "train.py:3:main"


def test_what_the_driver_did_is_kept_in_order(tmp_path: Path) -> None:
    snapshot = history(
        tmp_path,
        event("segment_alloc", BASE, 2 * MiB),
        event("segment_map", 1, 2),
        event("segment_unmap", 3, 4),
        event("segment_free", 5, 6),
        {"action": "oom", "device_free": 77, "size": 512, "stream": 0},
    )

    trace = snapshot.traces[0]
    names = ["SEGMENT_ALLOC", "SEGMENT_MAP", "SEGMENT_UNMAP", "SEGMENT_FREE", "OOM"]
    assert told(trace) == [(name, i) for i, name in enumerate(names)]
    assert list(zip(trace.range_addresses, trace.range_sizes, strict=True))[-2:] == [(5, 6), (77, 512)]


def test_each_device_has_its_own_trace(tmp_path: Path) -> None:
    other = segment((512, "a"), device=2)

    snapshot = opened(tmp_path, {"segments": [other], "device_traces": [[], [event("alloc", 512, 9)]]})

    assert [len(trace) for trace in snapshot.traces] == [0, 1, 0]
    assert [list(trace.requested) for trace in snapshot.traces] == [[], [9], [504]]


def test_the_op_is_the_innermost_python_frame_even_among_cpp_frames(tmp_path: Path) -> None:
    frames = [
        {"filename": "??", "line": 0, "name": "c10::malloc"},
        {"filename": "/build/aten/Empty.cpp", "line": 8, "name": "at::empty"},
        {"filename": "/x/functional.py", "line": 12, "name": "linear"},
        {"filename": "/x/train.py", "line": 3, "name": "main"},
    ]

    snapshot = history(tmp_path, event("alloc", 512, 100, frames=frames))

    assert snapshot.traces[0].op(0) == "functional.py:12:linear"
    assert [frame.name for frame in snapshot.frames(0, 0)] == ["c10::malloc", "at::empty", "linear", "main"]


def test_equal_stacks_are_kept_once_whether_the_file_shared_them_or_not(tmp_path: Path) -> None:
    def stack() -> list[dict[str, Any]]:
        return [{"filename": "a.py", "line": 1, "name": "f"}, {"filename": "a.py", "line": 2, "name": "g"}]

    snapshot = history(tmp_path, *(event("alloc", 512 * i, 9, frames=stack()) for i in range(50)))

    assert (len(snapshot.stacks), len(snapshot.frame_table)) == (2, 2)  # with the empty stack


def test_fields_and_kinds_of_event_that_are_not_known_yet_do_no_harm(tmp_path: Path) -> None:
    news = event("alloc", 512, 100, pool_id=(0, 0), from_torch_3={"a": [1, {}]})

    snapshot = history(tmp_path, news, event("teleport", 512, 100), event("snapshot", 0, 5), host_traces=[[]])

    assert told(snapshot.traces[0]) == [("ALLOC", 0)]
    assert any("'teleport'" in warning or "teleport" in warning for warning in snapshot.warnings)


def test_a_free_that_was_not_recorded_is_put_where_its_memory_is_handed_out_again(tmp_path: Path) -> None:
    snapshot = history(tmp_path, event("alloc", 512, 100), event("alloc", 512, 60))

    assert told(snapshot.traces[0]) == [("ALLOC", 0), ("FREE", 0), ("ALLOC", 1)]
    assert any("1 frees are missing" in warning for warning in snapshot.warnings)


def test_a_million_events_would_load_in_seconds(tmp_path: Path) -> None:
    chance = random.Random(0)
    frames = [{"filename": f"m{i % 9}.py", "line": i, "name": "f"} for i in range(400)]
    stacks = [chance.sample(frames, 25) for _ in range(300)]
    events: list[dict[str, Any]] = []
    for i in range(33_333):
        address = BASE + i % 500 * MiB
        stack = stacks[i % 300]
        events += [{**each, "frames": stack} for each in (event("alloc", address, i), *freed(address, i))]
    path = tmp_path / "large.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}, protocol=4))

    start = time.process_time()
    snapshot = read_snapshot(path)

    assert len(snapshot.traces[0]) == 66_666
    assert time.process_time() - start < 4  # about 0.4 s for these 100,000


# -- segments and settings -------------------------------------------------------------------------------------


def test_blocks_without_addresses_lie_one_after_the_other(tmp_path: Path) -> None:
    snapshot = opened(tmp_path, {"segments": [segment((512, "a"), (1024, "i"), (512, "p"))]})

    assert snapshot.segments == (
        SnapshotSegment(
            0, BASE, 2048, 0, "large", False,
            (
                SnapshotBlock(BASE, 512, 504, "active_allocated"),
                SnapshotBlock(BASE + 512, 1024, 0, "inactive"),  # the requested size of a free block is stale
                SnapshotBlock(BASE + 1536, 512, 504, "active_pending_free"),
            ),
        ),
    )  # fmt: skip


def test_both_spellings_of_a_block_awaiting_its_free_are_one_state(tmp_path: Path) -> None:
    snapshot = opened(tmp_path, {"segments": [segment((512, "active_awaiting_free"))]})

    assert snapshot.segments[0].blocks[0].state == "active_pending_free"


def test_the_oldest_format_a_bare_list_of_segments_is_read(tmp_path: Path) -> None:
    old = segment((512, "a"), (512, "i"))
    for block in old["blocks"]:
        del block["requested_size"]
    del old["is_expandable"], old["segment_pool_id"]
    old["blocks"][0]["history"] = [{"real_size": 300, "frames": [{"filename": "a.py", "line": 1, "name": "f"}]}]

    snapshot = opened(tmp_path, [old])

    assert list(snapshot.traces[0].requested) == [300]
    assert snapshot.traces[0].op(0) == "a.py:1:f"
    assert len(snapshot.warnings) == 2


def test_settings_are_copied_one_level_deep(tmp_path: Path) -> None:
    settings = {"max_split_size": -1, "roundup_power2_divisions": {"1": 0, "2": 4}, "new": [1, 2]}

    snapshot = opened(tmp_path, {"segments": [], "device_traces": [], "allocator_settings": settings})

    assert snapshot.settings == {"max_split_size": -1, "roundup_power2_divisions": {"1": 0, "2": 4}}


# -- warnings --------------------------------------------------------------------------------------------------


def test_a_complete_history_gives_no_warning(tmp_path: Path) -> None:
    assert history(tmp_path, event("alloc", 512, 100), *freed(512, 100)).warnings == ()


def test_a_snapshot_without_history_says_how_to_record_one(tmp_path: Path) -> None:
    first, *_ = history(tmp_path, segments=[segment((512, "a"))]).warnings

    assert first.startswith("no history in it")
    assert "_record_memory_history" in first


def test_missing_settings_are_said(tmp_path: Path) -> None:
    snapshot = opened(tmp_path, {"segments": [], "device_traces": [[event("alloc", 512, 1)]]})

    assert snapshot.warnings[-1] == "no allocator settings in it: PyTorch's defaults are assumed"


def full(count: int) -> list[dict[str, Any]]:
    return [*freed(1 << 30, 5), *(event("alloc", 512 * i, 1) for i in range(count - 2))]


def test_a_history_of_a_round_number_of_events_with_a_free_out_of_nowhere_has_dropped_events(tmp_path: Path) -> None:
    (warning, *_) = history(tmp_path, *full(1000)).warnings

    assert "the history is full at 1,000 events, so older ones were dropped" in warning


def test_a_free_out_of_nowhere_in_a_history_that_is_not_full_is_a_late_start(tmp_path: Path) -> None:
    (warning, *_) = history(tmp_path, *full(999)).warnings

    assert "recording began after memory was in use" in warning


@pytest.mark.parametrize(
    ("said", "dropped"),
    [({"trace_alloc_overflowed": True}, True), ({"trace_alloc_max_entries": 999}, True),
     ({"trace_alloc_overflowed": False}, False), ({"trace_alloc_max_entries": 5000}, False)],
)  # fmt: skip
def test_what_torch_itself_says_about_dropped_events_decides(tmp_path: Path, said: Any, dropped: bool) -> None:
    (warning, *_) = history(tmp_path, *full(999), allocator_settings=said).warnings

    assert ("older ones were dropped" in warning) == dropped


# -- writing ---------------------------------------------------------------------------------------------------


def job() -> tuple[Trace, list[SnapshotSegment], dict[int, tuple[int, int]]]:
    """Two segments; a freed block, one reused place, one block that waits for a stream, one that lives on."""
    trace = Trace(origin="predicted")
    trace.mark("load")
    w = trace.alloc(1000, category="weights", op="aten.empty", module="lm_head")
    trace.mark("forward", step=1)
    x = trace.alloc(3 * MiB, category="activations", op="aten.mm", module="layers.0.mlp")
    trace.free(x)
    trace.empty_cache()
    y = trace.alloc(2 * MiB, op="aten.add", stream=7)
    z = trace.alloc(600, category="temporaries")
    trace.free_requested(y)
    trace.free(z)
    v = trace.alloc(500, op="aten.sum")
    segments = [
        SnapshotSegment(0, BASE, 2 * MiB, 0, "small", False),
        SnapshotSegment(0, BASE + 64 * MiB, 20 * MiB, 7, "large", False),
    ]
    placements = {
        w: (BASE, 1024), x: (BASE + 64 * MiB, 3 * MiB), y: (BASE + 64 * MiB, 2 * MiB),
        z: (BASE + 1024, 1024), v: (BASE + 1024, 512),
    }  # fmt: skip
    return trace, segments, placements


@pytest.mark.parametrize("name", ["job.json", "job.pickle"])
def test_a_trace_written_as_a_snapshot_reads_back_the_same(tmp_path: Path, name: str) -> None:
    trace, segments, placements = job()

    save_snapshot(snapshot_dict(trace, segments, placements), tmp_path / name)
    again = read_snapshot(tmp_path / name).traces[0]

    assert list(again.events()) == list(trace.events())
    assert again.marks == trace.marks
    assert (again.origin, again.requested, again.streams) == ("predicted", trace.requested, trace.streams)
    assert list(again.addresses) == [placements[block][0] for block in range(len(trace.requested))]
    for block in range(len(trace.requested)):
        names = trace.op(block), trace.module(block), trace.category(block)
        assert (again.op(block), again.module(block), again.category(block)) == names


def test_the_final_state_written_is_what_is_live_at_the_end_of_the_trace(tmp_path: Path) -> None:
    save_snapshot(snapshot_dict(*job()), tmp_path / "job.json")

    small, large = read_snapshot(tmp_path / "job.json").segments
    assert [(b.size, b.requested_size, b.state) for b in small.blocks] == [
        (1024, 1000, "active_allocated"), (512, 500, "active_allocated"), (2 * MiB - 1536, 0, "inactive"),
    ]  # fmt: skip
    assert [(b.size, b.requested_size, b.state) for b in large.blocks] == [
        (2 * MiB, 2 * MiB, "active_pending_free"), (18 * MiB, 0, "inactive"),
    ]  # fmt: skip


def undone(snapshot: dict[str, Any]) -> set[int]:
    """What the viewer does: from the final state, undo each event. The addresses left are those there at first."""
    live = {
        block["address"]: block["state"]
        for part in snapshot["segments"]
        for block in part["blocks"]
        if block["state"] != "inactive"
    }
    for each in reversed(snapshot["device_traces"][0]):
        address = each.get("addr")
        if each["action"] == "alloc":
            assert live.pop(address) == "active_allocated"
        elif each["action"] == "free_completed":
            assert address not in live
            live[address] = "active_pending_free"
        elif each["action"] == "free_requested":
            assert live[address] == "active_pending_free"
            live[address] = "active_allocated"
    return set(live)


def test_undoing_every_event_of_a_written_snapshot_ends_with_nothing() -> None:
    assert undone(snapshot_dict(*job())) == set()


def test_a_block_without_an_alloc_is_there_from_the_start(tmp_path: Path) -> None:
    snapshot = history(tmp_path, *freed(BASE, 504), segments=[segment((512, "i"), (512, "a"))])
    (trace,) = snapshot.traces

    written = snapshot_dict(trace, snapshot.segments, {0: (BASE, 512), 1: (BASE + 512, 512)})

    assert undone(written) == {BASE, BASE + 512}
    (tmp_path / "again.json").write_text(json.dumps(written))
    again = read_snapshot(tmp_path / "again.json")
    assert again.segments == snapshot.segments
    assert again.traces[0].requested == trace.requested
    assert list(again.traces[0].events()) == list(trace.events())


def test_categories_always_include_the_unknown_that_the_viewer_stumbles_over() -> None:
    trace = Trace()
    block = trace.alloc(512, category="weights")

    written = snapshot_dict(trace, [SnapshotSegment(0, BASE, 512, 0, "small", False)], {block: (BASE, 512)})

    assert {each["category"] for each in written["device_traces"][0]} == {"weights", "unknown"}


def test_driver_calls_of_a_replay_take_the_place_of_recorded_ones() -> None:
    trace = Trace()
    trace.driver(Action.SEGMENT_ALLOC, address=1, size=2)
    block = trace.alloc(512)
    room = [SnapshotSegment(0, BASE, 2 * MiB, 0, "small", False)]
    modelled = [(1, Action.SEGMENT_ALLOC, BASE, 2 * MiB, 0)]

    own = snapshot_dict(trace, room, {block: (BASE, 512)})
    replayed = snapshot_dict(trace, room, {block: (BASE, 512)}, driver=modelled)

    def told(snapshot: dict[str, Any]) -> list[tuple[str, int]]:
        return [(each["action"], each["addr"]) for each in snapshot["device_traces"][0]]

    assert told(own) == [("segment_alloc", 1), ("alloc", BASE)]
    assert told(replayed) == [("segment_alloc", BASE), ("alloc", BASE)]


def test_a_layout_that_cannot_be_is_refused() -> None:
    trace = Trace()
    a, b = trace.alloc(512), trace.alloc(512)
    room = [SnapshotSegment(0, BASE, 2048, 0, "small", False)]

    with pytest.raises(ValueError, match="lies in no segment"):
        snapshot_dict(trace, room, {a: (BASE, 512), b: (BASE + 4096, 512)})
    with pytest.raises(ValueError, match="overlaps"):
        snapshot_dict(trace, room, {a: (BASE, 1024), b: (BASE + 512, 512)})


def test_the_name_decides_the_format_and_nothing_is_left_beside(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot tell the format"):
        save_snapshot({}, tmp_path / "job.txt")
    save_snapshot({"segments": []}, tmp_path / "job.json")

    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]
    with pytest.raises(InputError):
        read_snapshot(tmp_path / "job.txt")
