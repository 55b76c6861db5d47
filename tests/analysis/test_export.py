"""A run for other tools: each file is what its reader expects."""

from __future__ import annotations

import csv
import io
import json
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from made import DATA, MiB, as_measured, random_trace, training

from memfit.analysis.export import FORMATS, csv_text, find_format, viewer_snapshot, write_export
from memfit.analysis.report import report_run
from memfit.analysis.run import Run, open_run, run_of_trace, runs_of_snapshot
from memfit.errors import UnknownName
from memfit.events import Trace
from memfit.snapshots.read import read_snapshot, snapshot_of

# what torch/utils/viz/MemoryViz.js knows, up to its version of January 2026
VIEWER_OPCODES = {
    "PROTO", "APPEND", "APPENDS", "LIST", "TUPLE", "NEWFALSE", "NEWTRUE", "NONE", "BINGET", "BININT", "BININT1",
    "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT",
    "SETITEMS", "SETITEM", "DICT", "SHORT_BINUNICODE", "BINUNICODE", "STOP", "EMPTY_TUPLE", "TUPLE1", "TUPLE2",
    "TUPLE3", "BINFLOAT",
}  # fmt: skip


def predicted() -> Run:
    trace = Trace()
    trace.mark("forward", 1)
    trace.alloc(8 * MiB, category="weights", module="h.0.mlp", op="aten.empty")
    trace.free(trace.alloc(30 * MiB, category="temporaries", module="h.0", op="aten.mm"))
    return run_of_trace(trace)


RUNS = {
    "predicted": predicted, "recorded": lambda: open_run(DATA / "snap-oom.pickle"),
    "random": lambda: runs_of_snapshot(as_measured(random_trace(9), begin=50))[0],
}  # fmt: skip


# -- torch's viewer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RUNS)
def test_the_pickle_holds_no_opcode_that_the_viewer_does_not_know(kind: str) -> None:
    data = FORMATS["memory-viz"].write(RUNS[kind]())

    assert data[:2] == b"\x80\x04"
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= VIEWER_OPCODES


def undone(snapshot: dict[str, Any], device: int) -> set[int]:
    """As the viewer draws the past: from the final state, each event is undone. Nothing may be missing."""
    live = {
        block["address"]: block["state"]
        for segment in snapshot["segments"]
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }
    for event in reversed(snapshot["device_traces"][device]):
        address = event.get("addr")
        if event["action"] == "alloc":
            assert live.pop(address) == "active_allocated"
        elif event["action"] == "free_completed":
            assert address not in live
            live[address] = "active_pending_free"
        elif event["action"] == "free_requested":
            assert live[address] == "active_pending_free"
            live[address] = "active_allocated"
    return set(live)


@pytest.mark.parametrize("kind", RUNS)
def test_undoing_the_events_of_an_exported_snapshot_leads_to_its_beginning(kind: str) -> None:
    run = RUNS[kind]()

    before = undone(viewer_snapshot(run), run.device)

    known = run.timeline.lives.birth == -1
    assert len(before) == int((known & (run.timeline.size > 0)).sum())


@pytest.mark.parametrize("kind", RUNS)
def test_torchs_own_script_adds_an_exported_snapshot_up(kind: str) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    snapshot = pickle.loads(FORMATS["memory-viz"].write(RUNS[kind]()))

    text = viz.segsum(snapshot)

    assert f"segments: {len(snapshot['segments'])}" in text


@pytest.mark.parametrize("ending", ["pickle", "json"])
def test_a_recording_written_anew_reads_back_as_it_was(tmp_path: Path, ending: str) -> None:
    run = open_run(DATA / "snap-oom.pickle")
    write_export(run, find_format("memory-viz" if ending == "pickle" else "json"), tmp_path / f"again.{ending}")

    again, before = read_snapshot(tmp_path / f"again.{ending}"), read_snapshot(DATA / "snap-oom.pickle")

    assert (again.segments, again.annotations, again.settings) == (before.segments, before.annotations, before.settings)
    assert again.times == before.times
    assert list(again.traces[0].events()) == list(before.traces[0].events())
    for block in range(len(again.traces[0].requested)):
        assert again.frames(0, block) == before.frames(0, block)


def test_the_report_of_an_export_is_the_report_of_its_source(tmp_path: Path) -> None:
    run = open_run(DATA / "snap-train.pickle")
    write_export(run, find_format("memory-viz"), tmp_path / "again.pickle")

    assert report_run(open_run(tmp_path / "again.pickle")) == report_run(run)


def test_all_devices_are_written_and_stacks_are_shared() -> None:
    raw = training(300, layers=2, depth=20).snapshot()
    raw["device_traces"] = [[], raw["device_traces"][0]]
    raw["segments"] = [{**segment, "device": 1} for segment in raw["segments"]]
    (run,) = runs_of_snapshot(snapshot_of(raw))

    written = viewer_snapshot(run)

    assert [len(events) for events in written["device_traces"]] == [0, len(raw["device_traces"][1])]
    assert len(pickle.dumps(written, protocol=4)) < len(json.dumps(written)) / 4


# -- the others -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RUNS)
def test_perfetto_gets_counters_that_peak_where_the_run_does(kind: str) -> None:
    run = RUNS[kind]()
    trace = json.loads(FORMATS["perfetto"].write(run))

    counters = [event for event in trace["traceEvents"] if event["ph"] == "C" and event["name"] == "allocated bytes"]
    assert max(sum(event["args"].values()) for event in counters) == run.timeline.peak_allocated
    times = [event["ts"] for event in counters]
    assert times == sorted(times)
    begun = {event["id"] for event in trace["traceEvents"] if event["ph"] == "b"}
    assert begun == {event["id"] for event in trace["traceEvents"] if event["ph"] == "e"}
    assert all(event["dur"] >= 0 for event in trace["traceEvents"] if event["ph"] == "X")


@pytest.mark.parametrize("kind", RUNS)
def test_speedscope_gets_stacks_whose_weights_sum_to_the_peak(kind: str) -> None:
    run = RUNS[kind]()
    file = json.loads(FORMATS["speedscope"].write(run))

    (profile,) = file["profiles"]
    assert sum(profile["weights"]) == profile["endValue"] == run.timeline.peak_allocated
    assert len(profile["samples"]) == len(profile["weights"])
    assert max(max(sample) for sample in profile["samples"]) < len(file["shared"]["frames"])
    assert (profile["unit"], file["$schema"]) == ("bytes", "https://www.speedscope.app/file-format-schema.json")


@pytest.mark.parametrize("kind", RUNS)
def test_the_table_has_one_row_an_allocation(kind: str) -> None:
    run = RUNS[kind]()
    rows = list(csv.DictReader(io.StringIO(csv_text(run))))

    assert len(rows) == len(run.timeline.size)
    assert [int(row["allocated_bytes"]) for row in rows] == run.timeline.size.tolist()
    assert {row["category"] for row in rows} <= {*report_run(run)["breakdown"]}


def test_a_name_that_a_spreadsheet_would_run_is_text() -> None:
    trace = Trace()
    trace.alloc(MiB, op="=cmd|' /C calc'!A0", module="@sum")
    (row,) = csv.DictReader(io.StringIO(csv_text(run_of_trace(trace))))

    assert (row["op"], row["module"]) == ("'=cmd|' /C calc'!A0", "'@sum")


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="no export format called 'perfeto'") as caught:
        find_format("perfeto")
    assert caught.value.hint is not None
    assert "'perfetto'" in caught.value.hint
    assert find_format("memory_viz") is find_format("memory-viz")
