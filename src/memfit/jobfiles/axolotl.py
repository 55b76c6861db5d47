"""Axolotl's YAML: its keys, its own defaults, and what it makes of them.

Facts of its sources: a model is loaded in the type of bf16 or fp16, adapters become fp32 by peft; with adapters, norms
and embeddings are put back into that type after kbit preparation; packed samples lie in one row of micro_batch_size x
sequence_len tokens where the attention takes rows of many samples; rows are padded to a multiple of 64.
"""

from __future__ import annotations

from typing import Any

from memfit.jobfiles.huggingface import (
    ENGINE,
    TRAINER_IDLE,
    TRAINER_REFUSED,
    fsdp_settings,
    note_reentrant,
    optimizer_setting,
    written_optimizer,
)
from memfit.jobfiles.keys import NOT_MODELLED, Edits, JobFormat, KeyValues, Refused, file_keys

FLAGS_OF_ATTENTION = {
    "xformers_attention": "xformers", "sage_attention": "sage", "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
}  # fmt: skip
"""Older names of attn_implementation, the first that is on."""
OTHER_HEADS = ("Classification", "QuestionAnswering", "MaskedLM", "MultipleChoice")
FUSED = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
FOR_MANY_SAMPLES = ("flash_attention_2", "flash_attention_3")
BATCH_KEYS = ("micro_batch_size", "gradient_accumulation_steps", "batch_size")
PLANNED = {"sdpa": "sdpa", "eager": "eager", "flash_attention_2": "sdpa", "flash_attention_3": "sdpa"}

