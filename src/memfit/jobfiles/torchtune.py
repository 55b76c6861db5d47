"""A recipe of torchtune: its sections, its own defaults, and what it makes of them.

Facts of its sources: weights, adapters and gradients are all of `dtype`; rows of a batch are padded without a mask; a
recipe of several GPUs shards by FSDP2. The model is torchtune's own code, the plan that of transformers.
"""

from __future__ import annotations

import re
from typing import Any

from memfit.jobfiles.keys import NOT_MODELLED, Edits, JobFormat, KeyValues, Refused, file_keys
from memfit.models.presets import find_preset

OPTIMIZERS = {
    "torch.optim.AdamW": "adamw", "torch.optim.SGD": "sgd", "bitsandbytes.optim.AdamW8bit": "adamw-8bit",
    "bitsandbytes.optim.PagedAdamW8bit": "paged-adamw-8bit", "bitsandbytes.optim.PagedAdamW": "paged-adamw",
    "bitsandbytes.optim.Lion8bit": "lion-8bit", "torchao.optim.AdamW8bit": "adamw-8bit-torchao",
    "torchao.optim.AdamW4bit": "adamw-4bit-torchao",
}  # fmt: skip
MODULES = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
MLP = ("gate_proj", "up_proj", "down_proj")
PRECISIONS = ("bf16", "fp32")
LOSSES = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss")
SIZES = {"phi4_14b": "phi-4", "phi3_mini": "phi-3-mini-4k"}

KEYS = file_keys({
    "text": {
        "model._component_": None, "optimizer._component_": "torch.optim.AdamW",
        "loss._component_": "LinearCrossEntropyLoss", "dtype": "bf16",
    },
    "names": {"model.lora_attn_modules": ()},
    "yes": {
        "model.apply_lora_to_mlp": False, "model.use_dora": False, "dataset.packed": False, "optimizer.fused": False,
        "optimizer.foreach": None, "compile": False, "enable_activation_checkpointing": False,
    },
    "whole": {
        "model.lora_rank": 8, "tokenizer.max_seq_len": None, "batch_size": 1, "gradient_accumulation_steps": 1,
        "batch_size_val": None, "run_val_every_n_steps": None,
    },
    "number": {"model.lora_dropout": 0.0, "optimizer.weight_decay": 0.0, "optimizer.momentum": 0.0},
    "any": {"clip_grad_norm": None},
})  # fmt: skip
REFUSED = {
    "optimizer.amsgrad": Refused("a third state of AdamW is not modelled"),
    "optimizer.maximize": Refused("gradients that are turned round are copies that are not modelled"),
    "optimizer_in_bwd": Refused("steps of the optimizer inside the backward pass are not modelled"),
    "enable_activation_offloading": Refused("activations on the host are not modelled as torchtune puts them there"),
    "fsdp_cpu_offload": Refused("FSDP's offloading is not modelled"),
    "model.apply_lora_to_output": Refused("an adapter on the head is not modelled"),
    "model.quantize_base": Refused("torchao's 4-bit tensors are not modelled", instead=("quant",)),
    "tensor_parallel_dim": Refused("tensor parallelism is not modelled", (None, 1)),
    "tensor_parallel_plan._component_": Refused("tensor parallelism is not modelled", (None,)),
    "data_parallel_replicate_dim": Refused("two ways of sharding at once are not modelled", (None, 1)),
    "custom_sharded_layers": Refused("layers that are sharded apart are not modelled", (None, [])),
    "quantizer._component_": Refused("quantisation-aware training is not modelled", (None,)),
    "ac_mode": Refused("selective checkpointing of torchtune is not modelled", (None, "full")),
    **dict.fromkeys(
        ("teacher_model._component_", "kd_loss._component_"),
        Refused("a second model on the card is not modelled", (None,)),
    ),
    "device": Refused("it does not train on a GPU of CUDA", ("cuda",)),
}  # fmt: skip
IDLE = (
    "output_dir tokenizer.* checkpointer.* resume_from_checkpoint save_adapter_weights_only dataset.* dataset_val.* "
    "seed shuffle epochs max_steps_per_epoch lr_scheduler.* optimizer.lr optimizer.betas optimizer.eps "
    "optimizer.nesterov optimizer.dampening optimizer.capturable optimizer.differentiable loss.* "
    "metric_logger.* log_* profiler.* model.lora_alpha model.*_dropout collate_fn num_warmup_steps ac_option "
    "memory_efficient_fsdp_wrap use_distributed_state_dict data_parallel_shard_dim low_cpu_ram "
    "cudnn_deterministic_mode enable_async_checkpointing save_every_n_epochs checkpoint_dir model_dir name"
)


