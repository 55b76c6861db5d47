"""Settings of public job files, as facts: where each stands, the keys that decide memory, and the job that it is.

Read in 2026 from the repositories named. Keys without influence on memory are left out here.
"""

from __future__ import annotations

from typing import Any

Example = tuple[str, dict[str, Any], dict[str, Any] | str]
"""(repository and path, keys, settings of memfit; or the keys that cannot be planned)."""

LF = "hiyouga/LLaMA-Factory examples"
_LF: dict[str, Any] = {
    "do_train": True, "stage": "sft", "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all",
    "cutoff_len": 2048, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "bf16": True,
}  # fmt: skip
_LF_READ: dict[str, Any] = {
    "kind": "lora", "loop": "trainer", "batch_size": 1, "grad_accum": 8, "seq_len": 2048, "padding": False, "rank": 8,
    "adapter": "lora", "lora_dropout": 0.0, "precision": "bf16", "autocast": "bf16", "optimizer": "adamw-fused",
    "clip_grad": True, "grad_checkpointing": True, "attention": "sdpa",
}  # fmt: skip
_NF4 = {"quant": "nf4", "double_quant": True, "quant_compute": "bf16", "kbit_prepare": False}
_QWEN, _LLAMA = "Qwen/Qwen3-4B-Instruct-2507", "meta-llama/Meta-Llama-3-8B-Instruct"
_FULL = {key: value for key, value in _LF.items() if not key.startswith("lora_")} | {"finetuning_type": "full"}

LLAMAFACTORY: list[Example] = [
    (f"{LF}/train_lora/qwen3_lora_sft.yaml", {**_LF, "model_name_or_path": _QWEN}, {**_LF_READ, "model": _QWEN}),
    (f"{LF}/train_lora/qwen3_lora_pretrain.yaml", {**_LF, "model_name_or_path": _QWEN, "stage": "pt"}, _LF_READ),
    (
        f"{LF}/train_qlora/qwen3_lora_sft_otfq.yaml",
        {**_LF, "model_name_or_path": _QWEN, "quantization_bit": 4, "quantization_method": "bnb"},
        {**_LF_READ, **_NF4},
    ),
    (
        f"{LF}/train_qlora/qwen3_lora_sft_bnb_npu.yaml",
        {**_LF, "quantization_bit": 4, "quantization_method": "bnb", "double_quantization": False},
        {**_LF_READ, **_NF4, "double_quant": False},
    ),
    (f"{LF}/extras/loraplus/llama3_lora_sft.yaml", {**_LF, "model_name_or_path": _LLAMA, "loraplus_lr_ratio": 16.0},
     {**_LF_READ, "model": _LLAMA}),
    (f"{LF}/extras/pissa/llama3_lora_sft.yaml", {**_LF, "pissa_init": True, "pissa_iter": 16}, _LF_READ),
    (f"{LF}/extras/fsdp_qlora/llama3_lora_sft.yaml", {**_LF, "quantization_bit": 4}, {**_LF_READ, **_NF4}),
    (f"{LF}/train_lora/qwen3_lora_sft_ray.yaml", {**_LF, "ray_num_workers": 4}, {**_LF_READ, "world_size": 4}),
    (f"{LF}/train_full/qwen3_full_sft.yaml",
     {**_FULL, "deepspeed": "examples/deepspeed/ds_z3_config.json", "gradient_accumulation_steps": 2}, "deepspeed"),
    (f"{LF}/extras/galore/llama3_full_sft.yaml", {**_FULL, "use_galore": True, "pure_bf16": True}, "use_galore"),
    (f"{LF}/train_lora/qwen3_lora_dpo.yaml", {**_LF, "stage": "dpo", "pref_beta": 0.1}, "stage"),
    (f"{LF}/extras/oft/llama3_oft_sft.yaml", {**_LF, "finetuning_type": "oft", "oft_block_size": 32},
     "finetuning_type"),
]  # fmt: skip

