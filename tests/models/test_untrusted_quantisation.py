"""A config.json from anywhere: wrong types and patterns without end in what it says of quantised weights."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.errors import InputError
from memfit.models.stored_weights import StoredWeights, read_stored

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
W4A16: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}}},
}  # fmt: skip


def read(said: dict[str, Any]) -> StoredWeights:
    found = read_stored({"quantization_config": said}, "a/config.json")
    assert found is not None
    return found


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
        read(said)


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
        read(said[key])


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
    assert read({**GPTQ, "dynamic": {f"-:{pattern}": {}}}).keeps(name)
    assert read({**W4A16, "ignore": [f"re:{pattern}"]}).keeps(name)
    assert read({**NF4, "llm_int8_skip_modules": [pattern]}).kept == (pattern,)