KEYS = file_keys({
    "text": {
        "base_model": None, "adapter": None, "model_type": None, "optimizer": "adamw_torch_fused",
        "attn_implementation": None,
    },
    "yes": {
        "load_in_8bit": False, "load_in_4bit": False, "lora_target_linear": False, "peft_use_dora": False,
        "peft_autocast_adapter_dtype": True, "sample_packing": False, "multipack_real_batches": None,
        "pad_to_sequence_len": None, "fp16": False, "bfloat16": False, "float16": False,
        **dict.fromkeys((*FLAGS_OF_ATTENTION, *FUSED), False),
    },
    "whole": {
        "lora_r": None, "sequence_len": 512, "pad_to_multiple_of": 64, "micro_batch_size": 1,
        "gradient_accumulation_steps": None, "batch_size": None, "eval_batch_size": None, "fsdp_version": None,
    },
    "number": {"lora_dropout": 0.0, "weight_decay": 0.0, "max_grad_norm": 1.0},
    "names": {"lora_target_modules": ()},
    "any": {
        "optim_args": None, "bf16": "auto", "gradient_checkpointing": False, "gradient_checkpointing_kwargs": None,
        "fsdp": None, "fsdp_config": None,
    },
})  # fmt: skip
IDLE = (
    "strict base_model_config base_model_ignore_patterns tokenizer_* processor_* trust_remote_code datasets "
    "test_datasets dataset_* shuffle_* val_set_size pretraining_dataset skip_prepare_dataset push_dataset_to_hub "
    "num_dataset_shards_to_save output_dir lora_alpha lora_fan_in_fan_out lora_model_dir peft_use_rslora "
    "peft_init_lora_weights loraplus_* train_on_inputs num_epochs lr_scheduler* cosine_* lr_* learning_rate "
    "embedding_lr* adam_beta3 adam_epsilon2 wandb_* mlflow_* comet_* use_wandb use_comet use_mlflow "
    "use_tensorboard float32 chat_template* special_tokens default_system_message eot_tokens saves_per_epoch "
    "evals_per_epoch early_stopping_patience loss_watchdog_* excess_length_strategy min_sample_len sample_packing_* "
    "eval_* is_*_derived_model hf_use_auth_token auto_resume_from_checkpoints gc_steps gc_collect_steps "
    "jagged_* streaming* pretrain_multipack_* pretraining_sample_concatenation curriculum_sampling device local_rank "
    "world_size ddp merge_* do_*_eval bench_* mean_resizing_embeddings fix_untrained_tokens profiler_* include_tkps "
    "experimental_skip_move_to_device low_cpu_mem_usage axolotl_config_path total_* embeddings_skip_upcast "
    "qlora_sharded_model_loading tf32 warmup_* gpu_memory_limit max_memory device_map rl_beta version"
)
FUSED_WORDS = "fused LoRA kernels keep other tensors than peft's layers"
REFUSED = {
    **{name: each for name, each in TRAINER_REFUSED.items() if name != "use_liger_kernel"},
    "deepspeed": Refused(ENGINE, (None, "", False), instead=("parallel",)),
    "torch_compile": Refused("Axolotl compiles with settings of its own: give --compile", instead=("compile",)),
    "torch_compile_backend": Refused("only torch.compile by inductor is modelled", (None, "inductor")),
    "torch_compile_mode": Refused("only torch.compile's default mode is modelled", (None, "default")),
    "rl": Refused("it trains with more than one pass or model; supervised training is planned", (None, "")),
    **dict.fromkeys(("reward_model", "process_reward_model"), Refused("reward models are not planned")),
    "plugins": Refused("plugins replace kernels and losses of the model", (None, [], "")),
    "unfrozen_parameters": Refused("training chosen weights only is not modelled", (None, [])),
    "lora_modules_to_save": Refused("modules that are trained whole beside the adapters are not modelled", (None, [])),
    "lora_target_parameters": Refused("adapters on bare parameters are not modelled", (None, [], "")),
    "lora_rank_pattern": Refused("ranks that differ by module are not modelled", (None, {})),
    "peft_layers_to_transform": Refused("adapters in chosen blocks are not modelled", (None, [])),
    "peft_layer_replication": Refused("repeated blocks are not modelled", (None, [])),
    "peft": Refused("LoftQ is not modelled", (None, {})),
    "peft_trainable_token_indices": Refused("trained tokens are not modelled", (None, [])),
    "bnb_config_kwargs": Refused("other settings of bitsandbytes are not read", (None, {})),
    "gptq": Refused("name the quantised checkpoint as --model with `memfit plan lora`"),
    "relora": Refused("ReLoRA is not modelled"),
    "lora_on_cpu": Refused("adapters on the host are not modelled"),
    "batch_flattening": Refused("rows without padding have attention kernels of their own"),
    "flash_attn_cross_entropy": Refused("its fused loss is not modelled"),
    "flash_attn_rms_norm": Refused("its fused norm is not modelled"),
    **dict.fromkeys(("flash_attn_fuse_mlp", "flash_attn_fuse_qkv"), Refused("its fused layers are not modelled")),
    "chunked_cross_entropy": Refused("its chunked loss is not memfit's"),
    "cut_cross_entropy": Refused("its fused loss is not modelled"),
    "tiled_mlp": Refused("MLPs in tiles are not modelled"),
    "use_eaft": Refused("its loss is not the plain one"),
    "use_kernels": Refused("kernels of the hub are not modelled"),
    "activation_offloading": Refused("activations on the host are not modelled as Axolotl puts them there"),
    "layer_offloading": Refused("blocks on the host are not modelled as Axolotl puts them there"),
    "selective_checkpointing": Refused("what its selective checkpointing keeps is not modelled"),
    "fp8": Refused("training in 8-bit floats is not modelled"),
    "qat": Refused("quantisation-aware training is not modelled", (None,)),
    "fp32_norms": Refused("norms in fp32 beside 16-bit weights are not modelled"),
    "quantize_moe_experts": Refused("experts that are quantised by Axolotl are not modelled"),
    "sequence_parallel_degree": Refused("rows shared out over GPUs are not modelled", (None, 0, 1)),
    "context_parallel_size": Refused("rows shared out over GPUs are not modelled", (None, 0, 1)),
    "tensor_parallel_size": Refused("tensor parallelism is not modelled", (None, 0, 1)),
    "dp_replicate_size": Refused("two ways of sharding at once are not modelled", (None, 0, 1)),
    "tokens": Refused("more tokens are not the model's own shape", (None, [])),
    "resize_token_embeddings_to_32x": Refused("a larger vocabulary is not the model's own shape"),
    "shrink_embeddings": Refused("a smaller vocabulary is not the model's own shape"),
    "overrides_of_model_config": Refused("another shape than the model's own is not looked at", (None, {})),
    "overrides_of_model_kwargs": Refused("another shape than the model's own is not looked at", (None, {})),
    "use_pose": Refused("PoSE is not modelled"),
}