AX = "axolotl-ai-cloud/axolotl examples"
_AX: dict[str, Any] = {
    "adapter": "lora", "load_in_8bit": True, "load_in_4bit": False, "lora_r": 32, "lora_dropout": 0.05,
    "lora_target_linear": True, "sequence_len": 4096, "sample_packing": True, "micro_batch_size": 2,
    "gradient_accumulation_steps": 4, "optimizer": "adamw_bnb_8bit", "bf16": "auto", "gradient_checkpointing": True,
    "attn_implementation": "flash_attention_2",
}  # fmt: skip
_AX_READ: dict[str, Any] = {
    "kind": "lora", "loop": "trainer", "batch_size": 1, "seq_len": 8192, "grad_accum": 4, "padding": False, "rank": 32,
    "lora_dropout": 0.05, "precision": "bf16", "autocast": "bf16", "optimizer": "adamw-8bit", "attention": "sdpa",
    "grad_checkpointing": True, "clip_grad": True, "quant": "int8", "kbit_prepare": False, "adapter_dtype": "fp32",
}  # fmt: skip
_Q = {**_AX, "adapter": "qlora", "load_in_8bit": False, "load_in_4bit": True}
_Q_READ = {**_AX_READ, **_NF4}
_AX_FULL = {key: value for key, value in _AX.items() if not key.startswith(("lora_", "load_", "adapter"))}
_AX_FULL_READ: dict[str, Any] = {
    "kind": "train", "precision": "bf16", "autocast": "bf16", "batch_size": 1, "optimizer": "adamw-8bit",
    "grad_checkpointing": True,
}  # fmt: skip
_ALL = ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"]

AXOLOTL: list[Example] = [
    (f"{AX}/archived/code-llama/7b/lora.yml", {**_AX, "base_model": "codellama/CodeLlama-7b-hf"},
     {**_AX_READ, "model": "codellama/CodeLlama-7b-hf"}),
    (f"{AX}/archived/code-llama/7b/qlora.yml",
     {**_Q, "base_model": "codellama/CodeLlama-7b-hf", "optimizer": "paged_adamw_32bit"},
     {**_Q_READ, "optimizer": "paged-adamw"}),
    (f"{AX}/archived/gemma/qlora.yml", {**_Q, "base_model": "mhenrichsen/gemma-7b", "gradient_accumulation_steps": 3},
     {**_Q_READ, "grad_accum": 3}),
    (f"{AX}/archived/openllama-3b/lora.yml",
     {**_AX, "base_model": "openlm-research/open_llama_3b_v2", "bf16": False, "fp16": True, "lora_r": 8,
      "lora_dropout": 0.0, "lora_target_linear": None, "lora_target_modules": _ALL, "sequence_len": 1024,
      "gradient_accumulation_steps": 1},
     {**_AX_READ, "precision": "fp16", "autocast": "fp16", "rank": 8, "lora_dropout": 0.0, "seq_len": 2048,
      "grad_accum": 1, "target_modules": tuple(_ALL)}),
    (f"{AX}/archived/qwen/qwen2-moe-lora.yaml",
     {**_AX, "base_model": "Qwen/Qwen1.5-MoE-A2.7B", "load_in_8bit": False, "sample_packing": False,
      "pad_to_sequence_len": False, "sequence_len": 1024, "micro_batch_size": 1, "optimizer": "paged_adamw_8bit",
      "gradient_checkpointing_kwargs": {"use_reentrant": False}},
     {"kind": "lora", "batch_size": 1, "seq_len": 1024, "optimizer": "paged-adamw-8bit", "rank": 32}),
    (f"{AX}/archived/tiny-llama/pretrain.yml",
     {**_AX_FULL, "base_model": "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "sequence_len": 2048},
     {**_AX_FULL_READ, "seq_len": 4096, "grad_accum": 4}),
    (f"{AX}/llama-3/fft-8b.yaml",
     {**_AX_FULL, "base_model": "NousResearch/Meta-Llama-3.1-8B", "sequence_len": 8192, "micro_batch_size": 1,
      "gradient_accumulation_steps": 8, "optimizer": "paged_adamw_8bit",
      "gradient_checkpointing_kwargs": {"use_reentrant": False}},
     {**_AX_FULL_READ, "seq_len": 8192, "grad_accum": 8, "optimizer": "paged-adamw-8bit"}),
    (f"{AX}/archived/starcoder2/qlora.yml",
     {**_Q, "base_model": "bigcode/starcoder2-3b", "sequence_len": 8192, "gradient_accumulation_steps": 8},
     {**_Q_READ, "seq_len": 16384, "grad_accum": 8}),
    (f"{AX}/archived/pythia/lora.yml",
     {"base_model": "EleutherAI/pythia-1.4b-deduped", "load_in_8bit": True, "adapter": "lora", "sequence_len": 512,
      "lora_r": 16, "lora_dropout": 0.05, "lora_target_modules": ["query_key_value"], "micro_batch_size": 4,
      "gradient_accumulation_steps": 1, "bf16": "auto"},
     {"kind": "lora", "batch_size": 4, "seq_len": 512, "padding": True, "optimizer": "adamw-fused", "quant": "int8",
      "target_modules": ("query_key_value",), "grad_checkpointing": False}),
    (f"{AX}/gemma2/qlora.yml",
     {**_Q, "base_model": "google/gemma-2-9b", "sequence_len": 2048, "micro_batch_size": 1},
     {**_Q_READ, "seq_len": 2048}),
    (f"{AX}/archived/falcon/config-7b-lora.yml",
     {**_AX, "base_model": "tiiuae/falcon-7b", "batch_size": 2, "micro_batch_size": 1, "sequence_len": 2048,
      "gradient_accumulation_steps": None, "sample_packing": None, "attn_implementation": "xformers"},
     "attn_implementation"),
    (f"{AX}/llama-3/lora-8b.yml",
     {**_AX, "base_model": "NousResearch/Meta-Llama-3-8B", "lora_modules_to_save": ["embed_tokens", "lm_head"]},
     "lora_modules_to_save"),
]  # fmt: skip

TT = "pytorch/torchtune recipes/configs"


def _recipe(component: str, rank: int, batch: int, *, checkpointing: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "model": {"_component_": f"torchtune.models.{component}",
                  "lora_attn_modules": ["q_proj", "v_proj", "output_proj"], "apply_lora_to_mlp": True,
                  "lora_rank": rank, **more.pop("model", {})},
        "tokenizer": {"max_seq_len": None}, "dataset": {"packed": False}, "batch_size": batch,
        "optimizer": {"_component_": "torch.optim.AdamW", "fused": True}, "gradient_accumulation_steps": 8,
        "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"}, "clip_grad_norm": None,
        "compile": False, "device": "cuda", "dtype": "bf16", "enable_activation_checkpointing": checkpointing,
        "enable_activation_offloading": False, **more,
    }  # fmt: skip


