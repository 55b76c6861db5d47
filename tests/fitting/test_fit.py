"""`fit`, with real predictions of small models: what it answers fits, and nothing in it is too much."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from forecasts import forecast
from support.quick import quick

import memfit
from memfit.analysis.verdict import RANGE
from memfit.errors import InputError, UsageError
from memfit.fitting.fit import Fitted, options
from memfit.fitting.forecast import ROUNDING, Forecast, Forecasts
from memfit.fitting.levers import COSTS, apply, levers_for
from memfit.gpus import find_gpu
from memfit.jobs.training.refusals import check_offload
from memfit.jobs.workload import Workload
from memfit.units import gib

pytestmark = pytest.mark.usefixtures("shared_traces")

GPU, LARGER = "1500MiB", "2100MiB"
SMALL = str(Path(__file__).with_name("gpt2_of_two_blocks"))
JOB: dict[str, Any] = {"kind": "train", "model": SMALL, "batch_size": 4, "seq_len": 512, "global_batch": 8}
"""3.1 GiB as it is."""


@cache
def fitted() -> Fitted:
    return memfit.fit(**JOB, gpu=GPU)


@cache
def kept() -> Fitted:
    return memfit.fit(**JOB, gpu=LARGER, keep=("loss", "batch-size", "optimizer", "offload"))


@cache
def many_changes() -> Fitted:
    return memfit.fit(**JOB, gpu="1700MiB", keep=("loss", "batch-size", "optimizer"))


def verdict(work: Workload, gpu: Any = GPU) -> str | None:
    return memfit.predict(work, gpu=gpu).verdict


def test_the_fitted_job_is_safe_by_a_plan_of_its_own() -> None:
    plan = memfit.predict(fitted().fitted, gpu=GPU)

    assert fitted().answer == "fits"
    assert plan.verdict == "safe"
    assert fitted().after.device_bytes == plan.peak.device_bytes


def test_the_job_as_it_is_does_not_fit() -> None:
    assert verdict(fitted().workload) == "fails"


MORE = pytest.param(many_changes, 5, marks=pytest.mark.slow)


@pytest.mark.parametrize(("answer", "count"), [(fitted, 2), (kept, 2), MORE], ids=["free hand", "some kept", "more"])
def test_without_any_one_of_its_changes_the_job_is_not_safe(answer: Any, count: int) -> None:
    changes = [change.lever for change in answer().changes]

    assert len(changes) >= count
    for left_out in changes:
        others = [lever for lever in changes if lever is not left_out]
        assert verdict(apply(answer().workload, others), answer().gpu) != "safe"


def test_the_proof_that_the_last_change_is_needed_is_stored() -> None:
    document = fitted().to_json()
    proof = document["without_last"]

    assert proof["change"] == document["changes"][-1]["name"]
    assert proof["verdict"] != "safe"
    assert verdict(Workload.from_mapping(proof["workload"])) == proof["verdict"]


def test_each_row_begins_where_the_one_before_it_ended() -> None:
    changes = kept().to_json()["changes"]

    ends = [change["after_bytes"] for change in changes]
    begins = [change["before_bytes"] for change in changes]
    assert begins == [kept().before.device_bytes, *ends[:-1]]


def test_the_peak_after_a_row_is_that_of_the_job_with_the_changes_so_far() -> None:
    first = fitted().changes[0]

    plan = memfit.predict(apply(fitted().workload, [first.lever]), gpu=GPU)
    assert abs(first.after.device_bytes - plan.peak.device_bytes) <= 2 << 20  # looked at with two micro-steps


def test_changes_come_cheapest_first() -> None:
    for answer in (fitted(), kept()):
        costs = [COSTS.index(change.lever.cost) for change in answer.changes]
        assert costs == sorted(costs)


def test_the_global_batch_is_the_same_in_the_answer_and_in_every_alternative() -> None:
    for work in (fitted().fitted, *(each.forecast.workload for each in fitted().alternatives)):
        assert work.batch_size * work.grad_accum * work.world_size == 8


def test_what_is_kept_stays_as_it_is() -> None:
    asked, answer = kept().workload, kept()

    for work in (answer.fitted, *(each.forecast.workload for each in answer.alternatives)):
        assert (work.loss, work.batch_size, work.optimizer) == (asked.loss, asked.batch_size, asked.optimizer)


def test_alternatives_fit_too_and_do_without_the_change_they_replace() -> None:
    assert fitted().alternatives
    for each in fitted().alternatives:
        assert each.forecast.fits
        assert each.instead_of not in [lever.name for lever in each.levers]


def test_the_same_question_has_the_same_answer() -> None:
    again = memfit.fit(**JOB, gpu=GPU).to_json()
    first = fitted().to_json()

    del again["seconds"], first["seconds"]
    assert again == first


def test_few_predictions_are_made() -> None:
    assert fitted().predictions <= 40


def test_a_job_that_fits_is_left_alone() -> None:
    answer = memfit.fit(**JOB, gpu="24GiB")

    assert (answer.answer, answer.changes, answer.fitted) == ("fits already", (), answer.workload)


def test_where_nothing_fits_the_nearest_set_and_the_card_for_it_are_told() -> None:
    answer = memfit.fit(**JOB, gpu="1GiB", keep=("offload", "seq_len", "precision"))

    assert answer.answer == "nothing fits"
    assert answer.after.device_bytes < answer.before.device_bytes
    least = answer.smallest_gpu_bytes
    assert least is not None
    enough = memfit.predict(answer.fitted, gpu=f"{least + (64 << 20)}B")
    assert enough.verdict != "fails"


def test_a_smaller_margin_asks_for_no_dearer_changes() -> None:
    tight = memfit.fit(**JOB, gpu=GPU, margin=0.0)

    def dear(answer: Fitted) -> list[int]:
        return [sum(change.lever.cost == cost for change in answer.changes) for cost in reversed(COSTS[1:])]

    assert dear(tight) <= dear(fitted())
    assert tight.fitted.batch_size >= fitted().fitted.batch_size


def test_levers_that_cannot_help_are_named_with_the_reason() -> None:
    """One short row: nearly all of the peak are weights, their gradients and moments."""
    answer = memfit.fit(kind="train", model=SMALL, batch_size=1, seq_len=16, gpu="1300MiB")

    aside = {each.name: each for each in answer.set_aside}
    assert answer.changes
    assert aside["checkpointing"].why == "would not help"
    assert "activations" in aside["checkpointing"].reason


def test_a_lever_whose_package_is_missing_is_named_and_not_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.fitting.levers.find_spec", lambda name: None)

    found = {lever.name: lever for lever in levers_for(Workload(kind="train", model="gpt2"))}

    assert found["8-bit AdamW"].missing == "bitsandbytes"


def test_a_smaller_micro_batch_never_takes_more() -> None:
    work = fitted().workload
    rungs = [lever for lever in levers_for(work) if lever.group == "micro-batch"]

    peaks = [memfit.predict(apply(work, [rung]), gpu=GPU).peak.allocated_bytes for rung in rungs]

    assert peaks == sorted(peaks, reverse=True)


def test_options_are_single_levers_the_best_saving_first() -> None:
    work = dataclasses.replace(fitted().workload, alloc_conf="expandable_segments:True", optimizer="adamw-fused")
    keep = ("seq_len", "offload", "batch_size")

    found = options(work, gpu=GPU, keep=keep)

    assert [each.saved_bytes for each in found] == sorted((each.saved_bytes for each in found), reverse=True)
    best = found[0]
    assert best.after.peak == memfit.predict(apply(work, [best.lever]), gpu=GPU).peak


def test_pruning_is_shown_beside_the_whole_model_on_the_card() -> None:
    answer = memfit.fit(kind="prune", model="gpt2-xl", nsamples=16, seq_len=512, gpu="2GiB")

    assert answer.answer == "fits already"
    assert answer.whole_model is not None
    assert answer.whole_model.plan.verdict == "fails"
    assert answer.after.use_bytes is not None
    assert answer.after.use_bytes <= 0.9 * find_gpu("2GiB").capacity_bytes


def test_what_the_public_code_takes_is_shown_beside_its_own_method_alone() -> None:
    answer = memfit.fit(kind="prune", model="gpt2", nsamples=2, seq_len=64, gpu="2GiB", method="magnitude")
    assert answer.whole_model is None


def test_generation_is_cut_into_smaller_batches() -> None:
    answer = memfit.fit(kind="generate", model=SMALL, batch_size=64, seq_len=512, new_tokens=8, gpu="1300MiB")

    assert [change.lever.group for change in answer.changes if change.lever.cost == "time"] == ["micro-batch"]
    assert 64 % answer.fitted.batch_size == 0


@pytest.mark.parametrize("margin", [-0.1, 1.0, True])
def test_a_margin_that_is_no_share_is_refused(margin: float) -> None:
    with pytest.raises(UsageError, match="--margin"):
        memfit.fit(**JOB, gpu=GPU, margin=margin)


def test_a_global_batch_is_for_training() -> None:
    with pytest.raises(UsageError, match="--global-batch"):
        memfit.fit(kind="forward", model="gpt2", global_batch=8, gpu=GPU)


def test_where_nothing_fits_a_card_is_named_on_which_it_does() -> None:
    answer = memfit.fit(**JOB, gpu="1GiB", keep=("offload", "seq_len", "precision"))

    assert answer.enough_gpu_bytes is not None
    again = memfit.fit(answer.fitted, gpu=f"{answer.enough_gpu_bytes}B")
    assert again.answer == "fits already"


def test_where_nothing_leaves_the_margin_the_one_that_is_left_fits() -> None:
    job: dict[str, Any] = {"kind": "forward", "model": "gpt2", "seq_len": 64, "gpu": "1050MiB"}
    keep = ("alloc_conf", "precision", "quant")
    answer = memfit.fit(**job, keep=keep)

    assert (answer.answer, answer.after.verdict) == ("nothing fits", "tight")
    assert answer.margin_left is not None
    assert f"--margin {answer.margin_left:g}" in str(answer)
    assert memfit.fit(**job, keep=keep, margin=answer.margin_left).fits


PRUNING: dict[str, Any] = {"kind": "prune", "model": "pythia-14m", "seq_len": 512, "nsamples": 16}


def test_a_card_too_small_for_one_block_is_an_answer_and_the_smallest_that_is_enough_is_told() -> None:
    answer = memfit.fit(**PRUNING, gpu="800MiB")

    assert answer.answer == "nothing fits"
    least = answer.smallest_gpu_bytes
    assert least is not None
    assert f"it needs {gib(least)} to run at all" in " ".join(str(answer).split())
    assert memfit.predict(**PRUNING, gpu=f"{least}B").verdict != "fails"
    with pytest.raises(InputError, match="a block of this model needs"):
        memfit.predict(**PRUNING, gpu=f"{least - (1 << 20)}B")


def test_what_pruning_asks_for_is_in_the_nearest_job_so_that_it_can_be_planned() -> None:
    answer = memfit.fit(**PRUNING, gpu="800MiB")

    plan = memfit.predict(answer.fitted, gpu=f"{answer.smallest_gpu_bytes}B")

    assert plan.peak.device_bytes == answer.after.device_bytes


def test_a_limit_that_was_asked_for_and_is_too_small_is_refused_in_its_own_words() -> None:
    with pytest.raises(InputError, match="a block of this model needs") as told:
        memfit.fit(**PRUNING, max_gpu_memory="100MiB", gpu="24GiB")
    assert "--max-gpu-memory" in str(told.value.hint)


def made_up(forecasts: Forecasts, work: Workload) -> Forecast:
    """As a plan comes to it, which takes a second for each."""
    check_offload(work, setting="--offload")
    total = {"none": 9520, "selective": 5000, "full": 2455 if "activations" not in work.offload else 2249}
    size, capacity = total[work.checkpointing] << 20, forecasts.gpu.capacity_bytes
    return forecast(work, "safe" if size <= capacity else "fails", size, capacity, {"activations": size})


@pytest.mark.parametrize(
    ("predicted", "model", "seq_len"),
    [(made_up, SMALL, 64), pytest.param(Forecasts._predicted, "gpt2", 1024, marks=pytest.mark.slow)],
)
def test_a_change_that_another_does_not_go_without_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch, predicted: Any, model: str, seq_len: int
) -> None:
    monkeypatch.setattr(Forecasts, "_predicted", predicted)
    keep = ("batch_size", "seq_len", "rank", "alloc_conf", "adapter_dtype", "optimizer")
    answer = memfit.fit(
        kind="lora", model=model, batch_size=12, seq_len=seq_len, world_size=2, parallel="fsdp2", loss="chunked",
        gpu="2250MiB", margin=0.0, keep=keep,
    )  # fmt: skip

    without = {change["name"]: change["without"] for change in answer.to_json()["changes"]}
    assert set(without) == {"checkpointing", "activations on the host"}
    assert "needs checkpointing" in without["checkpointing"]["refused"]
    assert without["checkpointing"]["verdict"] is None
    assert without["activations on the host"]["verdict"] == "fails"
    assert "does not go" in str(answer)


BOTH_WAYS = [("train", False), ("train", True), ("lora", False), ("lora", True)]


@pytest.mark.parametrize(("kind", "view"), quick([("train", True), ("lora", False)], BOTH_WAYS))
def test_a_process_alone_takes_no_more_than_one_of_ddp(kind: Any, view: bool) -> None:
    """What the search's bound rests on."""
    alone = Workload(kind=kind, model="pythia-14m", batch_size=2, seq_len=256, grad_accum=2)
    ddp = dataclasses.replace(alone, world_size=2, gradient_as_bucket_view=view)
    forecasts = Forecasts(find_gpu("8GiB"), 0.1)

    less, more = forecasts.ask(alone), forecasts.ask(ddp)

    assert less.peak.allocated_bytes - ROUNDING <= more.peak.allocated_bytes
    bound = forecasts.bound(ddp, less.peak.context_bytes)
    assert bound is not None
    assert bound.peak.allocated_bytes == less.peak.allocated_bytes
    assert forecasts.bound(ddp, more.device_bytes) is None


