"""Names and values that settings go by in others' files, YAML's quirks, and keys that mean several of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, get_args, get_type_hints

from memfit.errors import UsageError
from memfit.jobs.training.config import OF_WORKLOAD, OTHER_WORDS, TrainConfig
from memfit.jobs.workload import Workload
from memfit.models.config_check import PRECISIONS
from memfit.models.presets import GSA_SETTINGS

SETTINGS = "model.settings"
AUTOCAST, NO_AUTOCAST = "autocast as Hugging Face has it", "no autocast to "
"""What Hugging Face calls bf16, fp16 and mixed_precision; with the type of the weights it becomes a precision."""

IN_4_BITS, IN_8_BITS, FOUR_BIT_TYPE = "weights in 4 bits", "weights in 8 bits", "type of 4-bit weights"
"""What it calls load_in_4bit, load_in_8bit and bnb_4bit_quant_type."""

SHORTHAND = {
    "model": "model.name", "method": "method.kind", "data": "data.source", "memory": "memory.auto",
    "optimizer": "optimizer.name", "loss": "loss.kind", "parallel": "parallel.kind", "quant": "quant.kind",
    "schedule": "schedule.lr_scheduler",
}  # fmt: skip
"""`method: lora` is `method: {kind: lora}`."""

LOOSE = (
    "training", "train", "trainer", "training_arguments", "training_args", "training_config", "distributed",
    "quantization_config", "quantization", "bnb_config", "bitsandbytes",
)  # fmt: skip
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
    "bnb_4bit_use_double_quant": "quant.double", "double_quant": "quant.double", "use_bnb_nested_quant": "quant.double",
    "bnb_4bit_compute_dtype": "quant.compute", "quant_compute": "quant.compute", "kbit_prepare": "quant.prepare",
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
    "device_map": (None,), "auto_find_batch_size": (False,), "group_by_length": (False,),
    "trust_remote_code": (False,), "torch_compile": (False,), "torch_compile_backend": (None,),
    "torch_compile_mode": (None,), "bnb_4bit_quant_storage": ("uint8", None), "quant_method": ("bitsandbytes",),
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

NOT_COMPILED = "`memfit train` runs the model as it is; `memfit plan train --loop trainer --compile` is of the Trainer"
INSTEAD = {
    "max_memory": "memory.offload: [weights] keeps frozen layers on the host without a device map",
    "device_map": "memory.offload: [weights] keeps frozen layers on the host without a device map",
    "auto_find_batch_size": "memory: auto picks the micro-batch, and the global batch stays as it is",
    "use_liger_kernel": "loss: chunked keeps the logits from being whole",
    "pytorch_cuda_alloc_conf": "memory.alloc_conf takes the same text",
    "torch_compile": NOT_COMPILED, "torch_compile_backend": NOT_COMPILED, "torch_compile_mode": NOT_COMPILED,
}  # fmt: skip
"""What to write in place of a key that there is not."""

TRAINER_NAMES = {
    "adamw": "adamw_torch", "adamw-fused": "adamw_torch_fused", "sgd": "sgd", "adafactor": "adafactor",
    "adamw-8bit": "adamw_bnb_8bit", "paged-adamw-8bit": "paged_adamw_8bit", "paged-adamw": "paged_adamw_32bit",
    "lion-8bit": "lion_8bit", "adamw-8bit-torchao": "adamw_torch_8bit", "adamw-4bit-torchao": "adamw_torch_4bit",
}  # fmt: skip
"""Optimizers as the Trainer calls them."""
OF_PACKAGES = {
    "adamw-8bit": "bitsandbytes.AdamW8bit", "paged-adamw": "bitsandbytes.PagedAdamW",
    "paged-adamw-8bit": "bitsandbytes.PagedAdamW8bit", "lion-8bit": "bitsandbytes.Lion8bit",
    "adamw-8bit-torchao": "torchao.AdamW8bit", "adamw-4bit-torchao": "torchao.AdamW4bit",
}  # fmt: skip
"""The package, whose `optim` has it, and the class there."""
OPTIMIZERS = {"adamw_8bit": "adamw-8bit", **{theirs: ours for ours, theirs in TRAINER_NAMES.items()}}
TYPES = {**PRECISIONS, "half": "fp16", "float": "fp32"}


Made = Iterator[tuple[str, Any]]


def converted(path: str, value: Any, key: str) -> Made:
    """(memfit's key, value) of one key of the file; most often itself."""
    if path in SEVERAL:
        yield from SEVERAL[path](value, key)
    else:
        yield path, _value(path, value)


@cache
def type_of(path: str) -> Any:
    if path in OF_WORKLOAD:
        return OTHER_WORDS.get(path) or get_type_hints(Workload)[OF_WORKLOAD[path]]
    section, _, leaf = path.rpartition(".")
    owner: Any = get_type_hints(TrainConfig)[section] if section else TrainConfig
    return get_type_hints(owner)[leaf]


def _value(path: str, value: Any) -> Any:
    if path.startswith(f"{SETTINGS}."):
        return value
    if path == "memory.auto" and value == "auto":
        return True
    if path == "memory.gradient_checkpointing" and isinstance(value, bool):
        return "full" if value else "none"
    if path == "schedule.max_steps" and value == -1:  # how Hugging Face says "by epochs"
        return None
    if path == "optimizer.name" and isinstance(value, str):
        return OPTIMIZERS.get(value, value.replace("_", "-"))
    if path in ("precision", "quant.compute") and isinstance(value, str):
        return TYPES.get(value.removeprefix("torch."), value)
    if path == "method.target_modules" and isinstance(value, str):
        value = None if value in ("all", "all-linear") else [part.strip() for part in value.split(",")]
    if path == "memory.offload":
        value = [] if value in (None, False) else [value] if isinstance(value, str) else value
    return _typed(path, value)


def _typed(path: str, value: Any) -> Any:
    hint = type_of(path)
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str) and float in (hint, *get_args(hint)):  # YAML 1.1 takes 3e-4 for text
        try:
            return float(value)
        except ValueError:
            return value
    if isinstance(value, int) and not isinstance(value, bool) and hint is str:
        return str(value)
    return value


