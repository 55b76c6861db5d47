"""What a replayed trace says: literal traces in, the report's numbers out."""

from __future__ import annotations

import pytest

from memfit.analysis.labels import any_layer
from memfit.analysis.summary import LARGEST, LiveGroup, Moment, PhasePeak, Summary, idle_at, moment, summarise_plan
from memfit.events import CATEGORIES, Trace
from memfit.replay.replay import replay
from memfit.units import MiB


def report(trace: Trace) -> Summary:
    return summarise_plan(replay(trace))


def idle_when_most_is_reserved(trace: Trace) -> int:
    timeline = replay(trace, places=True)
    assert timeline.reserved_peak_event is not None
    idle = idle_at(timeline, timeline.reserved_peak_event)
    assert idle is not None
    return idle.idle_bytes


def forward() -> Trace:
    trace = Trace()
    trace.mark("forward", 1)
    return trace


def there_before(trace: Trace, nbytes: int, category: str = "") -> int:
    """A block without an ALLOC event: it was allocated before the first one."""
    block = trace.alloc(nbytes, category=category)
    trace.actions.pop()
    trace.subjects.pop()
    return block


def a_step() -> Trace:
    """Weights of 4 MiB, an activation of 30, a temporary of 14 on top of both, then a gradient of 4."""
    trace = Trace()
    trace.mark("load")
    trace.alloc(4 * MiB, category="weights", module="layers.0.up", op="aten._to_copy")
    trace.mark("forward", 1)
    activation = trace.alloc(30 * MiB, category="activations", module="layers.0.up", op="aten.mm")
    temporary = trace.alloc(14 * MiB, category="temporaries", module="layers.0.norm", op="aten.mul")
    trace.free(temporary)
    trace.mark("backward", 1)
    trace.alloc(4 * MiB, category="gradients", module="layers.0.up", op="aten.mm")
    trace.free(activation)
    return trace


# -- the peak ----------------------------------------------------------------------------------------------------


def test_the_peak_is_where_most_was_allocated() -> None:
    made = report(a_step())
    assert made.timeline.peak_allocated == 48 * MiB
    assert made.at_peak == Moment(event=4, phase="forward", step=1, module="layers.0.norm", op="aten.mul")


def test_the_breakdown_holds_every_category_and_sums_to_the_peak() -> None:
    made = report(a_step())
    assert tuple(made.breakdown) == CATEGORIES
    nonzero = {name: size // MiB for name, size in made.breakdown.items() if size}
    assert nonzero == {"weights": 4, "activations": 30, "temporaries": 14}
    assert sum(made.breakdown.values()) == made.timeline.peak_allocated


def test_blocks_count_with_the_size_that_they_took() -> None:
    trace = forward()
    trace.alloc(1, category="weights")
    trace.alloc(513, category="optimizer")
    made = report(trace)
    assert (made.breakdown["weights"], made.breakdown["optimizer"]) == (512, 1024)


@pytest.mark.parametrize("category", ["", "no category of ours"])
def test_what_has_no_known_category_is_other(category: str) -> None:
    trace = forward()
    trace.alloc(512, category=category)
    assert report(trace).breakdown["other"] == 512


def test_a_trace_without_marks_has_no_phases() -> None:
    trace = Trace()
    trace.alloc(512)
    assert (report(trace).phases, report(trace).timeline.peak_allocated) == ((), 512)


def test_an_empty_trace_has_a_peak_of_nothing() -> None:
    made = report(Trace())
    assert (made.timeline.peak_allocated, made.timeline.peak_reserved, made.phases, made.largest) == (0, 0, (), ())
    assert set(made.breakdown.values()) == {0}


def test_what_lies_idle_when_most_is_reserved_is_counted() -> None:
    trace = forward()
    first = trace.alloc(30 * MiB)
    trace.free(first)
    trace.alloc(40 * MiB)  # does not fit into the 30 that are free
    assert (replay(trace).peak_reserved, idle_when_most_is_reserved(trace)) == (70 * MiB, 30 * MiB)


# -- what was there before ---------------------------------------------------------------------------------------------


def test_blocks_that_were_there_before_are_alive_until_freed() -> None:
    trace = forward()
    before = there_before(trace, 4 * MiB, "weights")
    trace.alloc(2 * MiB, category="activations")
    trace.free(before)
    lives = replay(trace).lives
    assert [lives.alive_at(event).tolist() for event in (1, 2)] == [[0, 1], [1]]
    assert report(trace).breakdown["weights"] == 4 * MiB


def test_a_peak_before_the_first_event_has_no_moment_in_the_job() -> None:
    trace = Trace()
    before = there_before(trace, 30 * MiB, "weights")
    trace.free(before)
    trace.mark("forward", 1)
    trace.alloc(2 * MiB, category="activations", op="aten.mm")
    made = report(trace)
    assert (made.timeline.peak_allocated, made.breakdown["weights"]) == (30 * MiB, 30 * MiB)
    assert (made.at_peak.phase, made.at_peak.op) == ("", "")
    assert idle_when_most_is_reserved(trace) == 0


# -- groups ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "anywhere"),
    [
        ("model.layers.7.mlp", "model.layers.*.mlp"),
        ("model.layers.12", "model.layers.*"),
        ("h.0.experts.31.up", "h.*.experts.*.up"),
        ("layer7.mlp2", "layer7.mlp2"),
        ("", ""),
        ("0.weight", "0.weight"),
    ],
)
def test_numbers_of_blocks_are_left_out(module: str, anywhere: str) -> None:
    assert any_layer(module) == anywhere


