"""Two runs: what differs, and what of it explains the difference in peak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import DATA, MiB, as_measured, random_trace, save, training

from memfit.analysis.diff import REASONS, diff_files, diff_runs
from memfit.analysis.run import run_of_trace, runs_of_snapshot
from memfit.errors import InputError, UsageError
from memfit.events import Trace
from memfit.render.plan import as_text
from memfit.render.report import show_diff
from memfit.snapshots.read import snapshot_of


def a_step(**sizes: int) -> Trace:
    size = {"weight": 8, "activation": 30, "gradient": 8, "extra": 0, **sizes}
    trace = Trace()
    trace.mark("load")
    trace.alloc(size["weight"] * MiB, category="weights", module="h.0", op="empty")
    trace.mark("forward", 1)
    activation = trace.alloc(size["activation"] * MiB, category="activations", module="h.0", op="mm")
    if size["extra"]:
        trace.alloc(size["extra"] * MiB, category="temporaries", module="h.1", op="clone")
    trace.mark("backward", 1)
    trace.alloc(size["gradient"] * MiB, category="gradients", module="h.0", op="mm")
    trace.free(activation)
    return trace


def diff(a: Trace, b: Trace) -> dict[str, Any]:
    return diff_runs(run_of_trace(a), run_of_trace(b))


def reasons(document: dict[str, Any]) -> dict[str, int]:
    return {reason["reason"]: reason["difference_bytes"] // MiB for reason in document["explained"]}


def test_a_run_is_the_same_as_itself() -> None:
    document = diff(a_step(), a_step())

    assert document["same"]
    assert (document["explained"], document["places"], document["lifetimes"]) == ([], [], [])
    assert document["peak"]["allocated_bytes"]["difference"] == 0
    assert as_text(show_diff, document).startswith("the same: event by event")


def test_an_allocation_that_only_one_side_makes_explains_the_peak() -> None:
    document = diff(a_step(), a_step(extra=12))

    assert document["peak"]["allocated_bytes"]["difference"] == 12 * MiB
    assert reasons(document) == {"only_b": 12}
    (group,) = document["explained"][0]["largest"]
    assert group == {"name": "h.*  clone", "category": "temporaries", "difference_bytes": 12 * MiB, "count": 1}
    assert document["by_category"][0] == {"name": "temporaries", "a": 0, "b": 12 * MiB, "difference": 12 * MiB}


def test_the_other_way_round_it_has_the_other_sign() -> None:
    there, back = diff(a_step(), a_step(extra=12)), diff(a_step(extra=12), a_step())

    assert back["peak"]["allocated_bytes"]["difference"] == -there["peak"]["allocated_bytes"]["difference"]
    assert reasons(back) == {"only_a": -12}
    assert back["allocations"] == {"both": 3, "only_a": 1, "only_b": 0, "moved": 0}


def test_a_block_that_one_side_holds_longer_explains_the_peak() -> None:
    def made(early: bool) -> Trace:
        trace = Trace()
        x = trace.alloc(40 * MiB, op="x")
        if early:
            trace.free(x)
        trace.alloc(60 * MiB, op="y")
        if not early:
            trace.free(x)
        return trace

    document = diff(made(True), made(False))

    assert reasons(document) == {"longer_b": 40}
    (lifetime,) = document["lifetimes"]
    assert (lifetime["earlier"], lifetime["bytes"]) == ("a", 40 * MiB)


def test_peaks_at_different_moments_are_told_as_such() -> None:
    def made(first: int) -> Trace:
        trace = Trace()
        trace.mark("forward", 1)
        x = trace.alloc(first * MiB, op="x")
        trace.free(x)
        trace.mark("backward", 1)
        trace.alloc(50 * MiB, op="y")
        return trace

    document = diff(made(80), made(20))

    assert reasons(document) == {"only_a": -80, "earlier_b": 50}
    assert document["peak"]["allocated_bytes"]["difference"] == -30 * MiB
    assert (document["a"]["at_peak"]["phase"], document["b"]["at_peak"]["phase"]) == ("forward", "backward")


@settings(max_examples=25, deadline=None)
@given(a=st.integers(0, 1000), b=st.integers(0, 1000), begin=st.integers(0, 150))
def test_the_reasons_always_add_up_to_the_difference_of_the_peaks(a: int, b: int, begin: int) -> None:
    (measured,) = runs_of_snapshot(as_measured(random_trace(b, 250), begin=begin))
    for left, right in ((run_of_trace(random_trace(a, 250)), measured), (measured, run_of_trace(random_trace(b, 250)))):
        document = diff_runs(left, right)

        assert {reason["reason"] for reason in document["explained"]} <= set(REASONS)
        explained = sum(reason["difference_bytes"] for reason in document["explained"])
        assert explained == document["peak"]["allocated_bytes"]["difference"]
        by_category = sum(row["difference"] for row in document["by_category"])
        assert by_category == document["peak"]["allocated_bytes"]["difference"]
        json.dumps(document, allow_nan=False)


def test_a_measured_run_and_its_own_prediction_differ_in_nothing() -> None:
    trace = random_trace(7)
    (measured,) = runs_of_snapshot(as_measured(trace))

    document = diff_runs(run_of_trace(trace), measured)

    assert document["same"]
    assert document["peak"]["reserved_bytes"]["difference"] == 0


def test_a_block_without_a_category_takes_that_of_its_partner() -> None:
    trace = a_step()
    (measured,) = runs_of_snapshot(as_measured(trace))
    assert {row["name"] for row in diff_runs(measured, measured)["by_category"]} != {"weights", "activations"}

    document = diff_runs(run_of_trace(trace), measured)

    assert all(row["difference"] == 0 for row in document["by_category"])
    assert {row["name"] for row in document["by_category"]} == {"weights", "activations", "gradients"}


def test_one_step_of_each_is_compared_when_asked_for(tmp_path: Path) -> None:
    path = save(training(2500, layers=2, depth=2).snapshot(), tmp_path / "run.pickle")

    document = diff_files(path, path, step_a=2, step_b=3)

    assert document["same"]
    assert {row["step"] for row in document["by_phase"]} == {1}


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    path = save(training(2500, layers=2, depth=2).snapshot(), tmp_path / "run.pickle")

    with pytest.raises(UsageError, match="--step-b 99: there is no such step in it") as caught:
        diff_files(path, path, step_b=99)
    assert str(caught.value.hint).startswith("it has the steps 1 to ")


def test_a_part_of_a_run_compared_with_the_whole_says_how_to_do_it_better(tmp_path: Path) -> None:
    steps = Trace()
    for step in (1, 2, 3):
        for phase in ("forward", "backward"):
            steps.mark(phase, step)
            steps.free(steps.alloc(4 * MiB))
    steps.save(tmp_path / "three.npz")
    a_step().save(tmp_path / "one.npz")

    (said,) = diff_files(tmp_path / "one.npz", tmp_path / "three.npz")["next"]

    assert said == "a has 1 of 3 steps: compare one with one, such as --step-a 1 --step-b 2"


def test_logs_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("Timestamp,Checkpoint,GPU_Allocated_GB\n")

    with pytest.raises(InputError, match="is a memory log"):
        diff_files(tmp_path / "log.csv", DATA / "snap-oom.pickle")


def test_the_messages_of_both_sides_come_first() -> None:
    document = diff_files(DATA / "snap-oom.pickle", DATA / "snap-train.pickle")

    first, second, *_ = [line for line in as_text(show_diff, document).splitlines() if line.startswith("note on")]
    assert (first[:10], second[:10]) == ("note on a:", "note on b:")


def test_names_that_would_steer_a_terminal_do_not() -> None:
    a, b = Trace(), Trace()
    a.mark("\x1b[2Jphase", 1)
    a.alloc(MiB, op="\x1b[31mred\n", module="\x07", category="\x1b")
    b.alloc(3 * MiB, op="[bold]x[/bold]")

    text = as_text(show_diff, diff(a, b))

    assert "\x1b" not in text
    assert "[bold]x[/bold]" in text


def test_live_before_blocks_are_paired_by_size_whatever_their_order() -> None:
    def before(*sizes: int) -> dict[str, Any]:
        blocks = [
            {"size": size * MiB, "requested_size": size * MiB, "state": "active_allocated", "frames": []}
            for size in sizes
        ]
        total = sum(sizes) * MiB
        segment = {"device": 0, "address": 1 << 40, "total_size": total, "stream": 0, "blocks": blocks}
        return {"segments": [segment], "device_traces": []}

    (a,), (b,) = (runs_of_snapshot(snapshot_of(before(*sizes))) for sizes in ((2, 4, 6), (6, 2, 4)))

    assert diff_runs(a, b)["same"]


def shown(document: dict[str, Any]) -> list[str]:
    return [" ".join(line.split()) for line in as_text(show_diff, document).splitlines()]


def test_a_line_with_a_plus_is_what_only_b_makes_and_a_minus_what_only_a_makes() -> None:
    more, less = shown(diff(a_step(), a_step(extra=12))), shown(diff(a_step(extra=12), a_step()))

    assert more[0] == "b needs 12.00 MiB more than a at the peak"
    assert less[0] == "b needs 12.00 MiB less than a at the peak"
    assert "+ 12.00 MiB clone h.1 temporaries" in more and "- 12.00 MiB clone h.1 temporaries" in less
    assert any(line.startswith("+12.00 MiB 1 x only b makes these") for line in more)
    assert any(line.startswith("-12.00 MiB 1 x only a makes these") for line in less)


def freed(*, early: bool) -> Trace:
    trace = Trace()
    x = trace.alloc(40 * MiB, op="x")
    if early:
        trace.free(x)
    trace.alloc(60 * MiB, op="y")
    if not early:
        trace.free(x)
    return trace


def test_who_frees_earlier_is_said_with_the_other_side() -> None:
    assert any(line.endswith("earlier in a than in b") for line in shown(diff(freed(early=True), freed(early=False))))
    assert any(line.endswith("earlier in b than in a") for line in shown(diff(freed(early=False), freed(early=True))))


def test_a_partner_that_is_freed_by_the_very_event_of_the_peak_is_gone_at_it() -> None:
    """What the other run frees as its peak's own event is held longer by this one."""
    a, b = Trace(), Trace()
    for trace in (a, b):
        trace.alloc(64 * MiB, op="w")
        trace.alloc(32 * MiB, op="x")
        trace.alloc(16 * MiB, op="y")
    run_a, run_b = run_of_trace(a), run_of_trace(b)
    run_b.timeline.lives.death[1] = run_b.timeline.peak_event
    alive = run_b.timeline.lives.alive_at(run_b.timeline.peak_event).tolist()

    assert 1 not in alive
    assert reasons(diff_runs(run_a, run_b)) == {"longer_a": -32}