def _tuned(model: str, rank: int, batch: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "lora", "model": model, "rank": rank, "batch_size": batch, "grad_accum": 8, "seq_len": 1024,
        "precision": "bf16", "adapter_dtype": "same", "optimizer": "adamw-fused", "clip_grad": False, "loop": "plain",
        "outputs": "dropped", "padding": False, "grad_checkpointing": True,
        "target_modules": ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), **more,
    }  # fmt: skip


TORCHTUNE: list[Example] = [
    (f"{TT}/llama3_2/1B_lora_single_device.yaml", _recipe("llama3_2.lora_llama3_2_1b", 64, 4, checkpointing=False),
     _tuned("llama-3.2-1b", 64, 4, grad_checkpointing=False)),
    (f"{TT}/llama3_2/3B_lora_single_device.yaml", _recipe("llama3_2.lora_llama3_2_3b", 64, 4),
     _tuned("llama-3.2-3b", 64, 4)),
    (f"{TT}/llama3_1/8B_lora_single_device.yaml", _recipe("llama3_1.lora_llama3_1_8b", 8, 2),
     _tuned("llama-3.1-8b", 8, 2)),
    (f"{TT}/llama3/8B_dora_single_device.yaml", _recipe("llama3.lora_llama3_8b", 8, 2, model={"use_dora": True}),
     _tuned("llama-3-8b", 8, 2, adapter="dora")),
    (f"{TT}/llama2/7B_lora_single_device.yaml", _recipe("llama2.lora_llama2_7b", 8, 2), _tuned("llama-2-7b", 8, 2)),
    (f"{TT}/llama2/7B_lora.yaml", _recipe("llama2.lora_llama2_7b", 8, 2, checkpointing=False),
     _tuned("llama-2-7b", 8, 2, grad_checkpointing=False)),
    (f"{TT}/qwen2_5/7B_lora_single_device.yaml", _recipe("qwen2_5.lora_qwen2_5_7b_instruct", 8, 2),
     _tuned("qwen2.5-7b", 8, 2)),
    (f"{TT}/phi4/14B_lora_single_device.yaml", _recipe("phi4.lora_phi4_14b", 8, 2), _tuned("phi-4", 8, 2)),
    (f"{TT}/gemma2/2B_lora_single_device.yaml", _recipe("gemma2.lora_gemma2_2b", 64, 8), _tuned("gemma-2-2b", 64, 8)),
    (f"{TT}/llama3_1/8B_qlora_single_device.yaml", _recipe("llama3_1.qlora_llama3_1_8b", 8, 2), "model._component_"),
    (f"{TT}/llama3_2/1B_full_single_device.yaml",
     _recipe("llama3_2.llama3_2_1b", 8, 4, optimizer_in_bwd=True), "optimizer_in_bwd"),
    (f"{TT}/mistral/7B_lora_single_device.yaml",
     _recipe("mistral.lora_mistral_7b", 64, 4, model={"apply_lora_to_output": True}), "model.apply_lora_to_output"),
]  # fmt: skip

