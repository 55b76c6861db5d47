"""LLaMA-Factory's YAML: its keys, its own defaults, and what it makes of them.

Facts of its sources: a model is loaded in the type that it is stored in, and what is trained becomes fp32;
checkpointing is on unless it is switched off; rows are padded to a multiple of 8, packed ones are as long as
cutoff_len; 4-bit weights are nf4 with their scales quantised too, and peft's kbit preparation is not called.
"""

from __future__ import annotations

from typing import Any

from memfit.jobfiles.huggingface import (
    TRAINER_IDLE,
    TRAINER_KEYS,
    TRAINER_NEWER,
    TRAINER_REFUSED,
    autocast_of,
    note_reentrant,
    trainer_settings,
    written_optimizer,
)
from memfit.jobfiles.keys import NOT_MODELLED, Edits, JobFormat, KeyValues, Refused, file_keys
from memfit.models.registry import stored_type

KEYS = TRAINER_KEYS | file_keys({
    "text": {
        "model_name_or_path": None, "stage": "sft", "finetuning_type": "lora", "flash_attn": "auto",
        "quantization_method": "bnb", "quantization_type": "nf4",
    },
    "yes": {
        "do_train": False, "use_dora": False, "pure_bf16": False, "packing": None,
        "disable_gradient_checkpointing": False, "use_reentrant_gc": True, "double_quantization": True,
    },
    "whole": {"lora_rank": 8, "cutoff_len": 2048, "quantization_bit": None, "ray_num_workers": 1},
    "number": {"lora_dropout": 0.0},
    "names": {"lora_target": ("all",)},
})  # fmt: skip
IDLE = (
    "trust_remote_code template dataset eval_dataset dataset_dir media_dir max_samples val_size overwrite_cache "
    "preprocessing_* streaming buffer_size mix_strategy interleave_probs train_on_prompt mask_history tool_format "
    "default_system enable_thinking preserve_thinking tokenized_path data_shared_file_system ignore_pad_token_for_loss "
    "eval_num_beams plot_loss lora_alpha use_rslora loraplus_lr_ratio loraplus_lr_embedding pissa_* cache_dir "
    "use_fast_tokenizer split_special_tokens model_revision low_cpu_mem_usage infer_* offload_folder use_kv_cache "
    "*_hub_token print_param_status ray_* master_addr master_port use_swanlab swanlab_* compute_accuracy "
    "disable_shuffling early_stopping_steps include_effective_tokens_per_second freeze_vision_tower "
    "freeze_multi_modal_projector freeze_language_model image_* video_* export_* vllm_* sglang_* do_sample temperature "
    "top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty skip_special_tokens pref_* "
    "galore_* apollo_* badam_* freeze_trainable_* freeze_extra_modules oft_* module_dropout asft_alpha eaft_alpha "
    "train_from_scratch create_new_adapter enable_torch_profiler profiler_* fp8_*"
)
LOSS = "its loss is not the plain one, and keeps other tensors"
OPTIMIZER = "its optimizer is not modelled"
REFUSED = {
    **TRAINER_REFUSED,
    "enable_liger_kernel": TRAINER_REFUSED["use_liger_kernel"],
    "use_unsloth": Refused("Unsloth's kernels and checkpointing are its own"),
    "use_unsloth_gc": Refused("Unsloth's checkpointing puts activations on the host"),
    "neat_packing": Refused("samples kept apart in a row have attention masks or kernels of their own"),
    "shift_attn": Refused("shifted attention is not modelled"),
    "mixture_of_depths": Refused("mixture of depths is not modelled", (None,)),
    "upcast_layernorm": Refused("norms in fp32 beside 16-bit weights are not modelled"),
    "upcast_lmhead_output": Refused("logits that become fp32 by a hook are not modelled"),
    "resize_vocab": Refused("a larger vocabulary is not the model's own shape"),
    **dict.fromkeys(
        ("add_tokens", "add_special_tokens", "new_special_tokens_config"),
        Refused("more tokens are not the model's own shape", (None, "")),
    ),
    "rope_scaling": Refused("a longer context by scaling is not modelled", (None, "")),
    "additional_target": Refused("modules that are trained whole beside the adapters are not modelled", (None, "")),
    "adapter_name_or_path": Refused("adapters of before are not looked at", (None, "")),
    "use_llama_pro": Refused("blocks that are added are not modelled"),
    **dict.fromkeys(("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon"), Refused(OPTIMIZER)),
    **dict.fromkeys(("use_dft_loss", "use_asft_loss", "use_eaft_loss"), Refused(LOSS)),
    **dict.fromkeys(("use_mca", "use_megatron_bridge"), Refused("Megatron's engine is not modelled")),
    "use_hyper_parallel": Refused("its engine is not modelled"),
    "hyper_parallel_args": Refused("its engine is not modelled", (None, "")),
    "use_kt": Refused("KTransformers keeps experts on the host"),
    "use_v1_kernels": Refused("its own kernels are not modelled"),
    "fp8": Refused("training in 8-bit floats is not modelled"),
    "moe_aux_loss_coef": Refused("the loss of the routers of experts keeps their logits, which is not modelled",
                                 (None, 0, 0.0)),
    **dict.fromkeys(("ref_model", "reward_model"), Refused("a second model on the card is not modelled", (None, ""))),
}  # fmt: skip
ATTENTIONS = {"auto": "sdpa", "sdpa": "sdpa", "disabled": "eager", "fa2": "sdpa"}


