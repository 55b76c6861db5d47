"""A workload in, a plan out: the JSON that other tools read, the verdict, and what a plan refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from plans import plan, small_llama, usual_plan

import memfit
from memfit.errors import MemfitError, TraceError, UnknownName, UsageError
from memfit.events import CATEGORIES
from memfit.gpus import Context, Gpu, find_gpu
from memfit.jobs.workload import Workload
from memfit.planning.predict import Plan, assess
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.replay import replay
from memfit.units import MiB, gib

KINDS = pytest.mark.parametrize("kind", ["forward", "train", "lora", "generate"])

# -- the JSON contract (memfit.plan/1) ---------------------------------------------------------------------------------

KEYS = [
    "schema", "id", "workload", "model", "gpu", "peak", "context", "at_peak", "breakdown", "phases", "verdict",
    "headroom_bytes", "retries", "failed_at", "smallest_gpu_bytes", "largest", "duration", "how", "notes",
    "seconds",
]  # fmt: skip


@KINDS
def test_the_document_has_the_keys_of_the_contract_in_its_order(kind: str) -> None:
    document = usual_plan(kind).to_json()
    assert list(document) == KEYS
    assert {key: list(document[key]) for key in ("model", "gpu", "peak", "context", "at_peak", "breakdown")} == {
        "model": ["name", "parameters", "trainable_parameters"],
        "gpu": ["name", "capacity_bytes"],
        "peak": ["allocated_bytes", "reserved_bytes", "context_bytes", "device_bytes"],
        "context": ["low_bytes", "high_bytes", "basis", "source"],
        "at_peak": ["phase", "step", "module", "op"],
        "breakdown": list(CATEGORIES),
    }
    assert all(list(phase) == ["name", "step", "allocated_bytes", "reserved_bytes"] for phase in document["phases"])


@KINDS
def test_the_document_is_json_without_nan(kind: str) -> None:
    document = usual_plan(kind).to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document


@KINDS
def test_the_values_have_the_types_of_the_contract(kind: str) -> None:
    document = usual_plan(kind).to_json()
    sizes = [
        *document["peak"].values(), *document["breakdown"].values(), document["headroom_bytes"],
        document["smallest_gpu_bytes"], document["gpu"]["capacity_bytes"], document["model"]["parameters"],
        document["model"]["trainable_parameters"], document["at_peak"]["step"],
        *(value for phase in document["phases"] for key, value in phase.items() if key != "name"),
    ]  # fmt: skip
    assert {type(size) for size in sizes} == {int}
    assert document["schema"] == "memfit.plan/1"
    assert document["verdict"] in ("safe", "tight", "fails")
    assert all(isinstance(note, str) for note in document["notes"])
    assert isinstance(document["seconds"], float)
    words = [*document["at_peak"].values(), document["model"]["name"], document["gpu"]["name"]]
    assert {type(word) for word in words} == {str, int}


@KINDS
def test_the_breakdown_sums_to_the_allocated_peak(kind: str) -> None:
    document = usual_plan(kind).to_json()
    assert sum(document["breakdown"].values()) == document["peak"]["allocated_bytes"]


@KINDS
def test_the_device_holds_what_is_reserved_and_the_context(kind: str) -> None:
    peak = usual_plan(kind).to_json()["peak"]
    assert peak["device_bytes"] == peak["reserved_bytes"] + peak["context_bytes"]
    assert peak["reserved_bytes"] >= peak["allocated_bytes"] > 0 < peak["context_bytes"]


@KINDS
def test_the_peak_is_that_of_its_highest_phase(kind: str) -> None:
    document = usual_plan(kind).to_json()
    at = document["at_peak"]
    peaks = {(p["name"], p["step"]): p["allocated_bytes"] for p in document["phases"]}
    assert max(peaks.values()) == peaks[at["phase"], at["step"]] == document["peak"]["allocated_bytes"]
    assert max(p["reserved_bytes"] for p in document["phases"]) == document["peak"]["reserved_bytes"]


@pytest.mark.parametrize(
    ("kind", "settings", "phases"),
    [
        ("forward", {}, ["forward"]),
        ("train", {}, ["forward", "backward", "step"]),
        ("train", {"clip_grad": True, "grad_accum": 2}, ["forward", "backward", "clip", "step"]),
        ("lora", {"grad_checkpointing": True}, ["forward", "backward", "step"]),
    ],
)
def test_loading_and_three_steps_are_planned(kind: str, settings: dict[str, Any], phases: list[str]) -> None:
    found = [(p["name"], p["step"]) for p in plan(kind, **settings).to_json()["phases"]]
    assert found == [("load", 0), *((name, step) for step in (1, 2, 3) for name in phases)]


def test_every_setting_is_shown_as_resolved() -> None:
    shown = usual_plan("lora").to_json()["workload"]
    assert shown["gpu"] == "H200"
    assert shown["optimizer"] == "adamw"
    assert shown["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert (shown["batch_size"], shown["seq_len"], shown["precision"]) == (4, 128, "bf16")


@pytest.mark.parametrize("given", [None, 7, "row 3", {"line": 4}])
def test_an_id_is_passed_through(given: object) -> None:
    made = usual_plan("forward")
    assert replace(made, id=given).to_json()["id"] == given
    assert made.to_json()["id"] is None


def test_an_id_reaches_the_plan() -> None:
    assert plan("forward", id="row 3").to_json()["id"] == "row 3"


def test_without_a_card_nothing_is_said_of_fitting() -> None:
    document = plan("forward").to_json()
    assert {document[key] for key in ("gpu", "verdict", "headroom_bytes", "retries", "failed_at")} == {None}
    assert document["smallest_gpu_bytes"] > 0
    assert any("H200" in note for note in document["notes"])


def test_every_plan_says_that_it_is_a_prediction() -> None:
    assert any("predicted, not measured" in note for note in usual_plan("train").notes)


def test_what_was_assumed_of_an_estimated_card_is_said() -> None:
    assert set(find_gpu("24GB").notes) <= set(plan("forward", gpu="24GB").notes)


def test_a_plan_made_twice_is_the_same() -> None:
    first, second = (plan("train", gpu="RTX 4090").to_json() | {"seconds": 0} for _ in range(2))
    assert first == second


def test_predict_is_the_public_name() -> None:
    made = memfit.predict(kind="forward", model=small_llama(), batch_size=1, seq_len=16)
    assert isinstance(made, memfit.Plan)


def test_a_workload_may_be_given_as_such() -> None:
    work = Workload(kind="forward", model=small_llama(), batch_size=4, seq_len=128)
    assert memfit.predict(work, gpu="H200").peak == usual_plan("forward").peak


# -- what is in the peak -----------------------------------------------------------------------------------------------


def rounded(elements: int, size: int) -> int:
    return -(-elements * size // 512) * 512


def parameters(size: int) -> int:
    """Of the small Llama, in blocks: embedding; q, k, v, o, gate, up, down and two norms of each layer; a last norm."""
    shapes = [512 * 128, *3 * [*4 * [128 * 128], *3 * [128 * 256], 128, 128], 128]
    return sum(rounded(n, size) for n in shapes)


ROTARY = 2 * 512
"""16 frequencies in fp32, twice: as used and as they were at first."""


def test_weights_are_the_parameters_and_buffers_in_blocks() -> None:
    assert usual_plan("forward").report.breakdown["weights"] == parameters(2) + ROTARY
    assert plan("forward", precision="fp32").report.breakdown["weights"] == parameters(4) + ROTARY


def test_autocast_keeps_the_weights_in_fp32() -> None:
    assert plan("forward", precision="amp-bf16").report.breakdown["weights"] == parameters(4) + ROTARY


def test_a_forward_pass_has_no_gradients_and_no_optimizer() -> None:
    breakdown = usual_plan("forward").report.breakdown
    assert (breakdown["gradients"], breakdown["optimizer"], breakdown["workspaces"]) == (0, 0, 32 * MiB)


def held(made: Plan, category: str, phase: str) -> int:
    """The most that blocks of a category hold while a phase of the last step runs."""
    timeline, trace = made.timeline, made.trace
    live = most = 0
    inside = False
    for action, subject in trace.events():
        if action == 5:
            inside = (trace.marks[subject].phase, trace.marks[subject].step) == (phase, 3)
        elif trace.category(subject) == category:
            live += int(timeline.size[subject]) * {0: 1, 1: -1}[action]
        most = max(most, live) if inside else most
    return most


@pytest.mark.parametrize(("optimizer", "per_parameter"), [("adamw", 2), ("sgd", 0)])
def test_the_optimizer_keeps_its_state_in_the_weights_dtype(optimizer: str, per_parameter: int) -> None:
    made = plan("train", optimizer=optimizer)
    assert held(made, "optimizer", "forward") == per_parameter * parameters(2)


def test_momentum_is_a_state_of_sgd_and_its_weight_decay_a_copy_of_the_gradients() -> None:
    plain, heavy = plan("train", optimizer="sgd"), plan("train", optimizer="sgd", momentum=0.9)
    assert held(heavy, "optimizer", "forward") == parameters(2)
    decayed = plan("train", optimizer="sgd", weight_decay=0.1)
    assert held(decayed, "optimizer", "forward") == 0
    at_step = [
        each for made in (plain, decayed) for each in made.report.phases if (each.name, each.step) == ("step", 3)
    ]
    without, copied = (each.allocated_bytes for each in at_step)
    assert copied - without == parameters(2)


def test_decay_of_adamw_takes_nothing_and_momentum_is_not_of_it() -> None:
    decayed = plan("train", optimizer="adamw", weight_decay=0.1)
    assert decayed.peak == plan("train", optimizer="adamw").peak
    assert "--weight-decay 0.1 does not change the memory of adamw" in decayed.notes
    with pytest.raises(UsageError, match=r"--momentum 0\.9 has no effect: it is of sgd, not of adamw"):
        plan("train", optimizer="adamw", momentum=0.9)


@pytest.mark.parametrize("loop", ["trainer", "memfit"])
def test_the_loops_of_the_trainer_and_of_memfit_train_have_both(loop: str) -> None:
    usual, both = (
        plan("train", optimizer="sgd", loop=loop, **more) for more in ({}, {"momentum": 0.9, "weight_decay": 0.1})
    )
    assert both.peak.allocated_bytes - usual.peak.allocated_bytes >= parameters(2)


def test_gradients_are_as_large_as_what_is_trained() -> None:
    assert held(usual_plan("train"), "gradients", "step") == parameters(2)


def test_adapters_have_gradients_and_state_in_fp32_and_the_base_has_none() -> None:
    made = plan("lora", rank=8)
    square, up, down = (128, 128), (128, 256), (256, 128)
    shapes = 3 * [*4 * [square], up, up, down]
    adapters = sum(rounded(8 * side, 4) for shape in shapes for side in shape)
    assert held(made, "gradients", "step") == adapters
    assert held(made, "optimizer", "forward") == 2 * adapters
    assert made.report.breakdown["weights"] == parameters(2) + ROTARY + adapters
    assert made.trainable_parameters == sum(8 * side for shape in shapes for side in shape)


def test_checkpointing_keeps_fewer_activations() -> None:
    plain, checkpointed = (plan("train", grad_checkpointing=on, batch_size=16) for on in (False, True))
    assert held(checkpointed, "activations", "forward") < held(plain, "activations", "forward") / 4
    assert checkpointed.peak.allocated_bytes < plain.peak.allocated_bytes


def test_accumulating_holds_gradients_through_the_next_forward() -> None:
    assert held(plan("train", grad_accum=2), "gradients", "forward") == parameters(2)
    assert held(usual_plan("train"), "gradients", "forward") == 0


def test_a_card_has_its_own_kernels() -> None:
    assert usual_plan("train").report.breakdown["workspaces"] == 2 * 32 * MiB
    assert plan("train", gpu="RTX 4090").report.breakdown["workspaces"] == 2 * 8_519_680


def test_without_a_card_the_context_is_assumed_and_on_the_h200_it_is_measured() -> None:
    assumed, measured, estimated = (plan("train", gpu=gpu).context for gpu in (None, "H200", "T4"))

    assert (assumed.basis, measured.basis, estimated.basis) == ("assumed", "measured", "estimated")
    assert assumed.low_bytes == assumed.high_bytes == measured.high_bytes == measured.low_bytes
    assert estimated.low_bytes < estimated.high_bytes
    assert "1,934 bytes for each of 40,960 resident threads" in estimated.source


def test_the_verdict_on_a_card_whose_context_is_estimated_counts_the_upper_end() -> None:
    made = plan("train", gpu="T4")
    fit = made.fit
    assert fit is not None

    assert made.peak.device_bytes == made.peak.reserved_bytes + made.peak.context_bytes == fit.device_bytes
    assert made.headroom_bytes == find_gpu("T4").capacity_bytes - made.peak.device_bytes
    assert any("is estimated, and the upper end counts" in note for note in made.notes)


# -- does it fit -------------------------------------------------------------------------------------------------------


def card(capacity: int) -> Gpu:
    return replace(find_gpu("H200"), capacity_bytes=capacity)


def on(made: Plan, capacity: int) -> Plan:
    """The same traced job, on a card of another size."""
    context = Context(made.peak.context_bytes, made.peak.context_bytes, "measured")
    return assess(
        made.trace,
        AllocatorConfig.parse(made.workload["alloc_conf"]),
        card(capacity),
        context,
        started=0.0,
        how=made.how,
        notes=(),
        workload=made.workload,
        model=made.model,
        parameters=0,
        trainable_parameters=0,
    )


@pytest.fixture(scope="module")
def job() -> Plan:
    """Large enough for fragmentation: what is reserved goes well beyond the least it can do with."""
    return plan("train", batch_size=32, seq_len=512, gpu="H200")


def test_the_smallest_card_fits_tightly(job: Plan) -> None:
    made = on(job, job.smallest_gpu_bytes)
    assert made.verdict == "tight"
    assert made.headroom_bytes is not None and 0 <= made.headroom_bytes <= 2 * MiB


def test_two_percent_less_than_the_smallest_card_fails(job: Plan) -> None:
    assert on(job, int(0.98 * job.smallest_gpu_bytes)).verdict == "fails"


def test_two_percent_more_than_the_smallest_card_fits(job: Plan) -> None:
    assert on(job, int(1.02 * job.smallest_gpu_bytes)).verdict == "tight"


def test_a_verdict_comes_from_a_replay_not_from_a_comparison(job: Plan) -> None:
    """What is reserved with room to spare does not fit into the smallest card, and yet the job does."""
    assert job.smallest_gpu_bytes < job.peak.device_bytes
    made = on(job, job.smallest_gpu_bytes)
    assert made.fit is not None and made.fit.retries > 0
    assert made.peak == job.peak
    assert any("gives cached memory back" in note for note in made.notes)
    assert replay(job.trace, capacity=job.smallest_gpu_bytes - job.peak.context_bytes).oom is None


def test_at_most_nine_tenths_of_a_card_are_safe_and_more_is_tight(job: Plan) -> None:
    enough = -(-job.peak.device_bytes * 10 // 9)
    assert on(job, enough).verdict == "safe"
    assert on(job, enough - 4).verdict == "tight"


def test_headroom_is_what_is_left_or_what_is_missing(job: Plan) -> None:
    room, lacking = on(job, job.peak.device_bytes + 7 * MiB), on(job, job.smallest_gpu_bytes - 64 * MiB)
    assert room.to_json()["headroom_bytes"] == 7 * MiB
    assert lacking.to_json()["headroom_bytes"] == -64 * MiB


def test_a_plan_that_fails_says_where_and_one_that_fits_does_not(job: Plan) -> None:
    fails, fits = (
        on(job, capacity).to_json() for capacity in (job.smallest_gpu_bytes // 2, 2 * job.smallest_gpu_bytes)
    )
    assert "aten." in fails["failed_at"]
    assert (fits["failed_at"], fits["retries"]) == (None, 0)


def test_a_card_smaller_than_the_context_fails(job: Plan) -> None:
    assert on(job, job.peak.context_bytes // 2).verdict == "fails"


@KINDS
def test_a_size_decides_as_a_card_does(kind: str) -> None:
    smallest = usual_plan(kind).smallest_gpu_bytes
    more = {"new_tokens": 4} if kind == "generate" else {}
    fits = plan(kind, gpu=f"{-(-smallest // MiB)}MiB", **more)
    fails = plan(kind, gpu=f"{int(0.98 * smallest) // MiB}MiB", **more)
    assert (fits.verdict, fails.verdict) == ("tight", "fails")


# -- the allocator's settings ------------------------------------------------------------------------------------------


def test_the_settings_of_the_allocator_decide_what_is_reserved(job: Plan) -> None:
    made = plan("train", batch_size=32, seq_len=512, gpu="H200", alloc_conf="expandable_segments:True")
    assert made.peak.allocated_bytes == job.peak.allocated_bytes
    assert made.peak.reserved_bytes == replay(job.trace, AllocatorConfig(expandable_segments=True)).peak_reserved
    assert made.peak.reserved_bytes != job.peak.reserved_bytes
    assert made.to_json()["workload"]["alloc_conf"] == "expandable_segments:True"


def test_rounding_up_is_counted_in_the_allocated_peak() -> None:
    fine, coarse = (plan("forward", seq_len=100, alloc_conf=conf) for conf in ("", "roundup_power2_divisions:2"))
    assert coarse.peak.allocated_bytes > fine.peak.allocated_bytes


@pytest.mark.parametrize("conf", ["expandable_segments:perhaps", "no_such_setting:1", "max_split_size_mb"])
def test_a_setting_of_the_allocator_that_does_not_exist_is_an_error(conf: str) -> None:
    with pytest.raises(MemfitError):
        plan("forward", alloc_conf=conf)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_an_unknown_model_is_an_error_with_the_nearest_names() -> None:
    with pytest.raises(UnknownName) as caught:
        memfit.predict(kind="train", model="llama-3.2-1bb")
    assert "llama-3.2-1b" in str(caught.value.hint)


def test_an_unknown_card_is_an_error() -> None:
    with pytest.raises(MemfitError, match="no GPU called 'RTX 4091'"):
        plan("train", gpu="RTX 4091")


def test_an_unknown_setting_is_an_error() -> None:
    with pytest.raises(UnknownName, match="batchsize"):
        plan("train", batchsize=3)


def test_positions_are_checked_before_anything_is_traced() -> None:
    with pytest.raises(UsageError, match="--seq-len 2048 is more than the 1024 positions"):
        memfit.predict(kind="train", model="gpt2", seq_len=2048)


def test_a_model_that_asks_for_data_is_an_error_that_names_the_line() -> None:
    with pytest.raises(TraceError, match=r"plans\.py:\d+, in forward"):
        plan("forward", model="plans:AsksForData")


def test_a_model_whose_shapes_depend_on_data_is_an_error_that_names_the_line() -> None:
    with pytest.raises(TraceError, match=r"plans\.py:\d+, in forward: the code selects by an int64 tensor"):
        plan("train", model="plans:PicksByData")


def test_a_factory_s_module_is_planned() -> None:
    made = plan("train", model="plans:Bigram", precision="fp32")
    assert made.parameters == made.trainable_parameters == 50 * 16 + 16 * 64 + 64 + 64 * 50 + 50
    assert made.report.breakdown["weights"] == sum(rounded(n, 4) for n in (50 * 16, 16 * 64, 64, 64 * 50, 50))


def test_the_notes_say_whether_rows_are_padded() -> None:
    padded, full = (" ".join(made.notes) for made in (plan("train", padding=True), usual_plan("train")))
    assert "rows of unequal length" in padded and "no padding" not in padded
    assert "no padding" in full and "rows of unequal length" not in full


def test_a_limit_on_the_process_is_what_its_job_has_to_fit_into() -> None:
    job = {"kind": "forward", "model": "gpt2", "seq_len": 64, "gpu": "H200"}
    free, limited = memfit.predict(**job), memfit.predict(**job, alloc_conf="per_process_memory_fraction:0.002")

    assert (free.verdict, limited.verdict) == ("safe", "fails")
    assert limited.peak == free.peak
    assert any("per_process_memory_fraction leaves" in note for note in limited.notes)
    card, spare = limited.to_json()["gpu"], limited.headroom_bytes
    assert "usable_bytes" not in free.to_json()["gpu"] and spare is not None
    assert card["usable_bytes"] == limited.needed_bytes + spare < card["capacity_bytes"]
    assert f"has {gib(card['usable_bytes'])}: {gib(-spare)} too little" in str(limited)


def test_old_segments_that_torch_gives_back_early_under_a_limit_are_named() -> None:
    job = {"kind": "forward", "model": "gpt2", "seq_len": 64, "gpu": "H200"}
    collected, limit = "garbage_collection_threshold:0.5", "per_process_memory_fraction:0.5"
    alone, limited = (memfit.predict(**job, alloc_conf=conf) for conf in (collected, f"{collected},{limit}"))
    assert not any("garbage_collection" in note for note in alone.notes)  # torch does not collect without a limit
    assert any(note.startswith("not modelled: garbage_collection_threshold") for note in limited.notes)