_ARGS: dict[str, Any] = {"loop": "trainer", "clip_grad": True, "grad_accum": 1, "optimizer": "adamw-fused"}
HUGGINGFACE: list[Example] = [
    ("Akshara-Amirtharaj/MarketGuardians training_args.json",
     {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "fp16": True, "optim": "adamw_torch",
      "fsdp": [], "fsdp_config": {"min_num_params": 0, "xla": False}, "deepspeed": None, "torch_compile": False,
      "label_smoothing_factor": 0.0, "evaluation_strategy": "epoch", "per_device_eval_batch_size": 16},
     {**_ARGS, "batch_size": 16, "grad_accum": 2, "optimizer": "adamw", "precision": "amp-fp16"}),
    ("tage64/cbdetect training_args.json",
     {"model_name_or_path": "facebook/detr-resnet-50", "fp16": True, "per_device_train_batch_size": 8},
     {**_ARGS, "batch_size": 8, "precision": "amp-fp16"}),
    ("SlangLab-NU/torgo_inference_on_cluster training_args.json",
     {"per_device_train_batch_size": 8, "optim": "adamw_torch", "max_grad_norm": 1.0, "adafactor": False},
     {**_ARGS, "batch_size": 8, "optimizer": "adamw", "precision": "fp32"}),
    ("MarcelGM/transformers training_args.json",
     {"model_name_or_path": "facebook/bart-base", "per_device_train_batch_size": 1, "do_train": "True"},
     {**_ARGS, "batch_size": 1, "precision": "fp32"}),
    ("DariusCatrina/MMutliBART-benchmark training_args.json",
     {"gradient_accumulation_steps": 4, "gradient_checkpointing": False, "num_train_epochs": 50},
     {**_ARGS, "batch_size": 8, "grad_accum": 4}),
    ("Showmick119/Fine-Tuning-Open-Source-LLM configs/training_args.json",
     {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "max_grad_norm": 0.3, "fp16": True,
      "bf16": False, "optim": "paged_adamw_32bit", "gradient_checkpointing": True},
     {**_ARGS, "batch_size": 2, "grad_accum": 8, "optimizer": "paged-adamw", "grad_checkpointing": True}),
    ("frankmark94/llama-insurance-finetune config/training_args.json",
     {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "gradient_checkpointing": True,
      "optim": "paged_adamw_32bit", "fp16": True, "bf16": False, "max_grad_norm": 0.3},
     {**_ARGS, "batch_size": 4, "grad_accum": 8, "optimizer": "paged-adamw", "precision": "amp-fp16"}),
    ("lixinyu66666/Qwen3-1.7b_RLHF configs/training_args.json",
     {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "fp16": True},
     {**_ARGS, "batch_size": 2, "grad_accum": 4, "precision": "amp-fp16"}),
    ("unionai-oss/llm-fine-tuning config/training_args.json",
     {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, "evaluation_strategy": "no"},
     {**_ARGS, "batch_size": 1, "grad_accum": 16, "precision": "fp32"}),
    ("OPTML-Group/MemorizationBarrier config/training_args.json",
     {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 0, "fp16": True, "full_determinism": False},
     {**_ARGS, "batch_size": 2, "precision": "amp-fp16"}),
    ("lhyscau/DRMOE training_args.json",
     {"per_device_train_batch_size": 8, "fp16": True, "deepspeed": "src/ds.config"}, "deepspeed"),
    ("adityaxdubey/grpo-accounting-finetune training_args.json",
     {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "torch_empty_cache_steps": 250,
      "fp16": True, "optim": "paged_adamw_8bit"}, "torch_empty_cache_steps"),
]  # fmt: skip