def test_a_partner_that_is_born_by_the_very_event_of_the_peak_is_there_at_it() -> None:
    assert reasons(diff(a_step(), a_step())) == {}
    document = diff(a_step(gradient=8), a_step(gradient=9))
    assert sum(reasons(document).values()) == 1
    assert set(reasons(document)) == {"only_a", "only_b"}


def test_making_a_batch_is_a_part_of_the_phase_that_follows_it() -> None:
    def trained(rows: int) -> Trace:
        trace = Trace()
        for step in (1, 2):
            trace.mark("data", step)
            batch = trace.alloc(rows * MiB, op="batch")
            trace.mark("forward", step)
            trace.free(trace.alloc(30 * MiB, op="mm"))
            trace.mark("backward", step)
            trace.free(batch)
        return trace

    document = diff(trained(4), trained(5))

    assert [place["phase"] for place in document["places"]] == ["forward 1", "forward 2"]


def before(*blocks: tuple[int, int]) -> dict[str, Any]:
    """A snapshot without history: what is asked for, and the block it lies in."""
    made = [
        {"size": size, "requested_size": asked, "state": "active_allocated", "frames": []} for asked, size in blocks
    ]
    segment = {
        "device": 0, "address": 1 << 40, "total_size": sum(size for _, size in blocks), "stream": 0, "blocks": made,
    }  # fmt: skip
    return {"segments": [segment], "device_traces": []}


