"""The shipped models: every one builds, counts what was published, and has names of its own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.errors import InputError
from memfit.models import registry
from memfit.models.files import find_here, locate
from memfit.models.presets import (
    NO_REPOSITORIES,
    NOT_COMPARED,
    Preset,
    encoders,
    find_preset,
    name_key,
    presets,
    where_published,
)
from memfit.models.registry import OWN_TYPES, build_model, load_config, parameter_count, resolve, supports_sdpa

# The models that memfit's accuracy is measured on, written out from the measuring scripts:
# vocabulary, hidden, intermediate, layers, heads, key/value heads, head width, tied head.
MEASURED = {
    "llama3.2-1b": (128256, 2048, 8192, 16, 32, 8, 64, True),
    "llama3.2-3b": (128256, 3072, 8192, 28, 24, 8, 128, True),
    "llama2-7b": (32000, 4096, 11008, 32, 32, 32, 128, False),
    "llama2-13b": (32000, 5120, 13824, 40, 40, 40, 128, False),
    "smollm2-135m": (49152, 576, 1536, 30, 9, 3, 64, True),
    "tinyllama-1.1b": (32000, 2048, 5632, 22, 32, 4, 64, False),
    "qwen2.5-0.5b": (151936, 896, 4864, 24, 14, 2, 64, True),
    "qwen2.5-1.5b": (151936, 1536, 8960, 28, 12, 2, 128, True),
    "qwen2.5-7b": (152064, 3584, 18944, 28, 28, 4, 128, False),
    "gpt2": (50257, 768, None, 12, 12, None, 64, True),
    "gpt2-xl": (50257, 1600, None, 48, 25, None, 64, True),
    "opt-125m": (50272, 768, None, 12, 12, None, 64, True),
    "opt-1.3b": (50272, 2048, None, 24, 32, None, 64, True),
    "pythia-1b": (50304, 2048, 8192, 16, 8, None, 256, False),
    "gemma2-2b": (256000, 2304, 9216, 26, 8, 4, 256, True),
    "phi3-mini": (32064, 3072, 8192, 32, 32, 32, 96, False),
    "mistral-7b": (32000, 4096, 14336, 32, 32, 8, 128, False),
    "qwen3-0.6b": (151936, 1024, 3072, 28, 16, 8, 128, True),
}


COUNTED_AS = {
    **dict.fromkeys(("t5", "mt5", "pegasus", "mbart", "m2m_100"), "AutoModelForSeq2SeqLM"),
    **dict.fromkeys(("detr", "conditional_detr", "deformable_detr", "rt_detr"), "AutoModelForObjectDetection"),
    "audio-spectrogram-transformer": "AutoModelForAudioClassification",
    "depth_anything": "AutoModelForDepthEstimation",
    "vit_mae": "ViTMAEForPreTraining",
}


PHI3 = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "resid_pdrop", "embd_pdrop", "attention_dropout", "max_position_embeddings", "sliding_window",
    "tie_word_embeddings", "pad_token_id",
)  # fmt: skip


def built(preset: Preset) -> torch.nn.Module:
    source = resolve(preset.name)
    attention: Any = "sdpa" if supports_sdpa(load_config(source)) else "eager"
    with torch.device("meta"):
        return build_model(source, dtype=torch.bfloat16, attention=attention)


@pytest.mark.parametrize("preset", presets(), ids=lambda preset: preset.name)
def test_every_preset_builds_without_memory_and_has_its_published_parameter_count(preset: Preset) -> None:
    model = built(preset)

    assert parameter_count(model) == preset.parameters
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_counts_of_well_known_models_are_the_published_ones() -> None:
    counts = {preset.name: preset.parameters for preset in presets()}

    assert counts["gpt2"] == 124_439_808
    assert counts["basics-2.7b"] == 3_406_809_600
    assert counts["basics-10b"] == 12_832_823_808
    assert counts["gsa-512m"] == 183_662_144
    assert counts["llama-7b"] == counts["llama-2-7b"] == 6_738_415_616
    assert counts["llama-3.2-1b"] == 1_235_814_400
    assert counts["qwen2.5-7b"] == 7_615_616_512
    assert counts["llama-3.1-405b"] == 405_853_388_800


def test_there_are_seventy_five_published_configs_three_base_models_one_of_class_defaults_and_memfit_s_own() -> None:
    derived = [preset.name for preset in presets() if preset.source.startswith("derived: smollm2")]
    defaults = [preset.name for preset in presets() if preset.source.startswith("transformers")]

    own = [preset.name for preset in presets() if preset.model_type in OWN_TYPES]

    assert len(presets()) == 75 + 3 + 1 + len(own)
    assert sorted(own) == [
        "basics-10b", "basics-2.7b", "basics-large", "basics-medium", "basics-small", "basics-xl", "gsa", "gsa-1b",
        "gsa-1b-gather", "gsa-512m", "gsa-512m-copy1", "gsa-512m-copy1-gather", "gsa-512m-gather", "gsa-gather",
    ]  # fmt: skip
    assert sorted(derived) == ["smollm2-1.7b", "smollm2-135m", "smollm2-360m"]
    assert defaults == ["phi-3-mini"]


def test_phi_3_mini_is_what_its_class_makes_by_itself_and_the_published_one_has_a_window() -> None:
    from transformers import Phi3Config

    plain, published = (load_config(resolve(name)) for name in ("phi-3-mini", "phi-3-mini-4k"))
    own = Phi3Config()

    assert {key: getattr(plain, key) for key in PHI3} == {key: getattr(own, key) for key in PHI3}
    assert (plain.sliding_window, published.sliding_window) == (None, 2047)


def test_no_two_presets_answer_to_the_same_name() -> None:
    everyone = (*presets(), *encoders())
    owners = {(name_key(name), preset.name) for preset in everyone for name in (preset.name, *preset.aliases)}
    keys = Counter(key for key, _ in owners)

    assert [key for key, count in keys.items() if count > 1] == []


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # DeBERTa's own code
@pytest.mark.parametrize("preset", encoders(), ids=lambda preset: preset.name)
def test_every_encoder_builds_and_has_its_published_parameter_count(preset: Preset) -> None:
    import transformers

    settings = dict(preset.config)
    config = transformers.CONFIG_MAPPING[settings.pop("model_type")](**settings)
    if getattr(getattr(config, "backbone_config", None), "model_type", "") == "timm_backbone":
        pytest.importorskip("timm")
    kind = "AutoModelForImageClassification" if "num_labels" in settings else "AutoModel"
    kind = COUNTED_AS.get(preset.model_type, (settings.get("architectures") or [kind])[0])
    make: Any = getattr(transformers, kind)
    with torch.device("meta"):
        model = make.from_config(config) if kind.startswith("Auto") else make(config)
    # The checkpoint has a head of its own, which transformers ties until it sees it.
    of_t5 = preset.model_type in ("t5", "mt5") and not settings.get("tie_word_embeddings", True)
    head = settings["vocab_size"] * settings["d_model"] if of_t5 else 0
    assert parameter_count(model) + head == preset.parameters


def test_every_preset_says_where_its_numbers_come_from() -> None:
    assert all(preset.source for preset in (*presets(), *encoders()))


def test_a_config_that_no_public_copy_confirms_is_told_in_the_plan_and_no_other_is() -> None:
    told = {preset.name for preset in encoders() if NOT_COMPARED in registry.source_notes(resolve(preset.name))}

    assert told == {preset.name for preset in encoders() if preset.source.startswith("reconstructed")}
    assert "qwen1.5-7b" in told
    assert "siglip-so400m-patch14-384" not in told


@pytest.mark.parametrize(
    ("name", "activation", "of_scores"),
    [
        ("facebook/mbart-large-50", "gelu", 0.0), ("facebook/mbart-large-50-many-to-many-mmt", "relu", 0.0),
        ("facebook/mbart-large-cc25", "gelu", 0.0), ("facebook/mbart-large-en-ro", "gelu", 0.1),
    ],
)  # fmt: skip
def test_mbart_is_published_with_two_activations_and_two_rates_of_dropout(
    name: str, activation: str, of_scores: float
) -> None:
    preset = find_preset(name)

    assert preset is not None
    assert preset.config["activation_function"] == activation
    assert preset.config["attention_dropout"] == of_scores


@pytest.mark.parametrize("name", MEASURED)
def test_a_measured_model_has_the_sizes_that_were_measured(name: str) -> None:
    config = load_config(resolve(name))
    own_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = (
        config.vocab_size,
        config.hidden_size,
        getattr(config, "intermediate_size", None),
        config.num_hidden_layers,
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", None),
        own_width,
        config.tie_word_embeddings,
    )

    assert found == MEASURED[name]


@pytest.mark.parametrize(("name", "expected"), [("gpt2", (0.1, 0.1, 0.1)), ("gpt2-xl", (0.1, 0.1, 0.1))])
def test_gpt2_drops_out_a_tenth_at_three_places(name: str, expected: tuple[float, ...]) -> None:
    config = load_config(resolve(name))

    assert (config.attn_pdrop, config.embd_pdrop, config.resid_pdrop) == expected


def test_opt_drops_out_a_tenth_of_the_residual_and_pads_with_token_one() -> None:
    config = load_config(resolve("opt-1.3b"))

    assert (config.dropout, config.attention_dropout, config.pad_token_id) == (0.1, 0.0, 1)
    assert (config.ffn_dim, config.word_embed_proj_dim) == (8192, 2048)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-2-7b", "smollm2-135m", "qwen2.5-7b", "tinyllama-1.1b"])
def test_these_models_have_no_padding_token_so_their_embedding_has_no_padding_row(name: str) -> None:
    assert load_config(resolve(name)).pad_token_id is None


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma2", "phi3", "gpt_neox"])
def test_only_gpt2_opt_and_phi2_have_dropout_by_default(family: str) -> None:
    configs = [preset.config for preset in presets() if preset.model_type == family]
    rates = {value for config in configs for key, value in config.items() if "drop" in key}

    assert rates <= {0.0}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Llama-3.2-1B", "llama3.2 1b"),
        ("LLAMA_3_2_1B", "llama-3.2-1b"),
        ("llama3.2:1b", "llama-3.2-1b"),
        ("Qwen 2.5 7B", "qwen2.5-7b"),
        ("gemma2-2b", "gemma-2-2b"),
        ("GPT2 XL", "gpt2-xl"),
    ],
)
def test_case_and_punctuation_do_not_part_names(one: str, other: str) -> None:
    assert name_key(one) == name_key(other)


@pytest.mark.parametrize(("one", "other"), [("opt-1.3b", "opt-13b"), ("pythia-1.4b", "pythia-14m"), ("1-3b", "13b")])
def test_what_stands_between_two_digits_parts_names(one: str, other: str) -> None:
    assert name_key(one) != name_key(other)


def test_a_hub_id_is_known_without_its_owner() -> None:
    assert find_preset("Meta-Llama-3.1-8B") is find_preset("meta-llama/Llama-3.1-8B") is find_preset("llama-3.1-8b")


@pytest.mark.parametrize("name", ["opt-125", "llama-4-9b", "bert", ""])
def test_a_name_that_is_only_close_is_not_found(name: str) -> None:
    assert find_preset(name) is None


@pytest.mark.parametrize("known", sorted(NO_REPOSITORIES))
def test_an_id_that_the_hub_has_not_is_a_preset_with_a_repository(known: str) -> None:
    assert where_published(known) == f"huggyllama/llama-{known.removesuffix('-hf').rpartition('-')[2]}"


def test_a_repository_is_left_as_it_is() -> None:
    assert where_published("lmsys/vicuna-7b-v1.3") == "lmsys/vicuna-7b-v1.3"


def test_a_hint_names_the_repository_that_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("memfit.models.files.why_no_hub", lambda: "no network")
    for ask in (locate, find_here):
        with pytest.raises(InputError) as told:
            ask("meta-llama/Llama-13B", cache_dir=str(tmp_path))
        assert "`hf download huggyllama/llama-13b`" in str(told.value.hint)
        assert "hf download meta-llama" not in str(told.value.hint)
