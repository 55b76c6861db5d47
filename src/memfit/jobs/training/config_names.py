"""The names that settings go by in other people's files: tables only."""

from __future__ import annotations

from memfit.models.gsa_names import GSA_SETTINGS

SETTINGS = "model.settings"
AUTOCAST, NO_AUTOCAST = "autocast", "no autocast to "
"""What Hugging Face calls bf16, fp16 and mixed_precision; with the type of the weights it becomes a precision."""

SHORTHAND = {
    "model": "model.name", "method": "method.kind", "data": "data.source", "memory": "memory.auto",
    "optimizer": "optimizer.name", "loss": "loss.kind", "parallel": "parallel.kind",
    "schedule": "schedule.lr_scheduler",
}  # fmt: skip
"""`method: lora` is `method: {kind: lora}`."""

LOOSE = ("training", "train", "trainer", "training_arguments", "training_args", "training_config", "distributed")
"""Sections of other people's files: what stands in them is read as if it stood alone."""

SECTION_ALIASES = {
    "lora": "method", "lora_config": "method", "peft": "method", "optim": "optimizer", "output": "saving",
    "gsa": "model",
}  # fmt: skip
LORA_SECTIONS = ("lora", "lora_config", "peft")

ALIASES = {
    "model_name": "model.name", "model_name_or_path": "model.name", "base_model": "model.name",
    "tokenizer_name": "model.tokenizer", "tokenizer_name_or_path": "model.tokenizer",
    "attn_implementation": "model.attention", "attention_implementation": "model.attention",
    "finetuning_type": "method.kind",
    "r": "method.rank", "lora_r": "method.rank", "lora_rank": "method.rank", "lora_alpha": "method.alpha",
    "lora_dropout": "method.dropout", "lora_target": "method.target_modules",
    "lora_target_modules": "method.target_modules",
    "dataset": "data.source", "dataset_name": "data.source", "train_file": "data.source", "data_path": "data.source",
    "dataset_path": "data.source", "local_dataset_path": "data.source", "data_dir": "data.source",
    "dataset_config_name": "data.subset", "dataset_split": "data.split", "dataset_text_field": "data.text_column",
    "max_seq_length": "data.max_seq_len", "max_length": "data.max_seq_len", "sequence_length": "data.max_seq_len",
    "seq_len": "data.max_seq_len", "seq_length": "data.max_seq_len", "cutoff_len": "data.max_seq_len",
    "block_size": "data.max_seq_len", "sample_packing": "data.packing", "use_packing": "data.packing",
    "max_train_samples": "data.max_samples", "dataloader_num_workers": "data.num_workers",
    "per_device_train_batch_size": "batch.micro_batch_size", "per_gpu_train_batch_size": "batch.micro_batch_size",
    "batch_size": "batch.micro_batch_size", "grad_accum": "batch.gradient_accumulation_steps",
    "gradient_accumulation": "batch.gradient_accumulation_steps",
    "effective_batch_size": "batch.global_batch_size", "total_batch_size": "batch.global_batch_size",
    "num_train_epochs": "schedule.epochs", "num_epochs": "schedule.epochs", "total_steps": "schedule.max_steps",
    "lr": "schedule.learning_rate", "min_lr": "schedule.min_learning_rate",
    "lr_scheduler_type": "schedule.lr_scheduler", "scheduler": "schedule.lr_scheduler",
    "grad_clip": "schedule.max_grad_norm", "clip_grad": "schedule.max_grad_norm", "max_norm": "schedule.max_grad_norm",
    "grad_checkpointing": "memory.gradient_checkpointing", "activation_checkpointing": "memory.gradient_checkpointing",
    "optim": "optimizer.name", "adam_beta1": "optimizer.beta1", "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "loss_type": "loss.kind", "loss_chunk": "loss.chunk",
    "ddp_find_unused_parameters": "parallel.find_unused_parameters",
    "log_interval": "logging.logging_steps", "log_steps": "logging.logging_steps",
    "save_interval": "saving.save_steps",
    "resume_from_checkpoint": "saving.resume_from", "keep_last": "saving.save_total_limit",
    "torch_dtype": "precision", "dtype": "precision",
}  # fmt: skip
"""Other names, wherever they stand."""

MODEL_SETTINGS = (
    *GSA_SETTINGS, "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "num_layers", "num_heads", "d_ff", "context_length",
)  # fmt: skip
"""What may stand in `model:` beside memfit's own keys. Any other word of a model's config goes under `settings`."""

IN_SECTION = {
    "model.dtype": "precision", "data.path": "data.source", "data.name": "data.source", "data.file": "data.source",
    "data.tokenizer": "model.tokenizer", "optimizer.lr": "schedule.learning_rate", "optimizer.type": "optimizer.name",
    "gsa.n_indexer_heads": f"{SETTINGS}.indexer_heads", "gsa.d_indexer": f"{SETTINGS}.indexer_dim",
    "gsa.use_adaptive_k": f"{SETTINGS}.adaptive_k", "method.name": "method.kind", "method.type": "method.kind",
}  # fmt: skip
"""Names that mean something in that section only."""

FIXED: dict[str, tuple[object, ...]] = {
    "use_value_gate": (True,), "use_output_gate": (True,), "bias": ("none",), "task_type": ("CAUSAL_LM",),
    "device_map": (None,), "auto_find_batch_size": (False,), "load_in_4bit": (False,), "load_in_8bit": (False,),
    "group_by_length": (False,), "trust_remote_code": (False,),
}  # fmt: skip
"""Keys with one value that memfit can serve; then there is nothing to set."""

IGNORED = {
    "indexer_warmup_steps": "no gradient reaches GSA's indexer",
    "indexer_lr_multiplier": "no gradient reaches GSA's indexer",
    "eval_interval": "nothing is evaluated during the run", "eval_steps": "nothing is evaluated during the run",
    "eval_strategy": "nothing is evaluated during the run",
    "evaluation_strategy": "nothing is evaluated during the run",
    "load_best_model_at_end": "nothing is evaluated during the run",
    "metric_for_best_model": "nothing is evaluated during the run",
    "project": "W&B reads its project from WANDB_PROJECT",
}  # fmt: skip
"""Keys without effect, each with the reason that the run says."""

INSTEAD = {
    "max_memory": "memory.offload: [weights] keeps frozen layers on the host without a device map",
    "device_map": "memory.offload: [weights] keeps frozen layers on the host without a device map",
    "auto_find_batch_size": "memory: auto picks the micro-batch, and the global batch stays as it is",
    "use_liger_kernel": "loss: chunked keeps the logits from being whole",
    "pytorch_cuda_alloc_conf": "memory.alloc_conf takes the same text",
}
"""What to write in place of a key that there is not."""

OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw-fused", "adamw_8bit": "adamw-8bit",
    "adamw_bnb_8bit": "adamw-8bit", "paged_adamw_32bit": "paged-adamw",
}  # fmt: skip
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
