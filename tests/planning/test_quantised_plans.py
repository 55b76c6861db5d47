"""Plans with 4-bit and 8-bit weights: what was measured on an H200, the phases before training, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from miniatures import rows, shrunk
from support.quick import quick

from memfit.cli.main import main
from memfit.errors import UsageError
from memfit.events import Action
from memfit.jobs.build import prepare_without_memory
from memfit.jobs.workload import Workload
from memfit.planning.few import trace_few_blocks, trace_labelled
from memfit.planning.predict import Plan, predict
from memfit.platform import H200

pytestmark = pytest.mark.usefixtures("shared_traces")

MEASURED = Path(__file__).parents[2] / "accuracy" / "measured" / "quantised.jsonl"
OF_A_RUN = ("id", "group", "phases", "peak_allocated", "peak_reserved", "loaded", "cap_bytes")
RUNS: dict[str, dict[str, Any]] = {run["id"]: run for run in map(json.loads, MEASURED.read_text().splitlines())}
QUICK = ("q01", "q05", "q08", "m13")
SIZES: dict[str, Any] = {"batch_size": 2, "seq_len": 64}


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    config = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def settings_of(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name not in OF_A_RUN}


@pytest.mark.parametrize("run_id", [pytest.param(i, marks=() if i in QUICK else pytest.mark.slow) for i in RUNS])
def test_a_quantised_run_takes_what_was_measured(run_id: str) -> None:
    run = RUNS[run_id]
    plan = predict(**settings_of(run), gpu="H200")
    assert plan.peak.allocated_bytes == pytest.approx(run["peak_allocated"], rel=0.001)
    assert plan.peak.reserved_bytes == pytest.approx(run["peak_reserved"], rel=0.02)
    for name in (
        {"load", "prepare"} & set(run["phases"]) if "mixtral" not in run["model"] else ()
    ):  # experts are stacked
        (before,) = (phase for phase in plan.report.phases if phase.name == name)
        assert before.allocated_bytes == pytest.approx(run["phases"][name][0][0], rel=0.0005)


def phases(plan: Plan) -> dict[str, int]:
    return {each.name: each.allocated_bytes for each in plan.report.phases if each.step == 0}


def test_loading_holds_a_16_bit_weight_beside_its_packed_one(tiny: str) -> None:
    plan = predict(kind="forward", model=tiny, quant="nf4", **SIZES)
    made = {plan.trace.op(block): plan.trace.category(block) for block in range(len(plan.trace.requested))}
    assert phases(plan)["load"] < phases(predict(kind="forward", model=tiny, **SIZES))["load"]
    assert "temporaries" in made.values()


def test_preparing_makes_other_weights_fp32(tiny: str) -> None:
    prepared = phases(predict(kind="lora", model=tiny, quant="nf4", **SIZES))
    left = phases(predict(kind="lora", model=tiny, quant="nf4", kbit_prepare=False, **SIZES))
    assert "prepare" not in left
    assert prepared["adapt"] > left["adapt"]


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_weights_take_less_the_fewer_bits(tiny: str, quant: str) -> None:
    plain, packed = (predict(kind="forward", model=tiny, quant=each, **SIZES) for each in ("none", quant))
    assert packed.report.breakdown["weights"] < plain.report.breakdown["weights"]
    assert packed.parameters == plain.parameters


def test_double_quantisation_takes_less_of_a_large_weight() -> None:
    once, twice = (
        predict(kind="forward", model="llama-3.2-1b", quant="nf4", double_quant=each, batch_size=1, seq_len=8)
        for each in (False, True)
    )
    assert twice.report.breakdown["weights"] < once.report.breakdown["weights"]


def test_qlora_is_lora_with_the_settings_of_the_paper(tiny: str) -> None:
    made = Workload.from_mapping({"kind": "qlora", "model": tiny, **SIZES})
    assert (made.kind, made.quant, made.double_quant, made.compute_precision) == ("lora", "nf4", True, "bf16")
    assert (made.is_kbit_prepared, made.grad_checkpointing, made.optimizer) == (True, True, "paged-adamw")


def test_a_document_says_what_was_applied_where_nothing_was_said(tiny: str) -> None:
    said = predict(kind="lora", model=tiny, quant="nf4", precision="fp16", **SIZES).to_json()["workload"]
    assert (said["quant_compute"], said["kbit_prepare"]) == ("fp16", True)
    again = predict(**{name: value for name, value in said.items() if value is not None}).to_json()["workload"]
    assert again == said


def test_the_help_of_qlora_shows_its_own_defaults_and_switches_them_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qlora", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in ("double-quant", "grad-checkpointing", "kbit-prepare"):
        assert f"--{name} / --no-{name}" in text
    assert "[default: nf4]" in text and "that of the other weights" not in text
    assert main(["plan", "lora", "--help"]) == 0
    assert "--no-grad-checkpointing" not in capsys.readouterr().out


def test_qlora_without_checkpointing_and_double_quantisation_can_be_typed(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    off = ["--no-double-quant", "--no-grad-checkpointing", "--no-kbit-prepare", "--optimizer", "adamw"]
    sizes = ["--batch-size", "2", "--seq-len", "64"]
    assert main(["plan", "qlora", "--model", tiny, *sizes, *off, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["workload"]
    assert (said["double_quant"], said["grad_checkpointing"], said["kbit_prepare"]) == (False, False, False)


def test_qlora_without_quantised_weights_is_refused(tiny: str) -> None:
    with pytest.raises(UsageError, match="has no quantised weights"):
        Workload.from_mapping({"kind": "qlora", "model": tiny, "quant": "none"})


@pytest.mark.parametrize("settings", [
    {"precision": "bf16"}, {"precision": "fp16", "quant_compute": "bf16"}, {"precision": "amp-bf16"},
    {"precision": "bf16", "autocast": "bf16"},
])  # fmt: skip
def test_a_card_without_bf16_is_told_beside_the_verdict(tiny: str, settings: dict[str, str]) -> None:
    plan = predict(kind="lora", model=tiny, quant="nf4", gpu="T4", **settings, **SIZES)
    assert "no bf16 on" in "\n".join(str(plan).splitlines()[:6])
    (note,) = (note for note in plan.notes if note.startswith("no bf16 on"))
    flags = re.findall(r"--([\w-]+) ([\w-]+)", note.partition("fp16 works")[2])
    instead = {flag.replace("-", "_"): value for flag, value in flags}
    told = predict(kind="lora", model=tiny, quant="nf4", gpu="T4", **{**settings, **instead}, **SIZES)
    assert "no bf16 on" not in str(told)


def test_a_plan_of_qlora_that_fails_points_to_fit_qlora(tiny: str) -> None:
    plan = predict(kind="qlora", model=tiny, gpu="256MiB", **SIZES)
    assert "`memfit fit qlora` with these flags" in " ".join(str(plan).split())


@pytest.mark.parametrize("name", ["load_in_4bit", "bnb_4bit_compute_dtype"])
def test_names_of_bitsandbytes_in_a_plan_are_told_those_of_memfit(tiny: str, name: str) -> None:
    with pytest.raises(UsageError) as told:
        Workload.from_mapping({"kind": "lora", "model": tiny, name: True})
    assert told.value.hint == "quant, double_quant, quant_compute say it"


def test_what_is_said_of_qlora_goes_before_the_paper(tiny: str) -> None:
    made = Workload.from_mapping({"kind": "qlora", "model": tiny, "quant": "int8", "optimizer": "adamw", **SIZES})
    assert (made.quant, made.double_quant, made.optimizer) == ("int8", False, "adamw")
    with pytest.raises(UsageError, match="--double-quant has no effect"):
        Workload.from_mapping({"kind": "qlora", "model": tiny, "quant": "int8", "double_quant": True})


@pytest.mark.parametrize(("settings", "why"), [
    ({"quant": "none", "double_quant": True}, "--double-quant has no effect"),
    ({"quant": "int8", "quant_compute": "bf16"}, "--quant-compute bf16 has no effect"),
    ({"kbit_prepare": True}, "--kbit-prepare has no effect"),
    ({"quant": "torchao-int8", "kbit_prepare": True}, "--kbit-prepare has no effect: peft casts nothing"),
    ({"quant": "torchao-int8", "kbit_prepare": False, "loop": "trainer", "grad_checkpointing": True}, "has no effect"),
    ({"quant": "nf4", "offload": ["weights"]}, "not planned together with --offload weights"),
    ({"quant": "nf4", "adapter": "dora"}, "not planned together with --adapter dora"),
    ({"quant": "nf4", "world_size": 2}, "not planned together with --world-size"),
    ({"precision": "amp-bf16", "autocast": "fp16"}, "contradict each other"),
    ({"precision": "amp-bf16", "autocast": "none"}, "contradict each other"),
    ({"quant": "nf4", "precision": "fp16", "autocast": "fp16", "adapter_dtype": "same"}, "refuses fp16 gradients"),
    ({"quant": "nf5"}, "is not one of none, nf4, fp4, int8"),
])  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(tiny: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Workload.from_mapping({"kind": "lora", "model": tiny, **settings})


@pytest.mark.parametrize("quant", quick(["int8"], ["nf4", "int8"]))
def test_memfit_train_loads_prepares_and_adapts_as_the_trainer_does(tiny: str, quant: str) -> None:
    """What is loaded is not the loop's; only int8 is checkpointed in another way."""
    job: dict[str, Any] = {"kind": "lora", "model": tiny, "quant": quant, "autocast": "bf16", **SIZES}
    own, theirs = (predict(loop=loop, **job) for loop in ("memfit", "trainer"))
    assert phases(own) == phases(theirs)
    assert own.peak.allocated_bytes == pytest.approx(theirs.peak.allocated_bytes, rel=0.1)
    lean = [predict(loop=loop, grad_checkpointing=True, **job) for loop in ("memfit", "trainer")]
    assert lean[0].peak.allocated_bytes < own.peak.allocated_bytes
    if quant == "int8":  # reentrant: the inputs of 8-bit layers go
        assert lean[0].peak.allocated_bytes < lean[1].peak.allocated_bytes


