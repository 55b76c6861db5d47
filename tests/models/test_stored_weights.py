"""What a config.json says of quantised weights: which tensors a layer has, what is refused, the published variants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.models.presets import find_preset, presets, variants
from memfit.models.registry import resolve, source_notes
from memfit.models.stored_weights import StoredWeights, read_stored, refuse_stored, stored_weights

ITEM_BYTES = {"int32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1, "int64": 8}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
W4A16: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}}},
}  # fmt: skip


def stored(said: dict[str, Any]) -> StoredWeights:
    found = read_stored({"quantization_config": said}, "a/config.json")
    assert found is not None
    return found


def test_a_gptq_layer_has_the_tensors_of_the_published_files() -> None:
    assert stored(GPTQ).tensors(18944, 3584, "bfloat16") == {  # Qwen2.5-7B-Instruct-GPTQ-Int4, gate_proj
        "g_idx": ((3584,), "int32"), "qweight": ((448, 18944), "int32"), "qzeros": ((28, 2368), "int32"),
        "scales": ((28, 18944), "float16"),
    }  # fmt: skip


def test_an_awq_layer_has_the_tensors_of_the_published_files() -> None:
    assert stored(AWQ).tensors(18944, 3584, "bfloat16") == {
        "qweight": ((3584, 2368), "int32"), "qzeros": ((28, 2368), "int32"), "scales": ((28, 18944), "float16"),
    }  # fmt: skip


def test_compressed_tensors_packs_eight_weights_into_a_word() -> None:
    tensors = stored(W4A16).tensors(4096, 14336, "bfloat16")
    assert tensors["weight_packed"] == ((4096, 1792), "int32")
    assert tensors["weight_scale"] == ((4096, 112), "bfloat16")
    assert "weight_zero_point" not in tensors


def test_8_bit_weights_of_compressed_tensors_are_whole_bytes() -> None:
    said = json.loads(json.dumps(W4A16))
    said["format"], group = "int-quantized", said["config_groups"]["group_0"]
    group["weights"] |= {"num_bits": 8, "strategy": "channel", "group_size": None}
    tensors = stored(said).tensors(64, 32, "bfloat16")
    assert tensors == {"weight": ((64, 32), "int8"), "weight_scale": ((64, 1), "bfloat16")}


@pytest.mark.parametrize(("said", "kind"), [
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, "nf4"),
    ({"_load_in_8bit": True, "quant_method": "bitsandbytes"}, "int8"), ({"load_in_4bit": True}, "fp4"),
])  # fmt: skip
def test_what_bitsandbytes_has_stored_is_one_of_its_kinds(said: dict[str, Any], kind: str) -> None:
    assert (stored(said).method, stored(said).kind) == ("bitsandbytes", kind)
    assert stored(said).double == bool(said.get("bnb_4bit_use_double_quant"))


@pytest.mark.parametrize(("said", "why"), [
    ({"quant_method": "hqq"}, "whose storage memfit does not know"), ({}, "does not know"), ("gptq", "not an object"),
    ({**GPTQ, "bits": 5}, "5 bits"), ({**GPTQ, "bits": "4"}, "not a number"), ({**AWQ, "version": "gemv"}, "gemv"),
    ({**GPTQ, "dynamic": {"+:.*up_proj": {"bits": 8}}}, "differ from layer to layer"),
    ({**W4A16, "format": "marlin-24"}, "the format"), ({**W4A16, "ignore": "lm_head"}, "not a list of names"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "not two powers of two"),
    ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "quant_type"),
])  # fmt: skip
def test_what_memfit_does_not_know_is_one_clear_error(said: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        read_stored({"quantization_config": said}, "a/config.json")


def test_layers_that_gptqmodel_leaves_out_are_kept() -> None:
    rules = stored({**GPTQ, "dynamic": {"-:.*k_proj": {}}})
    assert rules.keeps("model.layers.0.self_attn.k_proj")
    assert not rules.keeps("model.layers.0.self_attn.q_proj")


def test_plain_weights_are_not_stored_quantised(tmp_path: Path) -> None:
    assert stored_weights("preset", "gpt2") is None
    assert stored_weights("factory", "a:b") is None
    refuse_stored("preset", "gpt2", "gpt2")
    with pytest.raises(InputError, match="neither trained nor pruned"):
        refuse_stored("preset", "openai/gpt-oss-20b", "gpt-oss")


def test_every_variant_is_known_by_its_hub_id_and_can_be_read() -> None:
    plain = {preset.name: preset for preset in presets()}
    for name, found in variants().items():
        for hub_id, variant in found.items():
            assert find_preset(hub_id) is variant
            assert variant.parameters == plain[name].parameters
            assert stored_weights("preset", resolve(hub_id).target) is not None


def test_the_published_gpt_oss_is_the_quantised_one() -> None:
    assert resolve("openai/gpt-oss-20b").name == "openai/gpt-oss-20b"
    assert resolve("gpt-oss-20b").name == "gpt-oss-20b"
    assert find_preset("Llama-3.2-1B-bnb-4bit") is find_preset("unsloth/Llama-3.2-1B-bnb-4bit")


def test_a_plan_says_whose_word_the_storage_of_a_variant_is() -> None:
    (note,) = source_notes(resolve("Qwen/Qwen3-8B-FP8"))
    assert note.startswith("how Qwen/Qwen3-8B-FP8 is stored is what memfit ships")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": True}, "both load_in_4bit and"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": "false"}, "neither true nor false"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": "false"},
            "neither true nor false",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["(["]},
            "is no pattern",
        ),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:([": {}}}, "is no pattern"),
        *(
            ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": each}, "_storage' is")
            for each in (9, "float8", True, [1])
        ),
        *(
            ({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": each}, "_threshold' is")
            for each in (-1, 6, 0.0, -0.5, "6.0", True)
        ),
        *(
            ({"quant_method": method, "bits": 4, "group_size": each}, "'group_size' is")
            for method, each in (("gptq", 0), ("gptq", 100), ("gptq", -5), ("awq", 0), ("awq", 512), ("awq", "128"))
        ),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "the format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": []}, "the format"),
        ({"quant_method": "gptq", "bits": 4, "sym": "no"}, "neither true nor false"),
        ({"quant_method": "gptq", "bits": 4, "damp_percent": 3}, "not between 0 and 1"),
        ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [["q_proj"]]}, "some layers of a block"),
        ({"quant_method": "mxfp4", "dequantize": "x"}, "neither true nor false"),
        ({**W4A16, "kv_cache_scheme": {"num_bits": 8}}, "a quantised cache"),
        ({**W4A16, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        ({**W4A16, "quantization_status": 3}, "neither 'compressed' nor 'frozen'"),
        ({"quant_method": "awq", "backend": 3}, "not a name"),
        ({"quant_method": "awq", "zero_point": 1}, "neither true nor false"),
        *(
            ({"quant_method": "fp8", "weight_block_size": each}, "two powers of two from 16 to 1024")
            for each in ([10**9, 10**9], [100, 128], [True, 128], 128, [128], [0, 0], ["128", 128])
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {"group_size": -5}}},
            },
            "int8 weights in groups of -5",
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {
                    "default": {
                        "_type": "Int4WeightOnlyConfig",
                        "_data": {"group_size": 0, "int4_packing_format": "tile_packed_to_4d"},
                    }
                },
            },
            "in groups of 0",
        ),
        *(
            (
                {
                    "quant_method": "compressed-tensors",
                    "format": "pack-quantized",
                    "config_groups": {
                        "group_0": {
                            "targets": ["Linear"],
                            "weights": {"strategy": "group", "num_bits": bits, "group_size": group},
                        }
                    },
                },
                why,
            )
            for bits, group, why in (
                (4, 0, "'group_size' of 'config_groups' is 0"),
                (-1, 128, "-1 bits"),
                (7, 128, "7 bits"),
            )
        ),
    ],
)
def test_what_transformers_would_not_load_is_refused_by_name(said: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        read_stored({"quantization_config": said}, "a/config.json")


# -- a config.json from anywhere: wrong types, patterns without end ----------------------------------------------------


@pytest.mark.parametrize(("said", "key"), [
    ({"quant_method": ["gptq"]}, "quant_method"), ({"quant_method": {"a": 1}}, "quant_method"),
    ({"quant_method": 5}, "quant_method"), ({"quant_method": "fp8", "activation_scheme": 4}, "activation_scheme"),
    ({"quant_method": "fp8", "activation_scheme": "always"}, "activation_scheme"),
    ({"quant_method": "torchao", "quant_type": {"default": {"_type": ["Int8WeightOnlyConfig"]}}}, "quant_type"),
    ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": 5}}}, "_data"),
    ({**W4A16, "config_groups": []}, "config_groups"), ({"quant_method": "compressed-tensors"}, "config_groups"),
])  # fmt: skip
def test_a_value_of_a_wrong_type_is_refused_by_file_and_key(said: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=rf"^a/config\.json: .*'{key}'"):
        stored(said)


@pytest.mark.parametrize("pattern", [
    "(.*)*" * 10 + "x$", "(a+)+$", "(?:a|a)*x", "(?:.|[a-z])" * 40 + "x$", ".*.*.*.*.*.*x", "(x+x+)+y", "a?" * 40 + "x",
    "(?:(?:ab?)+){2,}", "[a-z]*" * 9, "(a)" * 5000, "(" * 3000 + "a" + ")" * 3000,
])  # fmt: skip
@pytest.mark.parametrize("key", ["dynamic", "ignore", "llm_int8_skip_modules"])
def test_a_pattern_that_may_take_for_ever_is_refused_by_its_key(key: str, pattern: str) -> None:
    said: dict[str, dict[str, Any]] = {
        "dynamic": {**GPTQ, key: {f"-:{pattern}": {}}}, "ignore": {**W4A16, key: [f"re:{pattern}"]},
        "llm_int8_skip_modules": {**NF4, key: [pattern]},
    }  # fmt: skip
    with pytest.raises(InputError, match=rf"^a/config\.json: '{key}': "):
        stored(said[key])


@pytest.mark.parametrize(("pattern", "name"), [
    (".*attn.*", "model.layers.0.self_attn.q_proj"), (".*lm_head", "lm_head"),
    ("model.layers.\\d+.mlp.*", "model.layers.3.mlp.up_proj"),
    ("^model\\.layers\\.(?:1[0-9]|2[0-7])\\..*", "model.layers.17.mlp.up_proj"),
    (".*layers.*(mlp|self_attn).*proj.*", "model.layers.0.mlp.up_proj"),
    (".*\\.experts\\.\\d+\\.(gate|up|down)_proj$", "model.layers.0.mlp.experts.31.up_proj"),
    ("^(?!.*lm_head).*[._]proj(_a)?", "model.layers.0.mlp.up_proj"),
    ("model.layers.(?:" + "|".join(map(str, range(60))) + ").mlp.gate$", "model.layers.41.mlp.gate"),
])  # fmt: skip
def test_patterns_of_published_checkpoints_are_matched(pattern: str, name: str) -> None:
    assert stored({**GPTQ, "dynamic": {f"-:{pattern}": {}}}).keeps(name)
    assert stored({**W4A16, "ignore": [f"re:{pattern}"]}).keeps(name)
    assert stored({**NF4, "llm_int8_skip_modules": [pattern]}).kept == (pattern,)
