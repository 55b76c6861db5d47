"""Two runs that differ in one thing each: which side, which moment, which pair, and the signs on screen."""

from __future__ import annotations

from typing import Any

from made import MiB
from test_diff import a_step, diff, reasons

from memfit.analysis.diff import diff_runs
from memfit.analysis.run import run_of_trace, runs_of_snapshot
from memfit.events import Trace
from memfit.render.plan import as_text
from memfit.render.report import show_diff
from memfit.snapshots.read import snapshot_of


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