def _settle(values: KeyValues) -> dict[str, Any]:
    made = {**trainer_settings(values), **_method(values), **_rows(values)}
    if values["model_name_or_path"]:
        made["model"] = values["model_name_or_path"]
    made["grad_checkpointing"] = made["grad_checkpointing"] or not values["disable_gradient_checkpointing"]
    values.defaults.pop("gradient_checkpointing", None)  # LLaMA-Factory goes by the other key
    reentrant = made["grad_checkpointing"] and values["use_reentrant_gc"] and made.get("parallel") is None
    note_reentrant(values, reentrant, made["kind"])
    attention = values["flash_attn"]
    if attention not in ATTENTIONS:
        values.refuse("flash_attn", Refused(f"attention by {attention} is not modelled", instead=("attention",)))
    if attention == "fa2":
        values.notes.append("flash_attn fa2 is planned as torch's own attention, with the mask where rows are padded")
    made["attention"] = ATTENTIONS.get(attention, "sdpa")
    if values["ray_num_workers"] > 1:
        made["world_size"] = values["ray_num_workers"]
    return made


def _method(values: KeyValues) -> dict[str, Any]:
    """Which weights are trained, and the types of all of them."""
    stage, method, autocast = values["stage"], values["finetuning_type"], autocast_of(values)
    if not values["do_train"]:
        values.refuse("do_train", "it is not yes: the job trains nothing")
    if stage not in ("sft", "pt"):
        values.refuse("stage", f"{stage} trains with more than one pass or model; sft and pt are planned")
    half = "bf16" if values["pure_bf16"] else autocast
    region = {"autocast": autocast} if autocast else {}
    if method != "lora" and values["quantization_bit"] is not None:
        values.refuse("quantization_bit", f"LLaMA-Factory quantises only what LoRA trains beside, not {method}")
    if method == "full":
        if not values["pure_bf16"]:  # what is trained becomes fp32
            return {"kind": "train", "precision": f"amp-{half}" if half else "fp32"}
        return {"kind": "train", "precision": _loaded(values, "bf16"), **region}
    if method != "lora":
        values.refuse("finetuning_type", f"{method} is not planned from a job file; full and lora are")
    loaded = _loaded(values, half or "bf16")
    targets = values["lora_target"]
    made = {
        "kind": "lora", "precision": loaded, **region, "rank": values["lora_rank"],
        "lora_dropout": values["lora_dropout"], "adapter": "dora" if values["use_dora"] else "lora",
        **({} if targets == ("all",) else {"target_modules": targets}),
    }  # fmt: skip
    return {**made, **_quantised(values, half or ("bf16" if loaded == "bf16" else "fp16"))}


def _loaded(values: KeyValues, half: str) -> str:
    """Since 0.9.4 weights are loaded in the type that they are stored in (model/loader.py), before in that of the
    region."""
    if "precision" in values.given:
        return half
    model = values.given.get("model") or values["model_name_or_path"]
    stored = stored_type(str(model)) if model else None
    if stored is None:
        values.notes.append(
            f"{NOT_MODELLED} the type in which the weights are stored, which LLaMA-Factory loads them in: no"
            f" config.json here says it, and {half} is taken (--precision says another)"
        )
    elif stored != half:
        values.notes.append(
            f"weights are loaded as they are stored, {stored}, as by LLaMA-Factory since 0.9.4; before that in {half}"
            f" (--precision {half})"
        )
    return stored or half


def _quantised(values: KeyValues, half: str) -> dict[str, Any]:
    bits = values["quantization_bit"]
    if bits is None:
        return {}
    method = values["quantization_method"].lower()
    if method not in ("bnb", "bitsandbytes") or bits not in (4, 8):
        values.refuse("quantization_bit", f"{bits} bits by {method} are not modelled; 4 and 8 by bnb are")
        return {}
    if bits == 8:
        return {"quant": "int8", "kbit_prepare": False}
    kind = values["quantization_type"]
    if kind not in ("nf4", "fp4"):
        values.refuse("quantization_type", f"{kind} is neither nf4 nor fp4")
        return {}
    return {
        "quant": kind, "double_quant": values["double_quantization"], "quant_compute": half, "kbit_prepare": False,
    }  # fmt: skip


def _rows(values: KeyValues) -> dict[str, Any]:
    """As long as they may be."""
    length, batch = values["cutoff_len"], values["per_device_train_batch_size"]
    if values["stage"] == "pt":
        packed = values["packing"]
        return {"seq_len": length - 1 if packed else length, "padding": packed is False and batch > 1}
    whole = -(-length // 8) * 8  # packed rows too: cutoff_len is lowered by one, and they are filled to one token more
    padded = whole != length or (not values["packing"] and batch > 1)
    if padded:
        values.notes.append(f"rows are padded, at most to {whole:,} tokens: a mask goes with them")
    return {"seq_len": whole, "padding": padded}


def _written_quant(value: str) -> Edits:
    return {"quantization_bit": 8} if value == "int8" else {"quantization_bit": 4, "quantization_type": value}


LLAMAFACTORY = JobFormat(
    name="llamafactory",
    title="LLaMA-Factory",
    keys=KEYS,
    idle=f"{TRAINER_IDLE} use_cache accelerator_config {IDLE}",
    refused=REFUSED,
    settle=_settle,
    newer=TRAINER_NEWER,
    written={
        "batch_size": "per_device_train_batch_size",
        "grad_accum": "gradient_accumulation_steps",
        "seq_len": "cutoff_len",
        "rank": "lora_rank",
        "optimizer": written_optimizer("optim"),
        "grad_checkpointing": lambda value: {"disable_gradient_checkpointing": not value},
        "attention": "flash_attn",
        "quant": _written_quant,
        "double_quant": "double_quantization",
        "kbit_prepare": lambda value: {},
    },
)  # fmt: skip