def test_of_equal_requests_those_in_blocks_of_equal_size_are_a_pair() -> None:
    small, large = (3 * MiB, 3 * MiB), (3 * MiB, 4 * MiB)
    (a,), (b,) = (runs_of_snapshot(snapshot_of(before(*blocks))) for blocks in ((small, large), (large, small)))

    assert diff_runs(a, b)["explained"] == []
    (a,), (b,) = (runs_of_snapshot(snapshot_of(before(*blocks))) for blocks in ((small, small), (large, small)))
    assert reasons(diff_runs(a, b)) == {"block_size": 1}


def test_a_category_of_its_own_is_kept_beside_a_partner_s_other_one() -> None:
    a, b = Trace(), Trace()
    a.alloc(8 * MiB, category="weights", op="empty")
    b.alloc(8 * MiB, category="gradients", op="empty")
    names = {row["name"]: (row["a"], row["b"]) for row in diff(a, b)["by_category"]}

    assert names == {"weights": (8 * MiB, 0), "gradients": (0, 8 * MiB)}


def test_each_phase_has_the_figures_of_its_own_side() -> None:
    rows = {(row["name"], row["step"]): row["allocated_bytes"] for row in diff(a_step(), a_step(extra=12))["by_phase"]}

    assert rows["forward", 1] == {"a": 38 * MiB, "b": 50 * MiB, "difference": 12 * MiB}


def steps(count: int) -> Trace:
    trace = Trace()
    trace.alloc(MiB, category="weights")
    for step in range(1, count + 1):
        trace.mark("forward", step)
        trace.free(trace.alloc(step * MiB))
    return trace


def test_one_step_of_the_side_with_few_is_to_be_compared_with_the_second_of_the_other() -> None:
    (hint,) = diff(steps(1), steps(3))["next"]
    assert hint == "a has 1 of 3 steps: compare one with one, such as --step-a 1 --step-b 2"
    (hint,) = diff(steps(3), steps(1))["next"]
    assert hint == "b has 1 of 3 steps: compare one with one, such as --step-a 2 --step-b 1"
