"""Temporaries, growth, idle memory, samples and flame graphs of small runs, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import MiB, as_measured, random_trace, training

from memfit.analysis.page import group_sums, merge_thin, sample, tree
from memfit.analysis.report import report_run
from memfit.analysis.run import Run, paths, run_of_trace, runs_of_snapshot
from memfit.analysis.summary import growth, idle_at, temporaries
from memfit.errors import InputError
from memfit.events import Trace
from memfit.replay.driver import Ranges
from memfit.replay.replay import replay
from memfit.replay.timeline import lifetimes
from memfit.snapshots.read import snapshot_of

# -- temporaries ----------------------------------------------------------------------------------------------------


def test_an_op_needs_what_is_alive_of_it_at_once_not_what_it_makes_in_all() -> None:
    trace = Trace()
    trace.mark("forward", 1)
    for _ in range(3):
        trace.free(trace.alloc(4 * MiB, op="mul"))
    a, b = trace.alloc(2 * MiB, op="mm"), trace.alloc(2 * MiB, op="mm")
    trace.free(a)
    trace.free(b)
    kept = trace.alloc(9 * MiB, op="mm")
    trace.mark("backward", 1)
    trace.free(kept)
    run = run_of_trace(trace)

    found = temporaries(run.timeline, run.labels, run.labels.ops, run.labels.op)

    figures = [(each.name, each.at_once_bytes, each.largest_bytes, each.count, each.total_bytes) for each in found]
    assert figures == [
        ("mul", 4 * MiB, 4 * MiB, 3, 12 * MiB), ("mm", 4 * MiB, 2 * MiB, 2, 4 * MiB),
    ]  # fmt: skip


def test_what_an_error_frees_is_not_temporary() -> None:
    recorder = training(10, layers=1, depth=1)
    code = [{"filename": "a.py", "line": 1, "name": "f"}]
    made = recorder.alloc(50 * MiB, code)
    recorder.out_of_memory(70 * MiB, code)
    recorder.free(made, code)
    (run,) = runs_of_snapshot(snapshot_of(recorder.snapshot()))

    found = temporaries(run.timeline, run.labels, run.labels.lines, run.labels.line)

    assert "a.py:1 f" not in {each.name for each in found}


# -- growth ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("leak", "grows"), [(0, False), (3 * MiB, True)])
def test_a_leak_is_what_every_step_leaves_behind(leak: int, grows: bool) -> None:
    (run,) = runs_of_snapshot(snapshot_of(training(3000, layers=2, depth=2, leak=leak).snapshot()))

    found = growth(run.timeline, run.labels)

    assert found.grows is grows
    assert found.per_step_bytes == leak
    assert [share.name for share in found.survivors] == (["train.py:44 log_loss"] if grows else [])


def test_two_steps_are_too_few_to_speak_of_growth() -> None:
    trace = Trace()
    for step in (1, 2):
        trace.mark("forward", step)
        trace.alloc(MiB)
        trace.mark("backward", step)
    run = run_of_trace(trace)

    assert (growth(run.timeline, run.labels).grows, len(growth(run.timeline, run.labels).steps)) == (None, 2)


# -- idle memory ----------------------------------------------------------------------------------------------------


def test_holes_are_counted_one_by_one() -> None:
    """The picture of docs/concepts.md: a segment of 60 MiB with three live blocks and three holes of 10."""
    trace = Trace()
    trace.free(trace.alloc(60 * MiB))
    six = [trace.alloc(10 * MiB) for _ in range(6)]
    for block in six[1::2]:
        trace.free(block)
    trace.free(trace.alloc(1))  # a small segment that is wholly idle

    idle = idle_at(replay(trace, places=True), len(trace) - 1)

    assert idle is not None
    assert (idle.reserved_bytes, idle.allocated_bytes, idle.idle_bytes) == (62 * MiB, 30 * MiB, 32 * MiB)
    assert (idle.holes, idle.largest_hole_bytes, idle.releasable_bytes) == (4, 10 * MiB, 2 * MiB)


def test_what_waits_for_another_stream_is_neither_allocated_nor_idle() -> None:
    trace = Trace()
    block = trace.alloc(30 * MiB)
    trace.free_requested(block)

    idle = idle_at(replay(trace, places=True), 1)

    assert idle is not None
    assert (idle.allocated_bytes, idle.waiting_bytes, idle.idle_bytes) == (0, 30 * MiB, 0)


def test_ranges_undo_what_they_did() -> None:
    held = Ranges([(0, 100, True), (200, 300, False)])
    for action, address, size in ((6, 400, 50), (8, 100, 20), (9, 40, 10), (7, 200, 100)):
        assert held.do(action, address, size)
    assert list(held) == [(0, 40, True), (50, 120, True), (400, 450, False)]
    for action, address, size in ((7, 200, 100), (9, 40, 10), (8, 100, 20), (6, 400, 50)):
        assert held.undo(action, address, size)

    assert list(held) == [(0, 100, True), (200, 300, False)]
    assert not held.do(6, 250, 10)  # held already
    assert not held.do(7, 500, 10)  # not held


# -- samples ---------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), limit=st.integers(4, 200))
def test_samples_keep_every_peak_of_a_stretch_and_the_groups_sum_to_the_whole(seed: int, limit: int) -> None:
    timeline = replay(random_trace(seed, 500))

    samples = sample(timeline, limit)

    assert len(samples.event) <= max(limit + 3, 4)
    assert int(samples.allocated.max()) == max(int(timeline.allocated.max()), timeline.allocated_before)
    assert (np.diff(samples.event) > 0).all()
    assert samples.allocated.tolist() == [timeline.allocated_at(event) for event in samples.event.tolist()]
    group = np.arange(len(timeline.size)) % 3
    assert group_sums(timeline, samples, group, 3).sum(axis=0).tolist() == samples.allocated.tolist()


def test_a_short_timeline_is_kept_whole() -> None:
    timeline = replay(random_trace(1, 60))

    assert sample(timeline).stride == 1


# -- the flame graph -------------------------------------------------------------------------------------------------


def test_the_flame_graph_of_a_prediction_goes_from_category_to_module_to_op() -> None:
    trace = Trace()
    trace.alloc(4 * MiB, category="weights", module="h.0.mlp", op="aten.empty")
    trace.alloc(6 * MiB, category="weights", module="h.1.mlp", op="aten.empty")
    run = run_of_trace(trace)

    root = tree(run, np.array([0, 1]))

    assert root.nbytes == 10 * MiB
    assert list(root.children["weights"].children["h"].children) == ["0", "1"]
    assert ("weights", "h", "1", "mlp", "aten.empty") in {path for path, _, _ in paths(run, np.array([0, 1]))}


def test_what_is_too_thin_to_see_is_put_together_and_nothing_is_lost() -> None:
    trace = Trace()
    trace.alloc(64 << 30, category="weights", module="big", op="x")
    for i in range(50):
        trace.alloc(512, category="weights", module=f"small{i}", op="x")
    run = run_of_trace(trace)
    blocks = np.arange(51)

    node = merge_thin(tree(run, blocks)).children["weights"]

    assert sorted(node.children) == ["50 smaller", "big"]
    assert sum(child.nbytes for child in node.children.values()) == node.nbytes


# -- the document ----------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 30), begin=st.integers(0, 200))
def test_the_parts_of_any_report_add_up_to_its_peak(seed: int, begin: int) -> None:
    for run in (*runs_of_snapshot(as_measured(random_trace(seed), begin=begin)), run_of_trace(random_trace(seed))):
        document = report_run(run)

        assert sum(document["breakdown"].values()) == document["peak"]["allocated_bytes"]
        assert document["peak"]["reserved_bytes"] >= document["peak"]["allocated_bytes"]
        assert document["peak"]["requested_bytes"] <= document["peak"]["allocated_bytes"]


def test_equal_allocations_of_many_layers_are_one_line_of_the_largest() -> None:
    trace = Trace()
    for layer in range(12):
        trace.alloc(9 * MiB, category="weights", module=f"h.{layer}.mlp", op="aten.empty")
    trace.alloc(80 * MiB, category="other")

    largest = report_run(run_of_trace(trace))["largest"]

    assert [(kind["count"], kind["each_bytes"] // MiB) for kind in largest] == [(1, 80), (12, 9)]
    assert largest[1]["allocated_bytes"] == 108 * MiB


def test_a_trace_that_frees_twice_is_refused() -> None:
    trace = Trace()
    block = trace.alloc(5)
    trace.free(block)
    trace.free(block)

    with pytest.raises(InputError, match="twice"):
        lifetimes(trace)


def test_a_trace_that_frees_before_it_allocates_is_refused() -> None:
    trace = Trace()
    block = trace.alloc(5)
    trace.free(block)
    trace.actions[0], trace.actions[1] = trace.actions[1], trace.actions[0]

    with pytest.raises(InputError, match="while it is not allocated"):
        lifetimes(trace)


def test_the_frames_of_a_run_that_was_cut_are_those_of_the_whole() -> None:
    from memfit.analysis.diff import one_step

    (run,) = runs_of_snapshot(snapshot_of(training(2500, layers=2, depth=2).snapshot()))
    part: Run = one_step(run, 2)

    assert part.rows is not None
    for block in range(0, len(part.timeline.size), 9):
        assert part.frames(block) == run.frames(int(part.rows[block]))
    assert part.timeline.peak_allocated <= run.timeline.peak_allocated
    assert (part.labels.phases[0].step, part.labels.phases[0].begin) == (1, 0)