# -- keys that are not settings themselves -----------------------------------------------------------------------------


def _flag(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{key} is true or false, not {value!r}")
    return value


def _half(name: str) -> Callable[[Any, str], Made]:
    """`bf16` and `fp16`."""

    def asked(value: Any, key: str) -> Made:
        yield (AUTOCAST, name) if _flag(value, key) else (f"{NO_AUTOCAST}{name}", "")

    return asked


def _mixed(value: Any, key: str) -> Made:
    if value not in ("no", False, "bf16", "fp16", None):
        raise UsageError(f"{key} {value!r} is not one of no, bf16, fp16")
    if value is not None:
        yield AUTOCAST, value if value in ("bf16", "fp16") else ""


def _betas(value: Any, key: str) -> Made:
    if not isinstance(value, list) or len(value) != 2:
        raise UsageError(f"{key} {value!r} is not a list of two numbers")
    yield "optimizer.beta1", _typed("optimizer.beta1", value[0])
    yield "optimizer.beta2", _typed("optimizer.beta2", value[1])


def _use_lora(value: Any, key: str) -> Made:
    yield "method.kind", "lora" if _flag(value, key) else "full"


def _report_to(value: Any, key: str) -> Made:
    wanted = value if isinstance(value, list) else [value]
    for each in wanted:
        if each not in ("tensorboard", "wandb", "all", "none", None):
            raise UsageError(f"{key} {each!r} is not one of tensorboard, wandb, none")
    yield "logging.tensorboard", "tensorboard" in wanted or "all" in wanted
    yield "logging.wandb", "wandb" in wanted or "all" in wanted


def _not_reentrant(value: Any, key: str) -> Made:
    """Checkpointing here is never reentrant, which is what everybody sets."""
    if not isinstance(value, Mapping) or set(value) - {"use_reentrant"} or value.get("use_reentrant"):
        raise UsageError(f"{key} can only be {{use_reentrant: false}}")
    yield from ()


def _fsdp(value: Any, key: str) -> Made:
    if value not in (True, False, "full_shard", "fsdp2", None, ""):
        raise UsageError(f"{key} {value!r} is not yes, no or full_shard", hint="parallel: fsdp2")
    yield "parallel.kind", "fsdp2" if value else "ddp"


def _activations(value: Any, key: str) -> Made:
    if _flag(value, key):
        yield "memory.offload", ("activations",)


def _bits(name: str) -> Callable[[Any, str], Made]:
    """`load_in_4bit` and `load_in_8bit`; with `bnb_4bit_quant_type` they become a kind of quantisation."""

    def loaded(value: Any, key: str) -> Made:
        if value is not None:
            yield name, _flag(value, key)

    return loaded


def _type_of_4_bits(value: Any, key: str) -> Made:
    if value not in ("nf4", "fp4", None):
        raise UsageError(f"{key} {value!r} is not one of nf4, fp4")
    if value is not None:
        yield FOUR_BIT_TYPE, value


SEVERAL: dict[str, Callable[[Any, str], Made]] = {
    "bf16": _half("bf16"), "fp16": _half("fp16"), "mixed_precision": _mixed, "betas": _betas, "use_lora": _use_lora,
    "report_to": _report_to, "gradient_checkpointing_kwargs": _not_reentrant, "fsdp": _fsdp,
    "activation_offloading": _activations, "load_in_4bit": _bits(IN_4_BITS), "load_in_8bit": _bits(IN_8_BITS),
    "bnb_4bit_quant_type": _type_of_4_bits,
}  # fmt: skip