def test_smaller_batches_are_timed_over_all_the_rows() -> None:
    answer = memfit.fit(kind="forward", model="gpt2", batch_size=32, seq_len=512, gpu="2GiB")

    (change,) = [each for each in answer.changes if each.lever.group == "micro-batch"]
    assert change.time_before is not None
    assert change.time_after is not None
    assert change.time_after.figures["flops"] == change.time_before.figures["flops"]


def test_of_a_model_that_is_too_large_a_smaller_one_that_fits_is_named_however_much_smaller() -> None:
    answer = memfit.fit(kind="forward", model="llama-2-70b", seq_len=64, gpu="24GiB", keep=("seq_len",))

    assert answer.answer == "nothing fits"
    assert answer.smaller_model is not None
    name, forecast = answer.smaller_model
    assert forecast.fits
    assert memfit.predict(kind="forward", model=name, seq_len=64, gpu="24GiB").verdict == "safe"


def test_a_job_fits_into_what_its_process_is_allowed() -> None:
    job = {"kind": "forward", "model": "gpt2", "batch_size": 64, "seq_len": 512, "gpu": "H200"}
    limit = "per_process_memory_fraction:0.03"
    fitted = memfit.fit(**job, alloc_conf=limit)

    assert (memfit.fit(**job).answer, fitted.answer) == ("fits already", "fits")
    assert fitted.after.device_bytes < 0.03 * fitted.gpu.capacity_bytes + fitted.after.peak.context_bytes
    assert limit in fitted.fitted.alloc_conf
    assert any("per_process_memory_fraction leaves" in note for note in fitted.notes)


def test_pruning_plans_with_what_its_process_is_allowed() -> None:
    fitted = memfit.fit(
        kind="prune", model="llama-3.2-1b", gpu="H200", alloc_conf="per_process_memory_fraction:0.02"
    )  # of which 2.8 GiB and the context

    assert fitted.fits
    assert (fitted.fitted.gpu_budget_bytes or 0) < 0.02 * fitted.gpu.capacity_bytes


def test_a_search_and_its_smallest_card_count_what_the_card_may_yet_take() -> None:
    work = Workload(kind="forward", model=SMALL, batch_size=1, seq_len=64)

    def found(**ends: object) -> tuple[Forecast, int]:
        asked = Forecasts(find_gpu("H200"), 0.1)
        traced = asked._traced(work)
        traced.trace.facts.update({RANGE: ends} if ends else {})
        return asked.ask(work), asked.smallest_card(work)

    (before, least), more = found(), 100 << 20
    after, least_after = found(
        planned="padded", padded_bytes=0, most_bytes=more, padded_reserved_bytes=0, unpadded_reserved_bytes=0
    )
    assert least_after == least + more
    assert after.device_bytes == before.device_bytes + more == after.fit.device_bytes