def test_training_of_all_weights_has_none_that_are_quantised(tiny: str) -> None:
    with pytest.raises(UsageError, match="not of train"):
        Workload.from_mapping({"kind": "train", "model": tiny, "quant": "nf4"})


def test_autocast_over_16_bit_weights_is_neither_precision(tiny: str) -> None:
    weights = {"kind": "lora", "model": tiny, "loop": "trainer", **SIZES}
    regions = [predict(**weights, **said) for said in ({}, {"autocast": "bf16"}, {"precision": "amp-bf16"})]
    assert len({plan.peak.allocated_bytes for plan in regions}) == 3
    assert predict(**weights, precision="amp-bf16", autocast="bf16").peak == regions[2].peak


def test_a_plan_says_what_it_takes_for_granted_of_the_package(tiny: str) -> None:
    notes = " ".join(predict(kind="qlora", model=tiny, **SIZES).notes)
    assert "bitsandbytes 0.50 by its shapes and rules" in notes
    assert "prepare_model_for_kbit_training makes every 16-bit weight fp32" in notes
    assert "managed memory" in notes


def test_fused_experts_stay_as_they_are(tmp_path: Path) -> None:
    config = {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "max_position_embeddings": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = predict(kind="forward", model=str(tmp_path), quant="nf4", **SIZES)
    assert any("fused experts stay as they are" in note for note in plan.notes)


def test_quantised_weights_of_a_model_that_reads_pictures_are_refused_in_its_own_words() -> None:
    model = Path(__file__).parents[2] / "accuracy" / "configs" / "qwen2.5-vl-small.json"
    with pytest.raises(UsageError, match="reads pictures and text: quantised weights of such a model are not planned"):
        predict(kind="forward", model=str(model), quant="nf4", seq_len=2048)


def test_experts_are_stacked_while_they_are_loaded(tmp_path: Path) -> None:
    """Of the last block gates and ups are there as two stacks, beside both as one: that is once more what stays, less
    the downs, which come after."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_local_experts": 8}
    config = {
        "model_type": "mixtral", **sizes, "num_hidden_layers": 6, "vocab_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe, whole = trace_few_blocks(Workload(kind="forward", model=str(tmp_path), quant="nf4", **SIZES), H200)
    assert recipe.how.blocks == (4, 6)
    held, most = 0, 0
    for action, subject in whole.events():
        if action == Action.MARK and whole.marks[subject].phase == "data":
            break
        if action != Action.MARK:
            held += whole.requested[subject] * (1 if action == Action.ALLOC else -1)
            most = max(most, held)
    gates = ups = downs = 2 * 8 * 1024 * 2048
    others = most - held - (gates + ups - downs)
    assert -(2 << 20) < others < 0, "attention of that block comes after"


def test_four_blocks_tell_all_of_a_qlora(tmp_path: Path) -> None:
    model = str(tmp_path / "wide")
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide/config.json").write_text(json.dumps(shrunk("llama", 7)))
    work = Workload.from_mapping({"kind": "qlora", "model": model, "seq_len": 64})
    recipe, whole = trace_few_blocks(work, H200)
    assert recipe.how.blocks == (4, 7)
    every, _ = trace_labelled(prepare_without_memory(work), H200)
    assert rows(whole) == rows(every)


def test_a_head_that_is_quantised_and_would_be_trained_is_refused(tmp_path: Path) -> None:
    config = {
        "model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 128, "hidden_size": 64,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="quantises 'classifier' too, and peft would train it"):
        predict(kind="qlora", model=str(tmp_path), **SIZES)


@pytest.mark.parametrize(
    "optimizer",
    quick(["paged-adamw-8bit", "lion-8bit"], ["adamw-8bit", "paged-adamw-8bit", "paged-adamw", "lion-8bit"]),
)
@pytest.mark.parametrize("loop", ["plain", "trainer"])
def test_small_and_paged_states_are_planned_without_the_package(tiny: str, optimizer: str, loop: str) -> None:
    said = {"kind": "train", "model": tiny, "loop": loop, **SIZES}
    small, usual = predict(**said, optimizer=optimizer), predict(**said, optimizer="adamw-fused")
    assert small.report.breakdown["optimizer"] <= usual.report.breakdown["optimizer"]


def test_adapters_of_4_bit_layers_are_first_made_in_the_type_that_they_compute_in(tiny: str) -> None:
    said = {"kind": "lora", "model": tiny, "quant": "nf4", "kbit_prepare": False, **SIZES}
    fp32, same = predict(**said), predict(**said, adapter_dtype="same")
    assert same.report.breakdown["weights"] < fp32.report.breakdown["weights"]
    with pytest.raises(UsageError, match="8-bit layers in fp32"):
        predict(kind="lora", model=tiny, quant="int8", adapter_dtype="same", **SIZES)


def test_paged_states_are_told_as_managed_memory_weight_by_weight() -> None:
    plan = predict(kind="qlora", model="tinyllama-1.1b", seq_len=64, rank=64)
    wide, deep, narrow, rank = 2048, 5632, 256, 64
    into, out = [wide] * 6 + [deep], [wide, narrow, narrow, wide, deep, deep, wide]
    states = [8 * entries * rank for entries in into + out if entries * rank >= 100_000]
    assert plan.to_json()["host"] == {"managed": 22 * sum(states)}
    assert any("of paged states lie in managed memory" in note for note in plan.notes)
