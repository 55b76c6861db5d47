"""Plans of loops, adapters and models as people have them: outputs, the cache, peft, heads, pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plans import plan, small_llama

import memfit
from memfit.errors import UsageError
from memfit.fitting.levers import levers_for
from memfit.jobs.settings import ADAPTERS, NO_RANK, NO_TARGETS, peft_type
from memfit.jobs.workload import Workload
from memfit.models.heads import picture, size_of

LOGITS = 4 * 128 * 512 * 2
"""Of the small model: rows, tokens, words, bytes of bf16."""
T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 512, "d_model": 64, "d_kv": 16,
    "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "is_encoder_decoder": True,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
BERT = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 512, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
VIT = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32, "patch_size": 16, "num_channels": 3,
}  # fmt: skip
LLAVA = {
    "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "image_token_index": 500,
    "text_config": {
        "model_type": "llama", "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 56, "patch_size": 14,
    },
}  # fmt: skip


def folder(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


# -- the loop ----------------------------------------------------------------------------------------------------------


def test_a_plain_loop_keeps_its_outputs_and_the_trainer_drops_them() -> None:
    assert Workload(kind="train", model="gpt2").outputs == "kept"
    assert Workload(kind="lora", model="gpt2", loop="trainer").outputs == "dropped"


def test_kept_outputs_hold_the_logits_while_the_next_forward_pass_runs() -> None:
    kept, dropped = plan("train"), plan("train", outputs="dropped")
    second = [next(p for p in each.report.phases if (p.name, p.step) == ("forward", 2)) for each in (kept, dropped)]
    assert second[0].allocated_bytes - second[1].allocated_bytes >= LOGITS
    assert kept.to_json()["workload"]["outputs"] == "kept"
    assert any("keeps the model's outputs" in note for note in kept.notes)


@pytest.mark.parametrize("loop", ["trainer", "memfit"])
def test_outputs_cannot_be_kept_in_a_loop_that_drops_them(loop: str) -> None:
    with pytest.raises(UsageError, match="--outputs kept has no effect"):
        memfit.predict(kind="train", model="gpt2", loop=loop, outputs="kept")
    assert Workload.from_mapping({"kind": "train", "model": "gpt2", "loop": loop, "outputs": "dropped"})


def test_dropping_outputs_is_the_first_lever_and_costs_nothing() -> None:
    first = levers_for(Workload(kind="train", model="gpt2"))[0]
    assert (first.name, first.cost, dict(first.settings)) == ("outputs dropped", "free", {"outputs": "dropped"})
    assert "del outputs" in first.says
    dropped = Workload(kind="train", model="gpt2", outputs="dropped")
    assert "outputs" not in {lever.group for lever in levers_for(dropped)}


def test_a_cache_is_built_in_training_and_kept_by_the_outputs() -> None:
    with_cache, without = plan("train", use_cache=True), plan("train")
    assert with_cache.peak.allocated_bytes > without.peak.allocated_bytes
    assert any("config.use_cache is off" in note for note in without.notes)


def test_a_cache_that_something_switches_off_is_refused() -> None:
    for beside in ({"grad_checkpointing": True}, {"loop": "trainer"}):
        with pytest.raises(UsageError, match="--use-cache has no effect"):
            plan("train", use_cache=True, **beside)


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_every_adapter_is_one_of_the_installed_peft_with_the_settings_that_are_said_of_it() -> None:
    from dataclasses import fields

    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    configs: dict[Any, Any] = dict(PEFT_TYPE_TO_CONFIG_MAPPING)
    for adapter in ADAPTERS:
        if peft_type(adapter) not in configs:
            continue  # of a newer peft
        names = {field.name for field in fields(configs[peft_type(adapter)])}
        assert ("r" in names) == (adapter not in NO_RANK), adapter
        assert adapter in NO_TARGETS or "target_modules" in names, adapter


@pytest.mark.parametrize("adapter", ["dora", "ia3", "vera", "oft", "boft", "adalora", "prefix", "prompt", "ln-tuning"])
def test_an_adapter_is_planned_by_pefts_own_code(adapter: str) -> None:
    made = plan("lora", adapter=adapter, seq_len=64)
    assert 0 < made.trainable_parameters < made.parameters
    assert made.to_json()["workload"]["adapter"] == adapter


def test_what_an_adapter_is_told_reaches_peft_and_the_plan() -> None:
    small, large = (plan("lora", adapter="vera", adapter_config={"r": rank}, seq_len=64) for rank in (8, 64))
    assert small.trainable_parameters < large.trainable_parameters
    assert small.workload["rank"] == 8
    by_text = plan("lora", adapter="loha", adapter_config="alpha=4,module_dropout=0.1", seq_len=64)
    assert by_text.workload["adapter_config"] == {"alpha": 4, "module_dropout": 0.1}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"adapter": "prompt", "rank": 8}, "--rank 8 has no effect: --adapter prompt has no rank"),
        ({"adapter": "prefix", "target_modules": ["q_proj"]}, "--target-modules q_proj has no effect"),
        ({"adapter": "vera", "lora_dropout": 0.1}, "--lora-dropout 0.1 has no effect"),
        ({"adapter": "vera", "adapter_config": {"rr": 8}}, "no key of --adapter-config called 'rr'"),
        ({"adapter": "vera", "rank": 8, "adapter_config": {"r": 9}}, "both say it"),
        ({"adapter": "dora", "loop": "memfit"}, "has plain LoRA only"),
        ({"adapter": "lara"}, "--adapter 'lara' is not one of"),
        ({"adapter": "adaption-prompt"}, "needs adapter_layers"),
    ],
)
def test_what_contradicts_an_adapter_is_one_clear_error(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(memfit.MemfitError) as refused:
        memfit.predict(kind="lora", model=small_llama(), seq_len=64, **settings)
    assert said in str(refused.value)


def test_a_saved_adapter_config_is_read_and_must_be_of_that_adapter(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"peft_type": "VERA", "r": 32, "inference_mode": True, "task_type": "CAUSAL_LM"}))
    assert Workload(kind="lora", model="gpt2", adapter="vera", adapter_config=str(file)).rank == 32
    with pytest.raises(UsageError, match="peft_type"):
        Workload(kind="lora", model="gpt2", adapter="oft", adapter_config=str(file))


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["forward", "train", "lora"])
def test_an_encoder_decoder_writes_a_text_of_its_own_length(kind: str, tmp_path: Path) -> None:
    model = folder(tmp_path, T5)
    usual = memfit.predict(kind=kind, model=model, batch_size=2, seq_len=64)
    longer = memfit.predict(kind=kind, model=model, batch_size=2, seq_len=64, target_len=512)
    assert usual.workload["target_len"] == 128
    assert longer.peak.allocated_bytes > usual.peak.allocated_bytes


def test_a_head_that_is_named_takes_the_place_of_the_configs(tmp_path: Path) -> None:
    model = folder(tmp_path, BERT)
    masked = memfit.predict(kind="train", model=model, batch_size=2, seq_len=64)
    classes = memfit.predict(kind="train", model=model, batch_size=2, seq_len=64, head="sequence-classification")
    assert classes.parameters != masked.parameters
    assert classes.peak.allocated_bytes < masked.peak.allocated_bytes


def test_an_encoder_is_built_with_the_same_head_in_a_run_as_in_a_plan(tmp_path: Path) -> None:
    import torch

    from memfit.jobs.build import build_base_model
    from memfit.jobs.training.config import ModelConfig

    model = folder(tmp_path, BERT)
    built = build_base_model(ModelConfig(name=model, from_scratch=True), None, torch.float32)
    assert type(built).__name__ == "BertForMaskedLM"


def test_pictures_are_classified_without_text(tmp_path: Path) -> None:
    made = memfit.predict(kind="train", model=folder(tmp_path, VIT), batch_size=2)
    assert any("--seq-len has no effect" in note for note in made.notes)


@pytest.mark.parametrize("kind", ["forward", "train", "lora"])
def test_pictures_stand_in_the_text_by_the_rule_of_the_processor(kind: str, tmp_path: Path) -> None:
    made = memfit.predict(kind=kind, model=folder(tmp_path, LLAVA), batch_size=2, seq_len=64)
    assert made.workload["images"] == 1
    assert any("each 16 (56x56 pixels)" in note for note in made.notes)


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        (T5, {"images": 1}, "--images has no effect"),
        (BERT, {"target_len": 8}, "--target-len has no effect"),
        (LLAVA, {"image_size": "640x480"}, "is given 56x56, whatever the picture's size"),
        (LLAVA, {"images": 5}, "has no room for text: 5 pictures are 80 tokens"),
        (LLAVA, {"loop": "trainer"}, "not for a model that reads pictures and text"),
    ],
)
def test_a_setting_that_a_model_has_no_use_for_is_refused(
    config: dict[str, Any], settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        memfit.predict(kind="train", model=folder(tmp_path, config), batch_size=1, seq_len=64, **settings)
    assert said in str(refused.value)


def test_a_picture_keeps_its_shape_in_qwens_patches() -> None:
    from transformers import Qwen2VLConfig

    one = picture(Qwen2VLConfig(), "640x480")
    assert (one.grid, one.tokens, one.pixels) == ((1, 34, 46), 391, (1564, 1176))
    with pytest.raises(UsageError, match="WIDTHxHEIGHT"):
        size_of("640")
