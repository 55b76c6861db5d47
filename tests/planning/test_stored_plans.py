"""Plans of checkpoints that are quantised already, and of torchao: what was measured on an H200, what a plan says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plans import LLAMA
from support.quick import quick
from support.rotary import ROTARY_TABLES_ARE_A_PRODUCT

from memfit.errors import UsageError
from memfit.jobs.workload import Workload
from memfit.planning.predict import predict

pytestmark = pytest.mark.usefixtures("shared_traces")

ROOT = Path(__file__).parents[2]
OF_A_RUN = ("id", "group", "phases", "peak_allocated", "peak_reserved", "loaded")
RUNS: dict[str, dict[str, Any]] = {
    run["id"]: run
    for run in map(json.loads, (ROOT / "accuracy" / "measured" / "stored.jsonl").read_text().splitlines())
}
QUICK = ("s01", "s04", "s09", "s11", "s14", "f01", "f02")
STACKED = ("e06", "f02")
"""Threads bring experts while others are stacked, never twice in the same order."""
WORKSPACE = 32 << 20
"""Of cuBLAS, taken with its first product. Before the peak of f01 that is rotary tables', or there is none."""
SIZES: dict[str, Any] = {"batch_size": 2, "seq_len": 64}


@pytest.mark.parametrize("run_id", [pytest.param(i, marks=() if i in QUICK else pytest.mark.slow) for i in RUNS])
def test_a_run_takes_what_was_measured(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = RUNS[run_id]
    plan = predict(Workload(**{name: value for name, value in run.items() if name not in OF_A_RUN}), gpu="H200")
    before = 0 if ROTARY_TABLES_ARE_A_PRODUCT or run_id != "f01" else WORKSPACE
    assert plan.peak.allocated_bytes == pytest.approx(run["peak_allocated"] - before, rel=0.001)
    reserved = run["peak_reserved"] - before
    assert plan.peak.reserved_bytes == pytest.approx(reserved, rel=0.06 if run_id == "e06" else 0.02)
    (loading,) = (phase for phase in plan.report.phases if phase.name == "load")
    if plan.workload.get("quant") != "none" or plan.stored:  # else adapters come with the weights
        assert loading.allocated_bytes == pytest.approx(
            run["phases"]["load"][0][0], rel=0.01 if run_id in STACKED else 0.001
        )


def test_a_plan_says_how_the_checkpoint_is_stored_and_what_is_left_out() -> None:
    plan = predict(kind="forward", model="Qwen/Qwen2.5-0.5B-Instruct-GPTQ-Int4", **SIZES)
    assert plan.to_json()["model"]["stored"] == {"method": "gptq", "kind": "gptq", "bits": 4, "group": 128}
    assert any(note.startswith("not modelled: what gptqmodel's kernels") for note in plan.notes)
    assert any("gptq, 4 bits, groups of 128" in note for note in plan.notes)
    assert "stored" not in predict(kind="forward", model="qwen2.5-0.5b", **SIZES).to_json()["model"]


def test_a_checkpoint_that_is_quantised_is_told_beside_the_verdict_whatever_is_asked() -> None:
    plan = predict(kind="forward", model="unsloth/Llama-3.2-1B-bnb-4bit", quant="none", seq_len=8)
    first = " ".join(" ".join(str(plan).splitlines()[:6]).split())
    assert "the checkpoint is quantised (bitsandbytes nf4, double quantisation): planned as it is stored" in first


def test_gpt_oss_takes_what_its_files_take() -> None:
    plan = predict(kind="forward", model="openai/gpt-oss-20b", **SIZES)
    (loading,) = (phase for phase in plan.report.phases if phase.name == "load")
    assert loading.allocated_bytes == pytest.approx(13_761_264_768, rel=0.002)  # total_size of its index


def test_weights_of_compressed_tensors_are_16_bit_once_a_pass_has_run() -> None:
    plan = predict(kind="forward", model="RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", **SIZES)
    at = {phase.name: phase.allocated_bytes for phase in plan.report.phases}
    assert at["load"] < 6e9
    assert 16e9 < at["decompress"] < 16.5e9  # a layer at a time is there as 4 bits and 16


KEPT: list[tuple[str, dict[str, Any]]] = [
    (
        "bitsandbytes",
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["lm_head", "NAME"]},
    ),
    ("gptq", {"bits": 4, "group_size": 64, "desc_act": False, "dynamic": {"-:NAME": {}}}),
    ("fp8", {"weight_block_size": [64, 64], "modules_to_not_convert": ["lm_head", "NAME"]}),
]


@pytest.mark.parametrize(("method", "said"), KEPT)
def test_layers_that_a_checkpoint_leaves_in_16_bits_are_planned_so_wherever_they_lie(
    method: str, said: dict[str, Any], tmp_path: Path
) -> None:
    def weights(kept: str) -> int:
        text = json.dumps({"quant_method": method, **said}).replace("NAME", kept)
        folder = tmp_path / kept
        folder.mkdir()
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 9, "vocab_size": 512}
        config = LLAMA | sizes | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": json.loads(text)}))
        return predict(kind="forward", model=str(folder), gpu="H100", **SIZES).report.breakdown["weights"]

    none, early, late = weights("nowhere"), weights("model.layers.1.mlp"), weights("model.layers.6.mlp")
    assert early == late > none


@pytest.mark.parametrize(("settings", "gpu", "why"), [
    ({"model": "Qwen/Qwen3-8B-FP8"}, "RTX 3090", "fp8 weights need a card of compute capability 8\\.9"),
    ({"model": "openai/gpt-oss-20b"}, "V100 16GB", "mxfp4 weights need a card of compute capability 7\\.5"),
    ({"model": "qwen3-8b", "quant": "torchao-int4"}, "T4", "torchao-int4 weights need a card of .* 8\\.0"),
])  # fmt: skip
def test_a_card_that_has_no_kernels_for_such_weights_is_one_clear_error(
    settings: dict[str, Any], gpu: str, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        predict(kind="forward", gpu=gpu, **settings, **SIZES)


@pytest.mark.parametrize(("settings", "why"), [
    ({"quant": "torchao-int4", "kind": "lora"}, "no backward pass"), ({"quant": "dequantize"}, "is not quantised"),
    ({"quant": "torchao-int4", "precision": "fp16"}, "bf16 weights alone"),
    ({"quant": "torchao-int8", "double_quant": True}, "has no effect"),
])  # fmt: skip
def test_settings_of_torchao_that_do_not_go_together_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        predict(**{"kind": "forward", "model": "qwen2.5-0.5b", **settings}, **SIZES)


def test_a_plan_names_the_torchao_that_it_was_read_from() -> None:
    plan = predict(kind="lora", model="qwen2.5-0.5b", quant="torchao-int8", optimizer="adamw-8bit-torchao", **SIZES)
    assert any(note.startswith("torchao 0.18 by its shapes") for note in plan.notes)
    assert any("kbit_training casts no weight" in note for note in plan.notes)


@pytest.mark.parametrize("loop", quick(["memfit"], ["plain", "trainer", "memfit"]))
def test_states_of_4_bits_take_less_than_those_of_8(loop: str) -> None:
    settings: dict[str, Any] = {"kind": "train", "model": "qwen2.5-0.5b", "loop": loop, **SIZES}
    at = [
        next(
            phase.allocated_bytes
            for phase in predict(**settings, optimizer=optimizer).report.phases
            if (phase.name, phase.step) == ("forward", 2)
        )
        for optimizer in ("adamw-4bit-torchao", "adamw-8bit-torchao", "adamw-fused")
    ]
    assert at == sorted(at)
