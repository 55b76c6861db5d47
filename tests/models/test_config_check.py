"""A config.json from anywhere builds, or is refused in one line that names the file and the key."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.quick import examples

from memfit.errors import InputError, MemfitError
from memfit.models.config_check import MAX_FILE_BYTES, ConfigFamily, check_config, one_line, read_config
from memfit.models.presets import presets
from memfit.models.registry import build_model, load_config, resolve, source_notes

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "n_embd": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "word_embed_proj_dim": 32,
    "pad_token_id": 0,
}


def small_configs() -> dict[str, dict[str, Any]]:
    """One tiny model of every family that has a preset, with all the settings of a real one."""
    found: dict[str, dict[str, Any]] = {}
    for preset in presets():
        config = {key: value if value is None else SMALL.get(key, value) for key, value in preset.config.items()}
        if "layer_types" in config:
            config["layer_types"] = preset.config["layer_types"][:2]
        found.setdefault(preset.model_type, config)
    return found


CONFIGS = small_configs()
LLAMA = CONFIGS["llama"]
OWN_NAMES = {
    "hidden_size": ("n_embd", "d_model"), "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
}  # fmt: skip


def build(path: Path, config: object) -> torch.nn.Module:
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    source = resolve(str(path))
    eager = isinstance(config, dict) and config.get("model_type") == "gpt_oss"
    with torch.device("meta"):
        return build_model(source, dtype=torch.float32, attention="eager" if eager else "sdpa")


def refusal(path: Path, config: object) -> InputError:
    with pytest.raises(InputError) as caught:
        build(path, config)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.json"


@pytest.mark.parametrize("family", CONFIGS)
def test_a_small_model_of_every_family_builds(path: Path, family: str) -> None:
    assert sum(parameter.numel() for parameter in build(path, CONFIGS[family]).parameters()) > 0


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_size_that_is_missing_is_never_filled_in(path: Path, family: str, key: str) -> None:
    name = next(name for name in (*OWN_NAMES.get(key, ()), key) if name in CONFIGS[family])

    error = refusal(path, {k: v for k, v in CONFIGS[family].items() if k != name})

    assert error.message == f"{path}: '{name}' is missing"


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama", "intermediate_size"),
        ("opt", "ffn_dim"),
        ("mistral", "num_key_value_heads"),
        ("qwen2", "num_key_value_heads"),
        ("gemma2", "head_dim"),
        ("qwen3", "head_dim"),
        ("mixtral", "num_local_experts"),
        ("qwen3_moe", "moe_intermediate_size"),
        ("deepseek_v2", "kv_lora_rank"),
        ("gsa", "n_kv_heads"),
        ("gsa", "d_ffn"),
        ("basics", "d_ff"),
    ],
)
def test_a_size_for_which_the_class_has_a_default_must_be_stated_too(path: Path, family: str, key: str) -> None:
    error = refusal(path, {k: v for k, v in CONFIGS[family].items() if k != key})

    assert error.message == f"{path}: '{key}' is missing"


def test_an_old_llama_file_without_key_value_heads_means_as_many_as_heads(path: Path) -> None:
    config = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "head_dim")}

    model: Any = build(path, config)

    assert model.config.num_key_value_heads == model.config.num_attention_heads == 4


def test_gpt2_takes_the_generic_names_as_well_as_its_own(path: Path) -> None:
    renamed = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}

    model: Any = build(path, {renamed.get(key, key): value for key, value in CONFIGS["gpt2"].items()})

    assert (model.config.n_embd, model.config.n_layer, model.config.n_head) == (32, 2, 4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": 0}, "'hidden_size' is 0; it must be 1 or more"),
        ({"hidden_size": -4}, "'hidden_size' is -4; it must be 1 or more"),
        ({"hidden_size": "4096"}, "'hidden_size' is '4096', not a whole number"),
        ({"hidden_size": 32.0}, "'hidden_size' is 32.0, not a whole number"),
        ({"hidden_size": True}, "'hidden_size' is true, not a whole number"),
        ({"hidden_size": [32]}, "'hidden_size' is [32], not a whole number"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": 30, "head_dim": None}, "'hidden_size' 30 is not divisible by 'num_attention_heads' 4"),
        ({"num_key_value_heads": 3}, "'num_attention_heads' 4 is not divisible by 'num_key_value_heads' 3"),
        ({"head_dim": 7}, "heads of width 7 cannot be rotated; rotary positions need an even width"),
        ({"num_hidden_layers": 10**6}, "'num_hidden_layers' is 1,000,000; memfit builds 1,024 layers at most"),
        ({"vocab_size": 2**36}, "the token embedding would have 2,199,023,255,552 elements, which no machine holds"),
        ({"vocab_size": 2**50}, "'vocab_size' is 1125899906842624, which no model has"),
        ({"attention_dropout": 1.5}, "'attention_dropout' is 1.5, not a number from 0 to 1"),
        ({"attention_dropout": "0.1"}, "'attention_dropout' is '0.1', not a number from 0 to 1"),
        ({"torch_dtype": "int4"}, "'torch_dtype' is 'int4', not one of float64, float32, float16, bfloat16"),
        ({"to_dict": 1}, "'to_dict' is not a setting of a 'llama' model"),
        ({"__class__": "x"}, "'__class__' is not a setting of a 'llama' model"),
        ({"model_type": None}, "'model_type' is missing"),
        ({"model_type": 7}, "'model_type' is 7, not a name"),
        ({"model_type": "lama"}, "transformers knows no model_type 'lama'"),
        (
            {"model_type": "clip_text_model"},
            "a 'clip_text_model' model is no language model and classifies no pictures",
        ),
        ({"model_type": "gemma3"}, "a 'gemma3' model has several parts (text_config, vision_config)"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(path: Path, change: dict[str, Any], says: str) -> None:
    error = refusal(path, {**LLAMA, **change})

    assert error.message.startswith(f"{path}: {says}")


def test_heads_that_do_not_divide_come_with_heads_that_do(path: Path) -> None:
    change = {"hidden_size": 4096, "num_attention_heads": 30, "num_key_value_heads": None, "head_dim": None}
    error = refusal(path, {**LLAMA, **change})

    assert error.hint == "4096 works with 16, 32 or 64 heads"


MPT = {
    "model_type": "mpt", "vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
    "attn_config": {"attn_type": "multihead_attention", "alibi": True, "attn_pdrop": 0},
}  # fmt: skip


def test_a_group_of_settings_is_not_a_part(path: Path) -> None:
    path.write_text(json.dumps(MPT))

    assert load_config(resolve(str(path))).attn_config.alibi


def test_numbers_in_a_group_of_settings_are_bounded_too(path: Path) -> None:
    error = refusal(path, {**MPT, "attn_config": {"num_experts": 10**6}})

    assert error.message == f"{path}: 'num_experts' is 1,000,000; memfit builds 32,768 experts at most"


def test_an_unknown_family_is_answered_with_the_nearest(path: Path) -> None:
    assert "'llama'" in str(refusal(path, {**LLAMA, "model_type": "lama"}).hint)


def test_code_that_comes_with_a_known_model_is_left_alone(path: Path) -> None:
    model: Any = build(path, {**LLAMA, "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}})

    assert type(model).__name__ == "LlamaForCausalLM"
    assert not hasattr(model.config, "auto_map")


def test_code_that_an_unknown_model_needs_is_not_run(path: Path) -> None:
    (path.parent / "modeling_evil.py").write_text("raise SystemExit('this ran')")

    error = refusal(path, {**LLAMA, "model_type": "evil", "auto_map": {"AutoConfig": "modeling_evil.Evil"}})

    assert "needs code that comes with the model (auto_map); memfit does not run it" in error.message


def test_a_cause_inside_transformers_is_told_in_one_line(path: Path) -> None:
    error = refusal(path, {**LLAMA, "hidden_act": "swoosh"})

    assert error.message.startswith(f"{path}: transformers cannot build this model: KeyError: ")


def test_labels_without_end_are_not_made(path: Path) -> None:
    began = time.process_time()
    build(path, {**LLAMA, "num_labels": 10**9})

    assert time.process_time() - began < 5


def test_a_range_open_to_infinity_is_read_but_no_other_infinity(path: Path) -> None:
    path.write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_config(path)["time_step_limit"] == [0.0, float("inf")]

    assert "'rope_theta' is not a finite number" in refusal(path, {**LLAMA, "rope_theta": float("inf")}).message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a JSON file"),
        (b"{", "is not a JSON file"),
        (b"\x80\x04}q\x00.", "is not a JSON file"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not a JSON file"),
        (b"[1, 2]", "holds a JSON list"),
        (b"null", "holds a JSON NoneType"),
        (b"[" * 100_000, "nested too deeply"),
        (b" " * (MAX_FILE_BYTES + 1), "is larger than 4.00 MiB"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(path: Path, content: bytes, says: str) -> None:
    path.write_bytes(content)

    with pytest.raises(InputError, match=says) as caught:
        read_config(path)

    assert str(path) in caught.value.message and "\n" not in caught.value.message


def test_a_byte_order_mark_is_no_obstacle(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbf{}")

    assert read_config(path) == {}


def test_settings_nested_without_end_are_refused(path: Path) -> None:
    deep = '{"a":' * 60 + "1" + "}" * 60
    flat = {key: value for key, value in LLAMA.items() if key != "rope_scaling"}
    text = json.dumps(flat)[:-1] + f', "rope_scaling": {deep}' + "}"

    assert "'rope_scaling' is nested deeper than 16 levels" in refusal(path, text).message


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()

    with pytest.raises(InputError, match="no file"):
        resolve(str(tmp_path / "x.json"))


def test_an_unknown_family_must_state_the_five_sizes_only() -> None:
    family = ConfigFamily("mine", {"hidden_size": 1, "num_key_value_heads": 8})

    assert check_config({"hidden_size": 4}, family, "f") == {"hidden_size": 4}
    with pytest.raises(InputError, match="'hidden_size' is missing"):
        check_config({"num_key_value_heads": 4}, family, "f")


def test_a_long_cause_is_cut_and_an_empty_one_has_the_name_of_its_kind() -> None:
    assert one_line(ValueError("a\n  b")) == "a b"
    assert len(one_line(ValueError("x" * 1000))) == 200
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.sampled_from([2**20, 2**31, 2**40, 2**63, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["silu", "gelu", "sdpa", "default", "yarn", "llama3", "longrope", "bfloat16", "full_attention"]),
    st.recursive(
        st.one_of(st.none(), st.integers(-2, 70), st.text(max_size=3)),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ),
    st.fixed_dictionaries(
        {"rope_type": st.sampled_from(["default", "linear", "dynamic", "yarn", "longrope", "llama3", "x"])},
        optional={"factor": st.floats(), "rope_theta": st.integers(-1, 9), "long_factor": st.lists(st.integers(0, 3))},
    ),
)
EXTRA = (
    *("rope_scaling", "rope_parameters", "rope_theta", "layer_types", "pad_token_id", "head_dim", "sliding_window"),
    *("num_labels", "id2label", "auto_map", "attn_implementation", "_attn_implementation"),
    *("to_dict", "__class__", "attribute_map", "sub_configs", "per_layer_config", "model_type", "architectures"),
    *("dtype", "torch_dtype", "pruned_heads", "add_cross_attention", "is_encoder_decoder", "n_inner", "validate"),
)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A small config of some family with up to three settings dropped, replaced by junk, or added."""
    config = dict(CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))])
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.sampled_from([*sorted(config), *EXTRA]))
        if draw(st.booleans()):
            config[key] = draw(JUNK)
        else:
            config.pop(key, None)
    return config


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=mutated())
def test_a_mutated_config_builds_or_is_refused_in_one_line(tmp_path: Path, config: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    try:
        build(path, config)
        source_notes(resolve(str(path)))
        load_config(resolve(str(path))).to_json_string()
    except MemfitError as error:
        assert error.message and "\n" not in error.message


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=64) | st.text(max_size=64).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_an_object_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    try:
        assert isinstance(read_config(path), dict)
    except InputError as error:
        assert "\n" not in error.message


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "hidden_size": 128}')
    with pytest.raises(InputError, match="'hidden_size' stands in it twice, as 64 and as 128"):
        read_config(tmp_path / "config.json")
