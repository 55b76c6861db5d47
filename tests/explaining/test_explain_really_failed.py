"""Errors that really happened, on an H200 with torch 2.11, each in a phase and for a tensor that is known.

`tests/data/ooms`: what the program printed, and in `truth.json` what was going on, with the exact sizes that torch's
own out-of-memory observer was told. Qwen2.5-1.5B with two layers, two rows of 2,048 tokens, under a memory fraction.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.explaining.explain import Explanation, explain
from memfit.planning.predict import predict
from memfit.units import MiB

OOMS = Path(__file__).parents[1] / "data" / "ooms"
TRUTH: dict[str, dict[str, Any]] = json.loads((OOMS / "truth.json").read_text())
MODEL: dict[str, Any] = {"model": "qwen2.5-1.5b", "batch_size": 2, "seq_len": 2048}
OTHER_RUNS: dict[str, dict[str, Any]] = {
    "calibration": {"model": "llama-3.2-1b", "batch_size": None}, "calibration_all": {"model": None},
    "train_8g": {"model": "qwen2.5-0.5b"}, "lora_4g": {"model": "qwen2.5-0.5b"},
    "eager_long": {"batch_size": 1, "seq_len": 8192}, "sdpa_long": {"batch_size": 1, "seq_len": 16_384},
    "prefill": {"batch_size": 16}, "decoding": {"batch_size": 64, "seq_len": 1024},
}  # fmt: skip
UNCAPPED = ("calibration_all",)
NAMED = {
    "accelerated": "fp32 logits", "backward": "fp32 logits", "calibration": "calibration inputs",
    "compiled": "MLP activation", "decoding": "keys or values of one layer", "eager": "attention scores",
    "eager_long": "attention scores", "eager_softmax": "attention scores", "evaluation": "fp32 logits",
    "expandable": "fp32 logits", "foreach": "embedding or lm_head", "fused": "embedding or lm_head",
    "loading": "MLP matrix", "logits_fp32": "fp32 logits", "lora": "MLP activation", "loss": "fp32 logits",
    "mlp": "MLP activation", "prefill": "MLP activation", "recompute": "MLP activation",
    "sdpa_long": "MLP activation", "sdpa_math": "attention scores", "trainer": "fp32 logits",
    "trainer_lora": "fp32 logits",
}  # fmt: skip
"""The tensors that are called the likeliest, given the model, the rows and the length."""


def told(name: str, **more: Any) -> Explanation:
    given = {**MODEL, **OTHER_RUNS.get(name, {}), **more}
    return explain(OOMS / f"{name}.txt", predict=False, **given)


def fixes(found: Explanation) -> set[str]:
    return {fix.name for fix in found.fixes}


def withheld(found: Explanation) -> set[str]:
    return {each.advice for each in found.withheld}


OBSERVED = [name for name, truth in TRUTH.items() if truth["segment_bytes"] is not None and name != "batch_search"]
"""The search for a batch size keeps its messages to itself; of the others torch has told the exact sizes."""


@pytest.mark.parametrize("name", OBSERVED)
def test_its_numbers_are_those_that_the_observer_was_told(name: str) -> None:
    oom, truth = told(name).oom, TRUTH[name]
    assert oom is not None and oom.requested is not None and oom.requested.may_be(truth["segment_bytes"])
    limit = oom.capacity if name in UNCAPPED else oom.allowed
    assert limit is not None and limit.may_be(truth["limit_bytes"])
    assert oom.free is not None and oom.free.may_be(truth["free_bytes"])


@pytest.mark.parametrize("name", [name for name in TRUTH if TRUTH[name]["phase"]])
def test_its_phase_is_named(name: str) -> None:
    place = told(name).place
    if name.startswith("logits"):  # the output head is the last of the forward pass, and counts as the loss's
        assert (place.phase, place.detail) == ("loss", "making the logits")
    else:
        assert place.phase == TRUTH[name]["phase"]


@pytest.mark.parametrize("name", NAMED)
def test_its_tensor_is_named_and_has_the_true_size(name: str) -> None:
    found = told(name).readings.likeliest
    assert found is not None and found.tensor.startswith(NAMED[name]) and found.nbytes == TRUTH[name]["bytes"]


def test_logits_that_are_collected_over_batches_are_not_claimed_to_be_of_one() -> None:
    found = told("trainer_eval")
    assert found.readings.likeliest is None
    assert TRUTH["trainer_eval"]["bytes"] in {each.nbytes for each in found.readings.candidates}
    assert "evaluate in smaller pieces" in fixes(found) and "the loss in chunks" not in fixes(found)


@pytest.mark.parametrize("name", [name for name in OBSERVED if name not in UNCAPPED])
def test_the_limit_is_told_from_the_card(name: str) -> None:
    found = told(name)
    assert found.cause.kind in ("limit", "impossible-request") and "raise the memory fraction" in fixes(found)


def test_a_request_above_the_whole_card_is_impossible() -> None:
    found = told("calibration_all")
    assert found.cause.kind == "impossible-request" and "raise the memory fraction" not in fixes(found)


def test_a_capped_calibration_is_told_at_which_length_it_would_fit() -> None:
    (cap,) = (fix for fix in told("calibration").fixes if fix.basis == "arithmetic")
    assert cap.name == "cap the length at 2,048" and "1.00 GiB" in cap.says


def test_an_environment_whose_folder_is_called_torch_hides_no_frame() -> None:
    phase = told("loss").to_json()["phase"]
    assert phase["code_line"] == "transformers/loss/loss_utils.py:59 ForCausalLMLoss"
    assert phase["code"] == "logits = logits.float()"


def test_a_forward_pass_on_the_line_of_its_backward_is_a_forward_pass() -> None:
    """`model(input_ids=ids, labels=ids).loss.backward()` failed in the model."""
    found = told("lora_4g")
    assert found.place.phase == "forward" and ".backward()" in found.place.frames[0].code


def test_scores_made_by_sdpa_are_answered_otherwise_than_eager_ones() -> None:
    eager, fused = told("eager"), told("sdpa_math")
    says = {fix.name: fix.says for found in (eager, fused) for fix in found.fixes if found is fused}
    assert "fused attention" in fixes(eager) and "kernels out" in says["fused attention"]
    assert "flash attention" not in withheld(fused) | withheld(eager)
    assert "fused attention" not in fixes(told("sdpa_long"))


def test_checkpointing_is_advised_in_a_plain_pass_and_withheld_where_it_is_on() -> None:
    assert "gradient checkpointing" in fixes(told("mlp"))
    again = told("recompute")
    assert again.place.detail == "computing a checkpointed block again"
    assert "gradient checkpointing" in withheld(again) and "gradient checkpointing" not in fixes(again)


def test_temporaries_of_foreach_are_answered_with_a_fused_optimizer() -> None:
    assert "a fused optimizer" in fixes(told("foreach")) and "a smaller batch" in withheld(told("foreach"))
    assert "a fused optimizer" not in fixes(told("fused"))


def test_a_cache_that_grows_is_answered_with_a_smaller_one() -> None:
    found = told("decoding")
    assert found.readings.likeliest is not None
    assert found.readings.likeliest.product == "64 rows x 1,025 tokens x 2 kv heads x 128 head dim x 2 bytes"
    assert "a smaller cache" in fixes(found) and "logits of the last token only" not in fixes(found)


def test_logits_that_accelerate_copies_to_fp32_are_not_answered_with_checkpointing() -> None:
    found = told("accelerated")
    assert "gradient checkpointing" not in fixes(found) and "gradient checkpointing alone" in withheld(found)


def test_memory_in_pieces_is_not_claimed_from_the_text_and_expandable_segments_are_worth_a_try() -> None:
    """450 of 900 blocks of 4 MiB were freed, every second one: 1.76 GiB, and no two neighbours."""
    found = told("fragmented", model=None)
    assert found.cause.fragmentation is not None and found.cause.fragmentation.verdict == "cannot tell"
    assert "expandable segments" in fixes(found) and "the loss in chunks" not in fixes(found)


@pytest.mark.parametrize("name", ["decoding", "prefill"])
def test_less_cached_than_asked_for_is_no_fragmentation_however_many_processes_are_listed(name: str) -> None:
    """9.82 MiB for 32.03 MiB, and 551.48 MiB for 560 MiB: seven others on the card add nothing to these numbers."""
    found = told(name).cause.fragmentation
    assert found is not None and found.verdict == "no"


def test_what_lies_free_in_the_pool_of_a_graph_is_told_apart() -> None:
    rows = {row.name: row.nbytes for row in told("graph_pools").account.rows()}
    assert rows["private pools"] == pytest.approx(128 * MiB, rel=0.001)
    assert rows["allocated"] == pytest.approx(256 * MiB, rel=0.001)


def test_the_other_allocator_names_the_request_itself() -> None:
    oom = told("async").oom
    assert oom is not None and (oom.form, oom.requests_exactly) == ("cuda-async", True)
    assert oom.requested is not None and oom.requested.may_be(TRUTH["async"]["bytes"])


def test_a_size_beyond_all_bounds_and_a_search_that_keeps_silent_are_known() -> None:
    assert told("one_eb").cause.kind == "corrupt-size"
    assert "every size, 1 included" in told("batch_search").cause.sentence


def test_the_trainers_own_log_tells_that_it_was_the_trainer() -> None:
    assert told("trainer").job.settings["loop"] == "trainer"
    assert told("trainer_lora").job.settings["kind"] == "lora"


def test_the_job_is_predicted_to_fail_where_it_failed() -> None:
    """Qwen2.5-0.5B in bf16 with AdamW, four rows of 1,024 tokens, under 8 GiB: at `logits.float()`."""
    given = {"kind": "train", "model": "qwen2.5-0.5b", "batch_size": 4, "seq_len": 1024, "precision": "bf16"}
    found = told("train_8g", **given)
    assert found.job.workload is not None and found.account.own_bytes is not None
    fit = predict(found.job.workload, gpu=found.gpu).fit
    assert fit is not None and (fit.verdict, fit.failed_at) == ("fails", "aten._to_copy.default")
    assert fit.device_bytes == pytest.approx(found.account.own_bytes, rel=0.01)


@pytest.mark.parametrize("path", sorted(OOMS.glob("*.txt")), ids=lambda path: path.stem)
def test_no_answer_has_a_gap_or_half_a_sentence_in_it(path: Path) -> None:
    said = str(explain(path, predict=False))
    for ugly in (", : ", "(n/a)", "only 0 B", "in loading", "in the evaluation", "in the calibration", "None", " ,"):
        assert ugly not in said