def _settle(values: KeyValues) -> dict[str, Any]:
    attention, half = _attention(values), _half(values)
    made: dict[str, Any] = {
        "loop": "trainer", "clip_grad": values["max_grad_norm"] > 0, **_checkpointing(values),
        **optimizer_setting(values, "optimizer"), **fsdp_settings(values, values["fsdp_version"] or 1),
        **_method(values, half, attention), **_rows(values, attention),
        "attention": PLANNED.get(attention or "sdpa", "sdpa"),
    }  # fmt: skip
    if values["base_model"]:
        made["model"] = values["base_model"]
    if (values["model_type"] or "").endswith(OTHER_HEADS):
        values.refuse("model_type", "a model with another head than that of a language model is not planned")
    return made


def _attention(values: KeyValues) -> str | None:
    said = values["attn_implementation"]
    found = said or next((name for key, name in FLAGS_OF_ATTENTION.items() if values[key]), None)
    key = "attn_implementation" if said else next((k for k, name in FLAGS_OF_ATTENTION.items() if name == found), "")
    if found is not None and found not in PLANNED:
        values.refuse(key, Refused(f"attention by {found} is not modelled", instead=("attention",)))
    if found in FOR_MANY_SAMPLES:
        values.notes.append(f"{found} is planned as torch's own flash kernel")
    return found


def _half(values: KeyValues) -> tuple[str | None, str | None]:
    """(the type of the weights, that of the autocast region); None is fp32, and no region."""
    bf16, fp16 = values["bf16"], values["fp16"]
    if bf16 not in (True, False, "auto", "full"):
        values.refuse("bf16", "it is yes, no or auto")
    region = "fp16" if fp16 and bf16 is not True else "bf16" if bf16 else None
    if bf16 == "auto" and not fp16:
        values.notes.append("bf16 auto: taken as yes, as on every card since Ampere")
    loaded = "bf16" if region == "bf16" or values["bfloat16"] else None
    return loaded or ("fp16" if region == "fp16" or values["float16"] or values["load_in_8bit"] else None), region


def _method(values: KeyValues, half: tuple[str | None, str | None], attention: str | None) -> dict[str, Any]:
    loaded, region = half
    types = {"precision": loaded or "fp32", **({"autocast": region} if region else {})}
    adapter = values["adapter"]
    if adapter is None:
        if loaded is not None and attention not in FOR_MANY_SAMPLES:
            why = "without a flash attention (flash_attention: true) Axolotl trains norms and embeddings in fp32 beside"
            values.refuse("attn_implementation", f"{why} {loaded} weights")
        return {"kind": "train", **types}
    if adapter not in ("lora", "qlora"):
        values.refuse("adapter", f"the adapter {adapter} is not planned from a job file")
    _fused_kernels(values)
    rank, targets = values["lora_r"], values["lora_target_modules"]
    if rank is None:
        values.refuse("adapter", "lora_r is not said")
    everywhere = values["lora_target_linear"] or values.document.get("lora_target_modules") == "all-linear"
    if not everywhere and not targets:
        why = "neither lora_target_linear nor lora_target_modules says where"
        values.refuse("adapter", Refused(why, instead=("target_modules",)))
    return {
        "kind": "lora", **types, "rank": rank, "lora_dropout": values["lora_dropout"],
        "adapter": "dora" if values["peft_use_dora"] else "lora",
        "adapter_dtype": "fp32" if values["peft_autocast_adapter_dtype"] else "same",
        **({} if everywhere else {"target_modules": targets}), **_quantised(values, loaded),
    }  # fmt: skip


def _fused_kernels(values: KeyValues) -> None:
    """Axolotl switches them on by itself, unless one of them is said or the weights are of 8 bits."""
    said = [name for name in FUSED if values.has(name)]
    for name in (name for name in said if values[name]):
        values.refuse(name, FUSED_WORDS)
    if not said and not values["load_in_8bit"]:
        values.notes.append(
            f"{NOT_MODELLED} {FUSED_WORDS}, and Axolotl switches them on by itself (lora_mlp_kernel: false does not)"
        )


