"""What can be changed about a job: which levers there are, in which order, and what they leave alone."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from forecasts import forecast

from memfit.errors import UnknownName, UsageError
from memfit.fitting.durations import step_cost
from memfit.fitting.forecast import Forecast, global_batch_of, with_global_batch
from memfit.fitting.levers import COMPILE, COSTS, Lever, apply, levers_for
from memfit.fitting.search import can_lower
from memfit.jobs.workload import Workload

JOBS = [
    Workload(kind="lora", model="gpt2", batch_size=4, grad_accum=2, attention="eager"),
    Workload(kind="train", model="gpt2", batch_size=6, precision="fp32", world_size=2),
    Workload(kind="train", model="gsa-512m-gather"),
    Workload(kind="forward", model="gpt2", batch_size=4, precision="fp32"),
    Workload(kind="generate", model="gpt2", batch_size=4, decoding="beam"),
    Workload(kind="prune", model="gpt2"),
]


def names(levers: list[Lever]) -> list[str]:
    return [lever.name for lever in levers]


def lever(work: Workload, name: str) -> Lever:
    return next(each for each in levers_for(work) if each.name == name)


@pytest.mark.parametrize("work", JOBS, ids=lambda work: work.kind)
def test_levers_come_cheapest_first(work: Workload) -> None:
    found = [COSTS.index(each.cost) for each in levers_for(work)]

    assert found == sorted(found)


@pytest.mark.parametrize("work", JOBS, ids=lambda work: work.kind)
def test_every_lever_changes_the_job_and_can_be_applied(work: Workload) -> None:
    assert len(levers_for(work)) >= 5
    for each in levers_for(work):
        assert apply(work, [each]) != work
        assert set(each.how) == {"memfit", "trainer", "accelerate"}


@pytest.mark.parametrize("work", [job for job in JOBS if job.trains], ids=lambda work: work.kind)
def test_no_lever_changes_the_global_batch(work: Workload) -> None:
    batches = {global_batch_of(apply(work, [each])) for each in levers_for(work)}
    assert batches == {global_batch_of(work)}


def test_what_is_on_already_is_no_lever() -> None:
    work = Workload(
        kind="lora", model="gpt2", loss="chunked", grad_checkpointing=True, optimizer="adamw-fused",
        adapter_dtype="same", alloc_conf="expandable_segments:True", offload=("activations", "optimizer", "weights"),
    )  # fmt: skip

    assert {each.group for each in levers_for(work)} <= {"fused optimizer", "sequence", "rank"}


def test_micro_batches_are_the_divisors_and_nothing_else() -> None:
    work = Workload(kind="train", model="gpt2", batch_size=6, grad_accum=2)

    rungs = [each.settings for each in levers_for(work) if each.group == "micro-batch"]

    assert rungs == [
        {"batch_size": 4, "grad_accum": 3}, {"batch_size": 3, "grad_accum": 4}, {"batch_size": 2, "grad_accum": 6},
        {"batch_size": 1, "grad_accum": 12},
    ]  # fmt: skip


def test_a_setting_that_is_kept_is_changed_by_no_lever() -> None:
    work = JOBS[0]

    left = levers_for(work, keep=("seq-len", "rank", "--precision", "grad_checkpointing"))

    assert {"sequence", "rank", "checkpointing"} & {each.group for each in left} <= {"checkpointing"}
    assert "checkpointing" not in names(left)


def test_a_setting_to_keep_that_does_not_exist_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(UnknownName, match="seq-lne") as told:
        levers_for(JOBS[0], keep=["seq-lne"])

    assert "seq-len" in str(told.value.hint)


def test_two_things_on_the_host_are_both_there() -> None:
    work = Workload(kind="lora", model="gpt2", offload=("weights",))

    both = apply(work, [lever(work, "activations on the host"), lever(work, "optimizer on the host")])

    assert both.offload == ("optimizer", "activations", "weights")


def test_expandable_segments_are_not_put_beside_what_cancels_them() -> None:
    work = Workload(kind="train", model="gpt2", alloc_conf="max_split_size_mb:128")

    assert "expandable segments" not in names(levers_for(work))


def at_peak(phase: str, **breakdown: int) -> Forecast:
    work = Workload(kind="train", model="gpt2")
    return forecast(work, "fails", 2 << 30, 1 << 30, breakdown, phase=phase, reserved=1 << 30)


def test_checkpointing_cannot_help_where_the_peak_is_the_optimizers_step() -> None:
    step = at_peak("step", weights=1 << 28, optimizer=1 << 29, temporaries=1 << 28)
    work = Workload(kind="train", model="gpt2")

    assert not can_lower(lever(work, "checkpointing"), step)
    assert can_lower(lever(work, "fused optimizer"), step)
    assert can_lower(lever(work, "optimizer on the host"), step)


def test_the_allocator_cannot_help_where_nothing_lies_idle() -> None:
    work = Workload(kind="train", model="gpt2")

    assert not can_lower(lever(work, "expandable segments"), at_peak("backward", activations=1 << 30))


def test_accumulation_follows_from_the_global_batch() -> None:
    work = with_global_batch(Workload(kind="lora", model="gpt2", batch_size=2, world_size=4), 256)

    assert (work.batch_size, work.grad_accum, global_batch_of(work)) == (2, 32, 256)


def test_a_micro_batch_that_does_not_divide_the_global_batch_is_refused_with_those_that_do() -> None:
    with pytest.raises(UsageError, match="--batch-size 3 does not divide 64") as told:
        with_global_batch(Workload(kind="lora", model="gpt2", batch_size=3, world_size=4), 256)

    assert "1, 2, 4, 8" in str(told.value.hint)


def test_252_rows_are_not_256() -> None:
    with pytest.raises(UsageError, match="is 252, not --global-batch 256"):
        with_global_batch(Workload(kind="train", model="gpt2", batch_size=3, grad_accum=21, world_size=4), 256)


def test_levers_are_known_without_torch() -> None:
    script = (
        "import sys; from memfit.fitting.levers import levers_for; from memfit.jobs.workload import Workload; "
        "levers_for(Workload(kind='lora', model='gpt2')); assert 'torch' not in sys.modules"
    )

    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_a_setting_of_another_kind_of_job_cannot_be_kept() -> None:
    with pytest.raises(UsageError, match="--keep rank has no effect: it is a setting of lora"):
        levers_for(Workload(kind="train", model="gpt2"), keep=["rank"])


@pytest.mark.parametrize("kind", ["forward", "lora", "generate"])
def test_a_base_model_in_8_and_4_bits_changes_the_numbers(kind: Any) -> None:
    found = {each.name: each for each in levers_for(Workload(kind=kind, model="gpt2")) if each.group == "quantised"}

    assert list(found) == ["8-bit weights", "4-bit weights"]
    assert {each.cost for each in found.values()} == {"precision"}
    assert apply(Workload(kind=kind, model="gpt2"), [found["4-bit weights"]]).quant == "nf4"


def test_kbit_preparation_can_be_left_out() -> None:
    prepared = Workload(kind="lora", model="gpt2", quant="nf4")
    (lever,) = (each for each in levers_for(prepared) if each.group == "kbit preparation")

    assert not apply(prepared, [lever]).is_kbit_prepared
    assert not [
        each for each in levers_for(apply(prepared, [lever])) if each.group in ("kbit preparation", "quantised")
    ]


# -- torch.compile -----------------------------------------------------------------------------------------------------


def test_compiling_is_a_lever_only_where_it_is_asked_for() -> None:
    work = Workload(kind="train", model="gpt2")
    assert COMPILE not in names(levers_for(work))
    (found,) = (each for each in levers_for(work, try_compile=True) if each.name == COMPILE)
    assert apply(work, [found]).compile
    assert (found.cost, "start-up" in found.price) == ("time", True)


@pytest.mark.parametrize("changes", [{"compile": True}, {"loss": "chunked"}, {"world_size": 2}])
def test_compiling_is_no_lever_beside_what_it_is_not_planned_with(changes: dict[str, Any]) -> None:
    work = Workload(kind="train", model="gpt2", **changes)
    assert COMPILE not in names(levers_for(work, try_compile=True))


def test_generation_is_not_compiled_to_make_it_fit() -> None:
    with pytest.raises(UsageError, match="--try-compile has no effect"):
        levers_for(Workload(kind="generate", model="gpt2"), try_compile=True)


def test_the_operations_of_a_compiled_step_are_those_of_the_step_as_written() -> None:
    plain = Workload(kind="forward", model="gpt2", batch_size=1, seq_len=16)
    assert step_cost(dataclasses.replace(plain, compile=True)) == step_cost(plain)