def _settle(values: KeyValues) -> dict[str, Any]:
    kind, name = _component(values)
    made: dict[str, Any] = {
        "kind": "train", "loop": "plain", "outputs": "dropped", "batch_size": values["batch_size"],
        "grad_accum": values["gradient_accumulation_steps"], "padding": False,
        "grad_checkpointing": values["enable_activation_checkpointing"], "compile_blocks": values["compile"],
        "clip_grad": values["clip_grad_norm"] not in (None, "None", 0), "precision": _precision(values),
        **_optimizer(values), **({"model": name} if name else {}),
        **({"parallel": "fsdp2"} if int(values.given.get("world_size", 1)) > 1 else {}),
    }  # fmt: skip
    if values["tokenizer.max_seq_len"]:
        made["seq_len"] = values["tokenizer.max_seq_len"]
    if values["dataset.packed"]:
        values.refuse("dataset.packed", "samples of a row are kept apart by masks that are not modelled")
    if not values.has("optimizer._component_"):
        values.refuse("optimizer._component_", "there is no optimizer: the recipe trains nothing")
    loss = values["loss._component_"].rpartition(".")[2]
    if loss not in LOSSES:
        values.refuse("loss._component_", f"{loss} is not the loss of supervised training")
    values.notes.append(
        f"{NOT_MODELLED} torchtune's own modules and its {loss}: planned as transformers' model and loss"
    )
    evaluated = values["batch_size_val"] or made["batch_size"]
    if values["run_val_every_n_steps"] and evaluated > made["batch_size"]:
        values.notes.append(
            f"{NOT_MODELLED} validation, with {evaluated} rows at a time (batch_size_val) where training has"
            f" {made['batch_size']}: memfit plan forward --batch-size {evaluated} tells what its passes take"
        )
    return made if kind == "full" else {**made, **_adapters(values, kind)}


def _component(values: KeyValues) -> tuple[str, str | None]:
    """(full, lora or qlora; a model that memfit knows)."""
    said = (values["model._component_"] or "").rpartition(".")[2]
    kind, name = next(
        ((k, said.removeprefix(f"{k}_")) for k in ("qlora", "lora") if said.startswith(f"{k}_")), ("full", said)
    )
    name = re.sub(r"_(instruct|base)$", "", name)
    found = find_preset(SIZES.get(name, name)) or find_preset(re.sub(r"(\d)_(\d)", r"\1.\2", name.replace("_", "-", 1)))
    if found is None and "model" not in values.given:
        why = f"memfit does not know a model {said or 'that is not named'}"
        values.refuse("model._component_", Refused(why, instead=("model",)))
    return kind, None if found is None else found.name


def _precision(values: KeyValues) -> str:
    if values["dtype"] not in PRECISIONS:
        values.refuse("dtype", f"{values['dtype']} is neither bf16 nor fp32")
    return str(values["dtype"])


def _optimizer(values: KeyValues) -> dict[str, Any]:
    name = values["optimizer._component_"]
    if name not in OPTIMIZERS:
        values.refuse("optimizer._component_", Refused(f"the optimizer {name} is not modelled", instead=("optimizer",)))
        return {}
    found = OPTIMIZERS[name]
    if found == "adamw" and values["optimizer.fused"]:
        return {"optimizer": "adamw-fused"}
    if name.startswith("torch.") and values["optimizer.foreach"] is False:
        if found != "adamw":
            values.refuse("optimizer.foreach", f"{name} weight by weight is not modelled")
        return {"optimizer": "adamw-single"}
    if found == "sgd" and values["optimizer.fused"]:
        values.refuse("optimizer.fused", f"{name} in one kernel is not modelled")
    of_sgd = {name: values[f"optimizer.{name}"] for name in ("weight_decay", "momentum")}
    return {"optimizer": found, **({name: value for name, value in of_sgd.items() if value} if found == "sgd" else {})}


def _adapters(values: KeyValues, kind: str) -> dict[str, Any]:
    if kind == "qlora":
        values.refuse("model._component_", Refused("torchao's 4-bit tensors are not modelled", instead=("quant",)))
    attention = tuple(MODULES.get(name, name) for name in values["model.lora_attn_modules"])
    targets = (*attention, *(MLP if values["model.apply_lora_to_mlp"] else ()))
    if not targets:
        values.refuse("model._component_", "lora_attn_modules and apply_lora_to_mlp name no module")
    return {
        "kind": "lora", "rank": values["model.lora_rank"], "lora_dropout": values["model.lora_dropout"],
        "target_modules": targets, "adapter": "dora" if values["model.use_dora"] else "lora", "adapter_dtype": "same",
    }  # fmt: skip


def _written_optimizer(value: str) -> Edits:
    of_torch = {"adamw-fused": (True, None), "adamw-single": (None, False)}
    fused, foreach = of_torch.get(value, (None, None))
    name = "adamw" if value in of_torch else value
    theirs = next((theirs for theirs, ours in OPTIMIZERS.items() if ours == name), None)
    if theirs is None:
        return {}
    return {"optimizer._component_": theirs, "optimizer.fused": fused, "optimizer.foreach": foreach}


TORCHTUNE = JobFormat(
    name="torchtune",
    title="torchtune",
    nested=True,
    keys=KEYS,
    idle=IDLE,
    refused=REFUSED,
    settle=_settle,
    written={
        "batch_size": "batch_size",
        "grad_accum": "gradient_accumulation_steps",
        "seq_len": "tokenizer.max_seq_len",
        "rank": "model.lora_rank",
        "optimizer": _written_optimizer,
        "grad_checkpointing": "enable_activation_checkpointing",
    },
)
