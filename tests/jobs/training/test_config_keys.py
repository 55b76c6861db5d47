"""A setting is read under every name that people use for it, and a key that nobody reads is refused."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import pytest

from memfit.errors import MemfitError, UsageError
from memfit.jobs.training.config import TrainConfig
from memfit.jobs.training.config_file import ALONE, SECTIONS, canonical, config_from
from memfit.jobs.training.config_names import (
    ALIASES,
    FIXED,
    IGNORED,
    IN_SECTION,
    LOOSE,
    SECTION_ALIASES,
    SETTINGS,
    SEVERAL,
    SHORTHAND,
    type_of,
)

LORA_GUIDE: dict[str, Any] = {
    "model_name": "Qwen/Qwen2.5-7B-Instruct",
    "max_seq_length": 1536,
    "lora_config": {
        "r": 128, "lora_alpha": 256, "lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"], "bias": "none",
    },
    "training_config": {
        "learning_rate": 2e-4, "num_train_epochs": 15, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 16, "warmup_steps": 100, "weight_decay": 0.01, "max_grad_norm": 1.0,
        "logging_steps": 10, "save_steps": 200, "save_total_limit": 5, "fp16": False, "bf16": True,
        "optim": "adamw_torch", "lr_scheduler_type": "cosine", "seed": 42, "load_best_model_at_end": True,
        "gradient_checkpointing": True,
    },
}  # fmt: skip
GSA_GUIDE: dict[str, Any] = {
    "model": {
        "d_model": 512, "n_layers": 6, "n_heads": 8, "n_kv_heads": 2, "d_ffn": 1024, "vocab_size": 151936,
        "max_position_embeddings": 8192,
        "gsa": {
            "d_indexer": 64, "n_indexer_heads": 4, "k_base": 256, "k_min": 64, "k_max": 512, "use_value_gate": True,
            "use_output_gate": True, "use_adaptive_k": True,
        },
    },
    "training": {
        "optimizer": "adamw", "learning_rate": 3.0e-4, "min_learning_rate": 3.0e-5, "beta1": 0.9, "beta2": 0.95,
        "lr_scheduler": "cosine", "max_steps": 100000, "micro_batch_size": 2, "gradient_accumulation_steps": 32,
        "global_batch_size": 256, "max_seq_len": 1024, "precision": "bf16", "gradient_checkpointing": True,
        "grad_clip": 1.0, "indexer_lr_multiplier": 10.0,
    },
    "data": {
        "dataset": "cerebras/SlimPajama-627B", "tokenizer": "Qwen/Qwen2.5-7B", "num_workers": 4, "use_packing": True,
    },
    "logging": {"project": "gsa-pretrain", "log_interval": 10, "eval_interval": 1000, "save_interval": 5000},
}  # fmt: skip


def made(**document: Any) -> TrainConfig:
    return config_from({"model": "gpt2", **document})


def test_the_lora_guide_s_own_keys_are_read() -> None:
    config = config_from(LORA_GUIDE)
    assert (config.model.name, config.data.max_seq_len) == ("Qwen/Qwen2.5-7B-Instruct", 1536)
    assert (config.workload.kind, config.workload.rank, config.method.alpha) == ("lora", 128, 256)
    assert config.workload.target_modules == ("q_proj", "v_proj")
    assert (config.batch.micro_batch_size, config.batch.gradient_accumulation_steps) == (1, 16)
    assert (config.schedule.epochs, config.workload.optimizer, config.workload.precision) == (15, "adamw", "amp-bf16")
    assert config.workload.checkpointing == "full"
    assert (config.saving.save_steps, config.saving.save_total_limit, config.seed) == (200, 5, 42)
    assert "load_best_model_at_end is of no effect" in " ".join(config.notes())


def test_the_pre_training_guide_s_own_keys_are_read() -> None:
    config = config_from(GSA_GUIDE)
    assert config.model.name == "gsa"
    assert config.model.starts_from_scratch
    assert {"n_layers": 6, "d_ffn": 1024, "k_base": 256, "k_max": 512}.items() <= config.model.settings.items()
    assert {"indexer_dim": 64, "indexer_heads": 4, "adaptive_k": True}.items() <= config.model.settings.items()
    assert (config.batch.micro_batch_size, config.batch.global_batch_size) == (2, 256)
    assert (config.saving.save_steps, config.logging.logging_steps, config.data.num_workers) == (5000, 10, 4)
    assert (config.schedule.min_learning_rate, config.schedule.max_grad_norm) == (3e-5, 1.0)
    assert (config.data.source, config.model.tokenizer) == ("cerebras/SlimPajama-627B", "Qwen/Qwen2.5-7B")


def test_every_other_name_leads_to_a_setting_that_exists() -> None:
    for path in {*ALIASES.values(), *IN_SECTION.values(), *SHORTHAND.values(), *ALONE.values()}:
        if not path.startswith(f"{SETTINGS}."):
            assert type_of(path) is not None


def test_a_key_may_stand_alone_or_in_its_section_or_dotted() -> None:
    alone, nested, dotted = made(max_seq_len=64), made(data={"max_seq_len": 64}), made(**{"data.max_seq_len": 64})
    assert alone == nested == dotted


def test_a_name_alone_is_enough_where_a_section_has_one_main_setting() -> None:
    config = made(method="lora", data="builtin", memory="auto", optimizer="adamw", loss="chunked", parallel="fsdp2")
    assert (config.workload.kind, config.data.source, config.memory.auto) == ("lora", "builtin", True)
    assert (config.workload.optimizer, config.workload.loss, config.workload.parallel) == ("adamw", "chunked", "fsdp2")


@pytest.mark.parametrize(("document", "said", "hint"), [
    ({"max_seq_lenght": 3}, "unknown key 'max_seq_lenght'", "'max_seq_length' (which is data.max_seq_len)"),
    ({"data": {"sorce": "x"}}, "unknown key 'data.sorce'", "did you mean 'data.source'"),
    ({"training": {"batchsize": 1}}, "unknown key 'training.batchsize'", "(which is batch.micro_batch_size)"),
    ({"lora": {"rnak": 1}}, "unknown key 'lora.rnak'", "did you mean 'method.rank'"),
    ({"n_layers": 6}, "unknown key 'n_layers'", "did you mean 'model.n_layers'"),
    ({"training": {"k_base": 6}}, "unknown key 'training.k_base'", "did you mean 'model.k_base'"),
    ({"data": {"kind": "lora"}}, "unknown key 'data.kind'", "'method.kind'"),
    ({"nonsense": 1}, "unknown key 'nonsense'", "sections: model, method, data"),
    ({"max_memory": {0: "20GB"}}, "unknown key 'max_memory'", "memory.offload"),
    ({"device_map": "auto"}, "device_map can only be empty", "memory.offload"),
    ({"torch_compile": True}, "torch_compile can only be false", "--loop trainer --compile"),
])  # fmt: skip
def test_an_unknown_key_is_refused_with_the_nearest_name_and_its_section(
    document: dict[str, Any], said: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=said) as found:
        made(**document)
    assert hint in str(found.value.hint)


def test_all_keys_that_cannot_be_read_are_told_at_once() -> None:
    with pytest.raises(UsageError) as found:
        made(n_layers=6, max_memory={0: "20GB"}, device_map="auto", training={"batchsize": 1}, max_seq_len="long")
    named = "'n_layers', 'max_memory', 'device_map', 'training.batchsize'"
    assert found.value.message == f"4 keys are not read: {named}"
    first, second, third, fourth, sections = str(found.value.hint).splitlines()
    assert first.startswith("n_layers: did you mean 'model.n_layers'")
    assert "memory.offload" in second and "memory.offload" in third and "batch.micro_batch_size" in fourth
    assert sections.startswith("sections: model, method")


FLAT_LORA: dict[str, Any] = {"r": 128, "lora_alpha": 256, "lora_dropout": 0.05, "target_modules": ["q_proj"],
                             "adapter_dtype": "same", "rank": 8, "lora_target": "all-linear"}  # fmt: skip


@pytest.mark.parametrize("key", FLAT_LORA)
def test_a_setting_of_adapters_alone_makes_adapters(key: str) -> None:
    assert made(**{key: FLAT_LORA[key]}).workload.kind == "lora"
    assert config_from({"model": "gpt2"}, over={key: FLAT_LORA[key]}).workload.kind == "lora"


def test_the_lora_guide_s_keys_make_adapters_without_a_section_too() -> None:
    flat = {**LORA_GUIDE, **LORA_GUIDE["lora_config"], **LORA_GUIDE["training_config"]}
    del flat["lora_config"], flat["training_config"]
    assert dataclasses.replace(config_from(flat), remarks=()) == dataclasses.replace(
        config_from(LORA_GUIDE), remarks=()
    )


def test_where_all_weights_are_asked_for_the_adapters_settings_are_named_as_unused() -> None:
    config = made(method="full", r=128)
    assert config.workload.kind == "train"
    assert "method.rank is of no effect with method: full" in config.notes()
    assert not made(r=None).notes()[1:] and made(r=None).workload.kind == "train"


def test_an_unknown_setting_of_gsa_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match="k_bse") as found:
        config_from({"model": "gsa", "gsa": {"k_bse": 3}})
    assert "'model.k_base'" in str(found.value.hint)


def test_a_value_given_twice_must_agree() -> None:
    assert made(max_seq_len=64, max_seq_length=64).data.max_seq_len == 64
    with pytest.raises(UsageError, match=r"max_seq_len is 64 and max_seq_length is 65, and both mean"):
        made(max_seq_len=64, max_seq_length=65)


def test_what_is_set_on_the_command_line_replaces_what_the_file_says_under_any_name() -> None:
    config = config_from({"model": "gpt2", "max_seq_length": 2048}, over={"max_seq_len": 64})
    assert config.data.max_seq_len == 64


@pytest.mark.parametrize(("document", "precision"), [
    ({"bf16": True}, "amp-bf16"), ({"fp16": True}, "amp-fp16"), ({"mixed_precision": "bf16"}, "amp-bf16"),
    ({"bf16": True, "method": "lora"}, "amp-bf16"), ({"fp16": True, "r": 8}, "amp-fp16"),
    ({"bf16": True, "fp16": False}, "amp-bf16"), ({"bf16": True, "torch_dtype": "float32"}, "amp-bf16"),
    ({"bf16": True, "torch_dtype": "bfloat16"}, "bf16"), ({"fp16": True, "dtype": "float16", "r": 8}, "fp16"),
    ({"torch_dtype": "torch.bfloat16"}, "bf16"), ({"bf16": False, "torch_dtype": "bfloat16"}, "bf16"),
    ({"bf16": False}, "fp32"), ({"fp16": False}, "fp32"), ({"mixed_precision": "no"}, "fp32"), ({}, "bf16"),
    ({"fp16": False, "precision": "amp-bf16"}, "amp-bf16"), ({"mixed_precision": "no", "dtype": "bf16"}, "bf16"),
])  # fmt: skip
def test_precision_under_hugging_face_s_names(document: dict[str, Any], precision: str) -> None:
    assert made(**document).workload.precision == precision


def test_autocast_that_16_bit_weights_do_not_get_is_said() -> None:
    told = " ".join(made(fp16=True, torch_dtype="float16", method="lora").notes())
    assert "fp16 is of no effect over fp16 weights (torch_dtype)" in told and "without a gradient scaler" in told


def test_a_remark_on_what_was_replaced_is_not_made() -> None:
    document = {"model": "gpt2", "fp16": True, "torch_dtype": "float16", "r": 8}
    config = config_from(document, over={"precision": "bf16"})
    assert (config.workload.precision, config.remarks) == ("bf16", ())


def test_autocast_over_a_frozen_base_model_in_fp32_is_said() -> None:
    assert "the frozen base model is in fp32 too; bf16 halves it" in " ".join(made(bf16=True, r=8).notes())


@pytest.mark.parametrize("document", [
    {"bf16": True, "torch_dtype": "float16"}, {"bf16": False, "fp16": False, "precision": "amp-bf16"},
    {"mixed_precision": "no", "precision": "amp-fp16"},
    {"bf16": True, "fp16": True},
])  # fmt: skip
def test_precisions_that_contradict_each_other_are_refused(document: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"do not agree|both mean"):
        made(**document)


@pytest.mark.parametrize(("document", "said"), [
    ({"loss_chunk": 16}, "loss.chunk is of no effect without loss: chunked"),
    ({"lr_scheduler": "constant", "warmup_steps": 5}, "warmup_steps is of no effect with lr_scheduler constant"),
    ({"warmup_ratio": 0.1, "warmup_steps": 5}, "schedule.warmup_ratio is of no effect beside warmup_steps"),
    ({"optimizer": "sgd", "beta1": 0.8, "eps": 1e-6}, "optimizer.beta1, optimizer.eps are of no effect with sgd"),
    ({"device": "cpu", "alloc_conf": "expandable_segments:True"}, "memory.alloc_conf is of no effect on the CPU"),
])  # fmt: skip
def test_a_setting_that_this_job_does_not_use_is_named(document: dict[str, Any], said: str) -> None:
    assert said in " ".join(made(**document).notes())


def test_numbers_that_yaml_takes_for_text_are_numbers() -> None:
    assert made(learning_rate="3e-4").schedule.learning_rate == 3e-4


def test_a_key_without_a_value_is_the_default() -> None:
    assert made(num_workers=None, max_steps=None) == made()


def test_max_steps_of_minus_one_means_by_epochs() -> None:
    assert made(max_steps=-1, num_train_epochs=2).schedule.epochs == 2


@pytest.mark.parametrize(("document", "said"), [
    ({"max_seq_len": "long"}, "data.max_seq_len 'long' is not a whole number"),
    ({"max_seq_len": True}, "is not a whole number"),
    ({"learning_rate": -1}, "schedule.learning_rate -1 is not above 0"),
    ({"learning_rate": float("nan")}, "is not a number"),
    ({"learning_rate": 10**400}, r"10000000000000000000\.\.\. is not a number of this size"),
    ({"optimizer": {"name": "sgd", "momentum": 10**400}}, "is not a number of this size"),
    ({"precision": "bf15"}, "precision 'bf15' is not one of"),
    ({"precision": "fp16"}, "weights that are themselves fp16 cannot be trained"),
    ({"offload": ["weights"]}, "only frozen layers can lie on the host"),
    ({"offload": ["gradients"]}, "memory.offload 'gradients' is not one of"),
    ({"packing": "maybe"}, "data.packing is true or false"),
    ({"epochs": 1, "max_steps": 2}, "both say how long"),
    ({"target_modules": []}, "not a list of module names"),
    ({"model": {"name": "gpt2", "n_layers": 3}}, "fit its own shape only"),
    ({"model": {"settings": 3}}, "not a mapping"),
    ({"model": ""}, "no model is named"),
    ({"min_learning_rate": 1.0}, "is above learning_rate"),
    ({"betas": [0.9]}, "not a list of two numbers"),
    ({"report_to": "carrier pigeon"}, "not one of tensorboard"),
])  # fmt: skip
def test_a_value_that_cannot_be_is_refused(document: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        made(**document)


ODD = [None, [], {}, "x", "", -1, 0, 1.5, True, [1], ["a"], {"a": 1}, {1: 2}, float("inf"), 10**30, [[1]], [None]]
EVERY_KEY = [*ALIASES, *ALONE, *SECTIONS, *SEVERAL, *IGNORED, *FIXED, *LOOSE, *SECTION_ALIASES, "a.b.c", ".", "model."]


@pytest.mark.parametrize("model", ["gpt2", "gsa"])
def test_no_value_of_any_key_is_more_than_an_error_for_a_person(model: str) -> None:
    for key in EVERY_KEY:
        for value in ODD:
            with suppress(MemfitError):
                config_from({"model": model, key: value})


def test_the_sections_are_those_of_the_dataclass() -> None:
    assert SECTIONS == (
        "model", "method", "data", "batch", "schedule", "quant", "memory", "optimizer", "loss", "parallel",
        "logging", "saving",
    )  # fmt: skip


def test_gsa_s_settings_are_those_of_its_config() -> None:
    from transformers import PreTrainedConfig

    from memfit.models.gsa import GsaConfig
    from memfit.models.presets import GSA_SETTINGS

    of_any = {each.name for each in dataclasses.fields(PreTrainedConfig)}
    assert sorted(GSA_SETTINGS) == sorted({each.name for each in dataclasses.fields(GsaConfig)} - of_any)


def test_constants_of_a_config_py_are_keys_and_sections() -> None:
    made = config_from({
        "MODEL_NAME": "gpt2", "MAX_SEQ_LENGTH": 512, "LORA_CONFIG": {"r": 128, "lora_alpha": 256},
        "TRAINING_CONFIG": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 16},
    })  # fmt: skip
    assert (made.model.name, made.data.max_seq_len, made.workload.rank, made.method.alpha) == ("gpt2", 512, 128, 256)
    assert (made.batch.micro_batch_size, made.batch.gradient_accumulation_steps) == (2, 16)


def test_a_section_that_is_misspelt_is_told_by_its_own_name() -> None:
    with pytest.raises(UsageError) as raised:
        config_from({"model": "gpt2", "lora_confg": {"r": 8}, "trainig_config": {"lr": 1e-4}})
    assert "lora_confg: did you mean 'lora_config' (which is method)" in str(raised.value.hint)
    assert "trainig_config: did you mean 'training_config'" in str(raised.value.hint)


@pytest.mark.parametrize("key", ["quantization_config", "bnb_config", "saving", "training.quantization_config"])
def test_a_number_in_place_of_a_section_is_no_unknown_key(key: str) -> None:
    with pytest.raises(UsageError, match=f"^{key} is 5, not a section of keys and values"):
        canonical({key: 5})
