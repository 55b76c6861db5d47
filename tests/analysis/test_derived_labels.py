"""What a stack and a lifetime tell of an allocation, and what they do not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from made import LOADING, MAIN, OPTIMIZER, MiB, Recorder, frame, training

from memfit.analysis.labels import ALL_CATEGORIES
from memfit.analysis.run import Run, runs_of_snapshot
from memfit.analysis.stacks import (
    BEFORE_RECORDING,
    NO_PYTHON,
    NOISE,
    Work,
    code_line,
    derived_phases,
    short_path,
    work_of,
)
from memfit.snapshots.read import snapshot_of
from memfit.snapshots.schema import Frame

CODE = [frame("site-packages/torch/nn/functional.py", 9, "linear"), frame("/home/me/gpt/model.py", 3, "up"), *MAIN]
LOSS = [frame("site-packages/torch/nn/functional.py", 3000, "cross_entropy"), *MAIN]


def run_of(raw: dict[str, Any]) -> Run:
    (run,) = runs_of_snapshot(snapshot_of(raw))
    return run


def a_step() -> Recorder:
    """A weight, an activation, temporaries, the loss, gradients, an optimizer's state; all but two are freed again."""
    recorder = Recorder()
    recorder.alloc(4 * MiB, LOADING)
    for _ in range(NOISE):
        recorder.free(recorder.alloc(1 * MiB, CODE), CODE)
    activation = recorder.alloc(30 * MiB, CODE)
    loss = recorder.alloc(2 * MiB, LOSS)
    gradients = [recorder.alloc(5 * MiB, []) for _ in range(NOISE)]
    recorder.free(recorder.alloc(6 * MiB, []), [])
    recorder.free(activation, [])
    recorder.free(loss, [])
    recorder.alloc(8 * MiB, OPTIMIZER)
    for _ in range(NOISE):
        recorder.free(recorder.alloc(3 * MiB, OPTIMIZER), OPTIMIZER)
    for made in gradients:
        recorder.free(made, MAIN)
    return recorder


