"""Whatever is pointed at: snapshots old and new, traces, folders of runs."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from made import DATA, MiB, as_measured, random_trace, save, training

from memfit.analysis.export import viewer_snapshot
from memfit.analysis.report import report_file
from memfit.analysis.run import run_of_trace, runs_of_snapshot
from memfit.errors import InputError, UsageError
from memfit.events import Trace

BASE = 0x7F00_0000_0000
LOG = "Timestamp,Checkpoint,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,CPU_Percent\n"


def kinds(document: dict[str, Any]) -> list[str]:
    return [message["kind"] for message in document["messages"]]


# -- snapshots ------------------------------------------------------------------------------------------------------


def test_a_pickle_its_gzip_and_its_json_give_the_same_report(tmp_path: Path) -> None:
    data = (DATA / "snap-oom.pickle").read_bytes()
    expected = report_file(DATA / "snap-oom.pickle").document
    files = {
        "a.pickle.gz": gzip.compress(data), "b.json": json.dumps(pickle.loads(data)).encode(),
        "c.whatever": data,
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        found = report_file(tmp_path / name).document
        assert {**found, "source": None} == {**expected, "source": None}, name


def test_the_oldest_format_is_reported_from_its_final_state(tmp_path: Path) -> None:
    block = {"size": 4 * MiB, "state": "active_allocated", "history": [{"real_size": 4_000_000, "frames": []}]}
    old = [{"device": 0, "address": BASE, "total_size": 4 * MiB, "stream": 0, "blocks": [block]}]

    document = report_file(save(old, tmp_path / "old.pickle")).document

    assert kinds(document)[:1] == ["empty"]
    assert document["peak"] == {"allocated_bytes": 4 * MiB, "reserved_bytes": 4 * MiB, "requested_bytes": 4_000_000}
    assert document["seconds"] is None


def test_events_without_times_streams_or_frames_are_counted_instead(tmp_path: Path) -> None:
    raw = training(300, layers=2, depth=2).snapshot()
    for event in raw["device_traces"][0]:
        for key in ("time_us", "stream", "frames", "compile_context", "user_metadata"):
            del event[key]

    document = report_file(save(raw, tmp_path / "bare.pickle")).document

    assert (document["seconds"], document["at_peak"]["seconds"]) == (None, None)
    assert "no_stacks" in kinds(document)
    assert any("no times in it" in note for note in document["notes"])


def test_of_several_devices_the_one_that_needed_most_is_reported(tmp_path: Path) -> None:
    small, large = training(200, layers=1, depth=2).snapshot(), training(200, layers=3, depth=2).snapshot()
    raw = {
        **small,
        "device_traces": [small["device_traces"][0], [], large["device_traces"][0]],
        "segments": [*small["segments"], *({**segment, "device": 2} for segment in large["segments"])],
    }
    path = save(raw, tmp_path / "two.pickle")

    document = report_file(path).document

    assert document["device"] == 2
    assert [row["device"] for row in document["devices"]] == [0, 2]
    assert report_file(path, device=0).document["device"] == 0
    with pytest.raises(UsageError, match="--device 1: nothing was recorded of it"):
        report_file(path, device=1)


def test_private_pools_and_side_streams_are_told_apart(tmp_path: Path) -> None:
    raw = training(200, layers=2, depth=2).snapshot()
    raw["segments"][0] |= {"segment_pool_id": (0, 4), "stream": 94_000_000}

    document = report_file(save(raw, tmp_path / "pools.pickle")).document

    assert [0, 4] in [row["pool"] for row in document["segments"]]
    assert any("1 private pools" in note for note in document["notes"])


def test_keys_of_a_later_torch_do_no_harm(tmp_path: Path) -> None:
    raw = training(200, layers=2, depth=2).snapshot()
    raw["host_segments"] = raw["host_traces"] = raw["from_torch_3"] = [{"a": [1]}]
    for event in raw["device_traces"][0]:
        event |= {"pool_id": (0, 0), "fx_node": {"op": "call"}}

    assert report_file(save(raw, tmp_path / "new.pickle")).document["messages"] == []


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda raw: {**raw, "device_traces": []}, "empty"),
        (lambda raw: {**raw, "allocator_settings": {"trace_alloc_overflowed": True}}, "overflowed"),
        (lambda raw: {**raw, "device_traces": [raw["device_traces"][0][40:]]}, "late"),
        (lambda raw: {**raw, "device_traces": [raw["device_traces"][0][:200]]}, "truncated"),
        (lambda raw: {**raw, "segments": []}, "doubts"),
        (lambda raw: {key: raw[key] for key in ("segments", "device_traces")}, "settings"),
    ],
    ids=["empty", "overflowed", "late", "truncated", "contradictory", "without settings"],
)
def test_a_history_that_is_not_whole_has_its_own_message(tmp_path: Path, change: Any, kind: str) -> None:
    raw = change(training(400, layers=2, depth=2).snapshot())

    assert kind in kinds(report_file(save(raw, tmp_path / "some.pickle")).document)


def test_a_file_cut_off_while_being_written_says_where_it_ends(tmp_path: Path) -> None:
    data = (DATA / "snap-oom.pickle").read_bytes()
    (tmp_path / "half.pickle").write_bytes(data[: len(data) // 2])

    with pytest.raises(InputError, match=r"it ends at byte 190,328 in the middle of a value"):
        report_file(tmp_path / "half.pickle")


def test_settings_that_cannot_be_understood_are_said_and_the_defaults_taken(tmp_path: Path) -> None:
    raw = {**training(200, layers=1, depth=1).snapshot(), "allocator_settings": {"max_split_size": "much"}}

    assert "settings" in kinds(report_file(save(raw, tmp_path / "odd.pickle")).document)


def test_a_predicted_snapshot_comes_back_with_all_its_labels(tmp_path: Path) -> None:
    trace = Trace()
    trace.mark("load")
    trace.alloc(8 * MiB, category="weights", module="wte", op="empty")
    trace.mark("forward", 1)
    x = trace.alloc(30 * MiB, category="activations", module="h.0", op="mm")
    trace.mark("backward", 1)
    trace.free(x)
    direct = report_file_of(trace)
    path = save(viewer_snapshot(run_of_trace(trace)), tmp_path / "p.pickle")

    document = report_file(path).document

    for key in ("origin", "peak", "breakdown", "by_module", "category_source", "phase_source"):
        assert document[key] == direct[key], key
    figures = ("name", "step", "allocated_bytes", "reserved_bytes")
    assert [[row[key] for key in figures] for row in document["phases"]] == [
        [row[key] for key in figures] for row in direct["phases"]
    ]
    assert document["messages"] == []


def report_file_of(trace: Trace) -> dict[str, Any]:
    from memfit.analysis.report import report_run

    return report_run(run_of_trace(trace))


# -- traces ----------------------------------------------------------------------------------------------------------


def test_a_saved_trace_is_replayed_with_the_settings_that_are_asked_for(tmp_path: Path) -> None:
    random_trace(5).save(tmp_path / "t.npz")

    plain = report_file(tmp_path / "t.npz").document
    grown = report_file(tmp_path / "t.npz", alloc_conf="expandable_segments:True").document

    assert plain["peak"]["requested_bytes"] == grown["peak"]["requested_bytes"]
    assert plain["peak"]["reserved_bytes"] != grown["peak"]["reserved_bytes"]


def test_a_recording_cannot_be_replayed_with_other_settings() -> None:
    with pytest.raises(UsageError, match="a recording is taken as it was"):
        report_file(DATA / "snap-oom.pickle", alloc_conf="expandable_segments:True")


def test_no_file_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file"):
        report_file(tmp_path / "absent.pickle")


# -- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_reports_its_largest_recording_with_the_log_and_the_result_beside_it(tmp_path: Path) -> None:
    save(training(200, layers=1, depth=2).snapshot(), tmp_path / "small.pickle")
    save(training(200, layers=3, depth=2).snapshot(), tmp_path / "large.pickle")
    random_trace(2, 50).save(tmp_path / "predicted.npz")
    (tmp_path / "memory_log.csv").write_text(LOG + "2025-12-28T00:15:40,01_start,1.000,1.000,1.000,2.150,5.40\n")
    (tmp_path / "result.json").write_text('{"perplexity": 7.5, "mask": [1, 2], "note": "<b>"}')
    (tmp_path / "broken.pickle").write_bytes(b"\x80\x04")

    document = report_file(tmp_path).document

    assert document["source"]["reported"] == "large.pickle"
    assert [row["name"] for row in document["source"]["files"]] == ["large.pickle", "predicted.npz", "small.pickle"]
    assert document["log"]["checkpoints"][0]["name"] == "01_start"
    assert document["result"] == {"perplexity": 7.5, "mask": "(list)", "note": "<b>"}
    assert kinds(document)[-1] == "passed_over"


def test_a_folder_with_a_log_alone_is_a_report_too(tmp_path: Path) -> None:
    (tmp_path / "memory_log.csv").write_text(LOG + "2025-12-28T00:15:40,01_start,1.000,1.000,1.000,2.150,5.40\n")

    document = report_file(tmp_path).document

    assert (document["source"]["kind"], document["log"]["peak_between"]) == ("run_folder", "at 01_start")


def test_a_folder_without_anything_to_report_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to report on") as caught:
        report_file(tmp_path)
    assert caught.value.hint is not None
    assert "memory_log.csv" in caught.value.hint


def test_a_recording_with_a_leak_says_which_line_to_look_at(tmp_path: Path) -> None:
    raw = training(3000, layers=2, depth=2, leak=3 * MiB).snapshot()

    document = report_file(save(raw, tmp_path / "leak.pickle")).document

    assert "every step leaves 3.00 MiB more behind: look at train.py:44 log_loss" in document["next"]


def test_the_same_run_recorded_late_has_the_same_peak() -> None:
    trace = random_trace(11)
    (whole,), (late,) = (runs_of_snapshot(as_measured(trace, begin=begin)) for begin in (0, 60))

    assert late.timeline.allocated_at(late.timeline.peak_event) == whole.timeline.allocated_at(
        whole.timeline.peak_event
    )
