"""Configs of accelerate and of DeepSpeed, beside flags: how many processes, which types, what is sharded.

They say nothing of the model, its rows and its optimizer. DeepSpeed's engine has no plan: a flag says what to plan in
its place.
"""

from __future__ import annotations

from typing import Any

from memfit.jobfiles.huggingface import (
    BY_BLOCK,
    ENGINE,
    FSDP1,
    GATHERED,
    OFFLOADED,
    OTHER_WRAP,
    kind_meant,
    truth,
    weights_unsaid,
)
from memfit.jobfiles.keys import NOT_MODELLED, FileKey, JobFormat, KeyValues, Refused, file_keys

ONE, DDP, FSDP = "NO", "MULTI_GPU", "FSDP"
BLOCKS = ("Layer", "Block")
"""How classes of a model's blocks are called."""
ON_HOST, NOWHERE = "DeepSpeed keeps it on the host", (None, "none")


def _settle_accelerate(values: KeyValues) -> dict[str, Any]:
    kind, count = values["distributed_type"].upper(), values["num_processes"]
    made: dict[str, Any] = {"kind": kind_meant(values), **weights_unsaid(values, _autocast(values))}
    if kind not in (ONE, DDP, FSDP):
        values.refuse("distributed_type", Refused(f"{kind} is not modelled", instead=("parallel",)))
    if count > 1:
        made["world_size"] = count
    if kind == FSDP:
        made |= _fsdp(values)
    elif count > 1:
        made["parallel"] = "ddp"
    return made


def _autocast(values: KeyValues) -> str | None:
    said = values["mixed_precision"]
    if said not in ("no", "bf16", "fp16", False):
        values.refuse("mixed_precision", f"{said} is not modelled")
    return said if said in ("bf16", "fp16") else None


def _fsdp(values: KeyValues) -> dict[str, Any]:
    if values["fsdp_config.fsdp_version"] != 2:
        values.refuse("fsdp_config.fsdp_version", FSDP1)
    elif not (reshards := truth(values["fsdp_config.fsdp_reshard_after_forward"])):
        why = GATHERED if reshards is False else "with FSDP2 it is yes or no"
        values.refuse("fsdp_config.fsdp_reshard_after_forward", why)
    policy = values["fsdp_config.fsdp_auto_wrap_policy"]
    if not values.has("fsdp_config.fsdp_auto_wrap_policy"):
        values.notes.append(
            f"{NOT_MODELLED} weights that are gathered all at once, as accelerate does where fsdp_auto_wrap_policy is "
            f"not said: planned as with {BY_BLOCK}, which takes less"
        )
    elif policy.upper() != BY_BLOCK:
        values.refuse("fsdp_config.fsdp_auto_wrap_policy", OTHER_WRAP)
    parts = [name for name in values["fsdp_config.fsdp_transformer_layer_cls_to_wrap"] if not name.endswith(BLOCKS)]
    if parts:
        values.notes.append(
            f"{NOT_MODELLED} groups of {', '.join(parts)} (fsdp_transformer_layer_cls_to_wrap), gathered apart from the"
            " rest: planned with a group for each block"
        )
    checkpointing = {"grad_checkpointing": True} if values["fsdp_config.fsdp_activation_checkpointing"] else {}
    return {"parallel": "fsdp2", **checkpointing}


ACCELERATE = JobFormat(
    name="accelerate",
    title="accelerate",
    nested=True,
    keys=file_keys(
        {
            "text": {"distributed_type": ONE, "fsdp_config.fsdp_auto_wrap_policy": "NO_WRAP"},
            "whole": {"num_processes": 1, "fsdp_config.fsdp_version": 1},
            "any": {"mixed_precision": "no", "fsdp_config.fsdp_reshard_after_forward": True},
            "yes": {"fsdp_config.fsdp_activation_checkpointing": False},
            "names": {"fsdp_config.fsdp_transformer_layer_cls_to_wrap": ()},
        }
    ),
    idle="compute_environment debug downcast_bf16 machine_rank main_* num_machines rdzv_* same_network tpu_* gpu_ids "
    "enable_cpu_affinity fsdp_config.fsdp_cpu_ram_efficient_loading "
    "fsdp_config.fsdp_state_dict_type fsdp_config.fsdp_sync_module_states "
    "fsdp_config.fsdp_backward_prefetch fsdp_config.fsdp_forward_prefetch fsdp_config.fsdp_use_orig_params "
    "fsdp_config.fsdp_sharding_strategy fsdp_config.fsdp_min_num_params parallelism_config.* deepspeed_config.*",
    refused={
        "fsdp_config.fsdp_offload_params": Refused(OFFLOADED),
        "fsdp_config.fsdp_activation_checkpointing_offload": Refused("what is kept on the host is not modelled"),
        "deepspeed_config": Refused(ENGINE, (None, {}), instead=("parallel",)),
        **{
            f"deepspeed_config.{name}": Refused(ENGINE, (None,), instead=("parallel",))
            for name in ("zero_stage", "deepspeed_config_file")
        },
        **{
            f"deepspeed_config.offload_{what}_device": Refused(ON_HOST, NOWHERE, instead=("parallel", "offload"))
            for what in ("optimizer", "param")
        },
        "dynamo_config.dynamo_backend": Refused("give --compile", (None, "no", "NO"), instead=("compile",)),
        "use_cpu": Refused("it trains on the CPU: nothing is on a GPU"),
        "megatron_lm_config": Refused("Megatron's engine is not modelled", (None, {})),
        "fp8_config": Refused("training in 8-bit floats is not modelled", (None, {})),
        **{
            f"parallelism_config.parallelism_config_{name}": Refused("other parallelism is not modelled", (None, 0, 1))
            for name in ("dp_replicate_size", "tp_size", "cp_size", "sp_size")
        },
    },
    settle=_settle_accelerate,
)


def _settle_deepspeed(values: KeyValues) -> dict[str, Any]:
    stage = values["zero_optimization.stage"]
    values.refuse(
        "zero_optimization" if values.has("zero_optimization.stage") else "train_micro_batch_size_per_gpu",
        Refused(f"{ENGINE} (ZeRO stage {stage})", instead=("parallel",)),
    )
    autocast = next((name for name in ("bf16", "fp16") if values[f"{name}.enabled"] is True), None)
    made: dict[str, Any] = {"kind": kind_meant(values), **weights_unsaid(values, autocast)}
    for key, setting in (
        ("train_micro_batch_size_per_gpu", "batch_size"),
        ("gradient_accumulation_steps", "grad_accum"),
    ):
        if isinstance(values[key], int):
            made[setting] = values[key]
    if isinstance(values["gradient_clipping"], (int, float)):
        made["clip_grad"] = values["gradient_clipping"] > 0
    return made


AUTO = (
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16.enabled",
    "fp16.enabled",
)  # fmt: skip
"""Left open where the file does not say them."""
DEEPSPEED = JobFormat(
    name="deepspeed",
    title="DeepSpeed",
    nested=True,
    keys={"zero_optimization.stage": FileKey(0, "whole"), **dict.fromkeys(AUTO, FileKey("auto"))},
    idle="train_batch_size zero_allow_untested_optimizer steps_per_print wall_clock_breakdown zero_optimization.* "
    "fp16.* bf16.* optimizer.* scheduler.* zero_force_ds_cpu_optimizer communication_data_type prescale_gradients "
    "zero_optimization dump_state",
    refused={
        f"zero_optimization.offload_{what}.device": Refused(ON_HOST, NOWHERE, instead=("parallel", "offload"))
        for what in ("optimizer", "param")
    },
    settle=_settle_deepspeed,
)