def _quantised(values: KeyValues, loaded: str | None) -> dict[str, Any]:
    four, eight = values["load_in_4bit"], values["load_in_8bit"]
    if four and eight:
        values.refuse("load_in_8bit", "load_in_4bit is yes too")
    if values["adapter"] == "qlora" and not four:
        values.refuse("adapter", "Axolotl starts qlora only with load_in_4bit: true")
    if four:
        return {"quant": "nf4", "double_quant": True, "quant_compute": loaded or "fp32", "kbit_prepare": False}
    return {"quant": "int8", "kbit_prepare": False} if eight else {}


def _checkpointing(values: KeyValues) -> dict[str, Any]:
    wanted, kwargs = values["gradient_checkpointing"], values["gradient_checkpointing_kwargs"]
    if wanted not in (True, False, None):
        why = "activations on the host are not modelled as Axolotl puts them there"
        values.refuse("gradient_checkpointing", f"{wanted}: {why}")
        return {}
    reentrant = kwargs.get("use_reentrant", True) if isinstance(kwargs, dict) else True
    note_reentrant(values, bool(wanted and reentrant), "lora" if values["adapter"] else "train")
    return {"grad_checkpointing": bool(wanted)}


def _rows(values: KeyValues, attention: str | None) -> dict[str, Any]:
    """Those of the file, as long as they may be; packed ones of a batch are one row."""
    if sum(map(values.has, BATCH_KEYS)) < 2:
        said = next(filter(values.has, BATCH_KEYS), BATCH_KEYS[0])
        why = f"Axolotl starts only where two of {', '.join(BATCH_KEYS)} are said"
        values.refuse(said, Refused(why, instead=("batch_size", "grad_accum")))
    rows, length, whole = values["micro_batch_size"], values["sequence_len"], values["batch_size"]
    steps = values["gradient_accumulation_steps"] or (max(whole // rows, 1) if whole and rows else 1)
    multiple = values["pad_to_multiple_of"]
    if values["pad_to_sequence_len"] is not False or values["sample_packing"]:
        length = -(-length // multiple) * multiple if multiple > 0 else length
    evaluated = values["eval_batch_size"] or rows
    if evaluated > rows:
        values.notes.append(f"{NOT_MODELLED} evaluation, with {evaluated} rows at a time where training has {rows}")
    real = values["multipack_real_batches"]
    if values["sample_packing"] and attention not in FOR_MANY_SAMPLES:
        why = "without a flash attention, samples of a row are kept apart by masks that are not modelled"
        values.refuse("sample_packing", why)
    if values["sample_packing"] and not real:
        if rows > 1:
            values.notes.append(f"samples are packed: {rows} rows of {length:,} tokens are one of {rows * length:,}")
        return {"batch_size": 1, "seq_len": rows * length, "grad_accum": steps, "padding": False}
    return {
        "batch_size": rows, "seq_len": length, "grad_accum": steps,
        "padding": rows > 1 and attention not in FOR_MANY_SAMPLES,
    }  # fmt: skip


def _written_quant(value: str) -> Edits:
    if value == "int8":
        return {"load_in_8bit": True, "load_in_4bit": False}
    return {"adapter": "qlora", "load_in_4bit": True, "load_in_8bit": False}


AXOLOTL = JobFormat(
    name="axolotl",
    title="Axolotl",
    keys=KEYS,
    idle=f"{TRAINER_IDLE} use_cache accelerator_config {IDLE}",
    refused=REFUSED,
    settle=_settle,
    written={
        "batch_size": "micro_batch_size",
        "grad_accum": "gradient_accumulation_steps",
        "seq_len": "sequence_len",
        "rank": "lora_r",
        "optimizer": written_optimizer("optimizer"),
        "grad_checkpointing": "gradient_checkpointing",
        "quant": _written_quant,
        **dict.fromkeys(("double_quant", "kbit_prepare"), lambda value: {}),
    },
)  # fmt: skip