def categories(run: Run) -> list[tuple[int, str]]:
    return [
        (requested // MiB, ALL_CATEGORIES[number])
        for requested, number in zip(run.trace.requested, run.labels.category.tolist(), strict=True)
    ]


def test_a_recorded_step_has_the_categories_that_a_prediction_would_have() -> None:
    found = categories(run_of(a_step().snapshot()))

    assert found == [
        (4, "weights"), *[(1, "temporaries")] * NOISE, (30, "activations"), (2, "loss"), *[(5, "gradients")] * NOISE,
        (6, "temporaries"), (8, "optimizer"), *[(3, "temporaries")] * NOISE,
    ]  # fmt: skip


def test_a_recorded_step_shows_its_phases() -> None:
    phases = run_of(a_step().snapshot()).labels.phases

    assert [(phase.name, phase.step) for phase in phases] == [
        ("load", 0), ("forward", 1), ("backward", 1), ("step", 1),
    ]  # fmt: skip
    assert phases[0].begin == 0
    assert all(before.end == after.begin for before, after in pairwise(phases))


def test_steps_are_counted_by_the_optimizer() -> None:
    phases = run_of(training(3000, layers=2, depth=2).snapshot()).labels.phases

    steps = [phase.step for phase in phases if phase.name == "step"]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 3


def test_without_a_backward_pass_nothing_is_called_a_forward_pass() -> None:
    recorder = Recorder()
    recorder.alloc(MiB, CODE)
    labels = run_of(recorder.snapshot()).labels

    assert (labels.phases, labels.phase_source, labels.source) == ((), "none", "none")
    assert [ALL_CATEGORIES[i] for i in labels.category] == ["unknown"]


def test_without_stacks_nothing_is_derived() -> None:
    recorder = Recorder()
    recorder.free(recorder.alloc(MiB, []), [])
    run = run_of(recorder.snapshot())

    assert not run.labels.stacks
    assert (run.labels.source, run.labels.phases) == ("none", ())
    assert "no_stacks" in {message.kind for message in run.messages}


def test_what_was_there_before_is_told_apart_from_what_the_backward_pass_made() -> None:
    raw = a_step().snapshot()
    raw["device_traces"][0] = raw["device_traces"][0][2:]  # the weight's segment and its allocation
    run = run_of(raw)

    lines = {run.labels.lines[i] for i in run.labels.line.tolist()}
    assert {BEFORE_RECORDING, NO_PYTHON, "me/gpt/model.py:3 up"} <= lines
    assert categories(run)[0] == (4, "unknown")


def test_a_category_that_the_recorder_noted_wins_over_a_derived_one() -> None:
    raw = a_step().snapshot()
    first = next(event for event in raw["device_traces"][0] if event["action"] == "alloc")
    first["category"] = "kv_cache"
    run = run_of(raw)

    assert categories(run)[0] == (4, "kv_cache")
    assert run.labels.source == "both"


def test_what_a_program_says_of_an_allocation_stands_where_a_module_would() -> None:
    recorder = Recorder()
    recorder.alloc(MiB, CODE)
    recorder.events[-1]["user_metadata"] = "decoder block 7"
    run = run_of(recorder.snapshot())

    assert run.trace.module(0) == "decoder block 7"


def test_the_optimizer_is_known_by_torchs_own_scope_even_without_its_frames() -> None:
    recorder = a_step()
    for event in recorder.events:
        if event["frames"] is OPTIMIZER:
            event["frames"] = CODE
    raw = recorder.snapshot()
    times = [event["time_us"] for event in raw["device_traces"][0] if event["size"] in (8 * MiB, 3 * MiB)]
    raw["external_annotations"] = [
        {"name": "Optimizer.step#AdamW.step", "stage": stage, "device": 0, "time_us": time}
        for stage, time in (("START", times[0]), ("END", times[-1] + 1))
    ]

    assert [phase.name for phase in run_of(raw).labels.phases] == ["load", "forward", "backward", "step"]


# -- one stack ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "work"),
    [
        ([], Work.BACKWARD),
        ([Frame("??", 0, "c10::alloc")], Work.BACKWARD),
        ([Frame("site-packages/torch/optim/adam.py", 1, "step"), Frame("t.py", 1, "<module>")], Work.OPTIMIZER),
        ([Frame("site-packages/torch/autograd/__init__.py", 1, "backward"), Frame("t.py", 1, "f")], Work.BACKWARD),
        ([Frame("t.py", 1, "f"), Frame("site-packages/torch/autograd/function.py", 1, "apply")], Work.BACKWARD),
        ([Frame("t.py", 1, "f")], Work.OTHER),
        ([Frame("site-packages/torch/nn/modules/linear.py", 1, "__init__"), Frame("t.py", 1, "f")], Work.LOADING),
        ([Frame("m.py", 1, "from_pretrained")], Work.LOADING),
        ([Frame("site-packages/torch/nn/modules/loss.py", 1, "forward")], Work.LOSS),
        ([Frame("myoptim/adam.py", 1, "step")], Work.OTHER),
    ],
)
def test_a_stack_says_which_work_it_was(frames: list[Frame], work: Work) -> None:
    assert work_of(frames) == work


def test_a_hook_of_the_backward_pass_runs_in_another_thread_and_belongs_to_it() -> None:
    assert work_of([Frame("hooks.py", 3, "clip")], other_thread=True) == Work.BACKWARD


def test_the_line_is_the_innermost_one_outside_torch_and_never_of_cpp() -> None:
    frames = [Frame("??", 0, "at::empty"), Frame("x/torch/nn/functional.py", 1, "linear"), Frame("my/net.py", 7, "up")]

    assert code_line(frames) == "my/net.py:7 up"
    assert code_line(frames[:2]) == "torch/nn/functional.py:1 linear"
    assert code_line(frames[:1]) == ""


def test_paths_are_shortened_to_what_tells_them_apart() -> None:
    assert short_path("/usr/lib/python3/site-packages/transformers/m.py") == "transformers/m.py"
    assert short_path("/home/me/work/project/train.py") == "work/project/train.py"
    assert short_path("C:\\me\\train.py") == "C:/me/train.py"
    assert short_path("train.py") == "train.py"


def test_a_few_allocations_of_another_kind_do_not_break_a_phase() -> None:
    import numpy as np

    kinds = [Work.OTHER] * 9 + [Work.BACKWARD] * 2 + [Work.OTHER] * 9 + [Work.BACKWARD] * 9
    phases = derived_phases(np.arange(len(kinds)), np.array(kinds, dtype=np.int64), 40)

    assert [(phase.name, phase.begin, phase.end) for phase in phases] == [("forward", 0, 20), ("backward", 20, 40)]