TRL = "huggingface/trl examples/accelerate_configs"
_FSDP2 = {
    "fsdp_version": 2, "fsdp_offload_params": False, "fsdp_reshard_after_forward": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
}  # fmt: skip


def _launched(kind: str, count: int, **more: Any) -> dict[str, Any]:
    return {"compute_environment": "LOCAL_MACHINE", "distributed_type": kind, "mixed_precision": "bf16",
            "num_processes": count, "use_cpu": False, **more}  # fmt: skip


_SHARDED = {"parallel": "fsdp2", "precision": "amp-bf16"}
ACCELERATE: list[Example] = [
    (f"{TRL}/single_gpu.yaml", _launched("NO", 1), {"precision": "amp-bf16"}),
    (f"{TRL}/multi_gpu.yaml", _launched("MULTI_GPU", 8), {"world_size": 8, "parallel": "ddp", "precision": "amp-bf16"}),
    (f"{TRL}/fsdp2.yaml", _launched("FSDP", 8, fsdp_config={**_FSDP2, "fsdp_activation_checkpointing": False}),
     {**_SHARDED, "world_size": 8}),
    (f"{LF}/accelerate/fsdp2_config.yaml", _launched("FSDP", 2, fsdp_config=_FSDP2), {**_SHARDED, "world_size": 2}),
    (f"{LF}/ktransformers/accelerate/fsdp2_kt_int8.yaml", _launched("FSDP", 4, fsdp_config=_FSDP2),
     {**_SHARDED, "world_size": 4}),
    (f"{TRL}/context_parallel_2gpu.yaml",
     _launched("FSDP", 2, fsdp_config=_FSDP2, parallelism_config={"parallelism_config_cp_size": 2}),
     "parallelism_config.parallelism_config_cp_size"),
    (f"{TRL}/deepspeed_zero1.yaml", _launched("DEEPSPEED", 8, deepspeed_config={"zero_stage": 1}),
     "deepspeed_config.zero_stage, distributed_type"),
    (f"{TRL}/deepspeed_zero3.yaml", _launched("DEEPSPEED", 8, deepspeed_config={"zero_stage": 3}),
     "deepspeed_config.zero_stage, distributed_type"),
    (f"{TRL}/fsdp1.yaml", _launched("FSDP", 8, fsdp_config={**_FSDP2, "fsdp_version": 1}),
     "fsdp_config.fsdp_version"),
    (f"{LF}/accelerate/fsdp_config_offload.yaml",
     _launched("FSDP", 2, fsdp_config={"fsdp_offload_params": True, "fsdp_reshard_after_forward": "FULL_SHARD"}),
     "fsdp_config.fsdp_offload_params, fsdp_config.fsdp_version"),
]  # fmt: skip

AXD = "axolotl-ai-cloud/axolotl deepspeed_configs"
AUTO = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
DEEPSPEED: list[Example] = [
    (f"{where}.json", {**AUTO, "zero_optimization": {"stage": stage}}, "zero_optimization")
    for where, stage in (
        (f"{LF}/deepspeed/ds_z0_config", 0), (f"{LF}/deepspeed/ds_z2_config", 2),
        (f"{LF}/deepspeed/ds_z2_offload_config", 2), (f"{LF}/deepspeed/ds_z3_config", 3),
        (f"{LF}/deepspeed/ds_z3_offload_config", 3), (f"{AXD}/zero1", 1),
        (f"{AXD}/zero2", 2), (f"{AXD}/zero3", 3),
        (f"{AXD}/zero3_bf16", 3),
        (f"{AXD}/zero3_bf16_cpuoffload_all", 3),
    )
]  # fmt: skip

ALL = {
    "llamafactory": LLAMAFACTORY, "axolotl": AXOLOTL, "torchtune": TORCHTUNE, "huggingface": HUGGINGFACE,
    "accelerate": ACCELERATE, "deepspeed": DEEPSPEED,
}  # fmt: skip