def test_what_every_block_of_the_model_holds_is_one_group_largest_first() -> None:
    trace = forward()
    for layer in range(3):
        trace.alloc(2 * MiB, category="activations", module=f"layers.{layer}.mlp", op="aten.mm")
        trace.alloc(1024, category="activations", module=f"layers.{layer}.mlp", op="aten.mul")
    trace.alloc(4 * MiB, category="weights", module="layers.0.mlp", op="aten.mm")
    assert report(trace).largest == (
        LiveGroup("activations", "layers.*.mlp", "aten.mm", 3, 6 * MiB),
        LiveGroup("weights", "layers.*.mlp", "aten.mm", 1, 4 * MiB),
        LiveGroup("activations", "layers.*.mlp", "aten.mul", 3, 3072),
    )


def test_groups_of_the_same_size_come_in_the_order_of_their_names() -> None:
    trace = forward()
    for category, module, op in (("loss", "b", "x"), ("loss", "a", "y"), ("loss", "a", "x"), ("gradients", "c", "z")):
        trace.alloc(1024, category=category, module=module, op=op)
    assert [(group.category, group.module, group.op) for group in report(trace).largest] == [
        ("gradients", "c", "z"), ("loss", "a", "x"), ("loss", "a", "y"), ("loss", "b", "x"),
    ]  # fmt: skip


def test_only_so_many_groups_are_kept() -> None:
    trace = forward()
    for i in range(LARGEST + 2):
        trace.alloc(512 * (i + 1), op=f"op{i}")
    assert [group.op for group in report(trace).largest] == [f"op{i}" for i in range(LARGEST + 1, 1, -1)]


def test_what_is_freed_before_the_peak_is_in_no_group() -> None:
    trace = forward()
    trace.free(trace.alloc(512, op="gone"))
    trace.alloc(1024, op="there")
    assert [group.op for group in report(trace).largest] == ["there"]


# -- phases ------------------------------------------------------------------------------------------------------


def test_each_phase_has_its_own_peak() -> None:
    assert report(a_step()).phases == (
        PhasePeak("load", 0, 4 * MiB, 20 * MiB),
        PhasePeak("forward", 1, 48 * MiB, 50 * MiB),  # the 14 MiB lie in what the first segment has left
        PhasePeak("backward", 1, 38 * MiB, 50 * MiB),
    )


def test_a_phase_begins_with_what_is_there() -> None:
    trace = Trace()
    trace.mark("forward", 1)
    block = trace.alloc(4 * MiB)
    trace.mark("step", 1)
    trace.free(block)
    assert report(trace).phases[1] == PhasePeak("step", 1, 4 * MiB, 20 * MiB)


def test_micro_batches_of_a_step_are_one_phase_with_the_higher_peak() -> None:
    trace = Trace()
    for size in (2 * MiB, 6 * MiB, 4 * MiB):
        trace.mark("forward", 1)
        block = trace.alloc(size)
        trace.mark("backward", 1)
        trace.free(block)
    trace.mark("forward", 2)
    assert [(p.name, p.step, p.allocated_bytes // MiB) for p in report(trace).phases] == [
        ("forward", 1, 6), ("backward", 1, 6), ("forward", 2, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("quiet", ["data", "zero"])
def test_what_happens_between_phases_is_not_shown(quiet: str) -> None:
    trace = Trace()
    trace.mark(quiet, 1)
    trace.alloc(4 * MiB)
    assert report(trace).phases == ()
    assert report(trace).timeline.peak_allocated == 4 * MiB


def test_a_moment_is_in_the_phase_that_was_marked_last() -> None:
    made = report(a_step())
    load, forward, gradient, free = (moment(made.timeline, made.labels, event) for event in (1, 3, 7, 8))
    assert (load.phase, forward.phase) == ("load", "forward")
    assert gradient == Moment(7, "backward", 1, "layers.0.up", "aten.mm")
    assert free == Moment(8, "backward", 1, "", "")  # a free makes nothing
