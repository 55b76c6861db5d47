"""TrainingArguments of Hugging Face as JSON, what every tool that trains with its Trainer has of them, and launchers.

Defaults are those of transformers 5. Not in the file, and so by flags: the model, the type of its weights, adapters,
and how long rows are; a file of TRL's SFTConfig says the last.

Configs of accelerate and of DeepSpeed say how many processes there are, which types they have and what is sharded, and
nothing of the model, its rows and its optimizer. DeepSpeed's engine has no plan: a flag says what to plan in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memfit.jobfiles.keys import NOT_MODELLED, FileKey, JobFormat, KeyValues, Refused, file_keys
from memfit.jobs.settings import kinds_that_read
from memfit.jobs.training.config_names import OPTIMIZERS, TRAINER_NAMES

TRAINER_KEYS = file_keys({
    "whole": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "per_device_eval_batch_size": 8},
    "text": {"optim": "adamw_torch_fused", "torch_compile_backend": None, "torch_compile_mode": None},
    "number": {"weight_decay": 0.0, "max_grad_norm": 1.0},
    "yes": {"bf16": False, "fp16": False, "gradient_checkpointing": False, "torch_compile": False},
    "any": {
        "optim_args": None, "gradient_checkpointing_kwargs": None, "eval_strategy": "no", "evaluation_strategy": "no",
        "fsdp": None, "fsdp_config": None,
    },
})  # fmt: skip
"""What decides memory, wherever the Trainer trains."""
TRAINER_NEWER = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
"""As transformers 5.23 calls them."""

TRAINER_IDLE = (
    "output_dir overwrite_output_dir num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs "
    "warmup_steps warmup_ratio adam_beta1 adam_beta2 adam_epsilon tf32 logging_* log_* "
    "average_tokens_across_devices bf16_full_eval fp16_full_eval bf16_backend half_precision_backend "
    "include_num_input_tokens_seen include_tokens_per_second disable_tqdm report_to run_name project trackio_* eval_* "
    "prediction_loss_only include_for_metrics include_inputs_for_metrics batch_eval_metrics save_* "
    "enable_jit_checkpoint push_to_hub* hub_* load_best_model_at_end metric_for_best_model greater_is_better "
    "ignore_data_skip restore_callback_states_from_checkpoint seed data_seed dataloader_* "
    "remove_unused_columns label_names train_sampling_strategy group_by_length length_column_name "
    "ddp_find_unused_parameters ddp_broadcast_buffers ddp_backend ddp_timeout debug skip_memory_metrics do_train "
    "do_eval do_predict resume_from_checkpoint local_rank sortish_sampler predict_with_generate generation_* "
    "past_index no_cuda use_mps_device jit_mode_eval liger_kernel_config "
    "dispatch_batches per_gpu_eval_batch_size mp_parameters transformers_version _n_gpu distributed_state "
    "deepspeed_plugin fp16_opt_level fp16_backend use_ipex tpu_* ray_scope torchdynamo use_legacy_prediction_loop "
    "fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap xpu_backend"
)

ENGINE = "DeepSpeed's engine keeps weights, gradients and states in buffers of its own"
SHARED = "each process gets a share of the batch: give --batch-size, the rows of one process"
TRAINER_REFUSED = {
    "deepspeed": Refused(ENGINE, instead=("parallel",)),
    "use_liger_kernel": Refused("Liger's kernels take other memory than the model's own"),
    "neftune_noise_alpha": Refused("the noise that NEFTune adds to embeddings is not modelled", (0, None)),
    "auto_find_batch_size": Refused("it halves the batch until it fits: `memfit fit` says which does"),
    "label_smoothing_factor": Refused("a smoothed loss keeps more than a plain one", (0, 0.0)),
    "torch_empty_cache_steps": Refused("emptying the cache between steps is not modelled", (None,)),
    "optim_target_modules": Refused("optimizers of chosen modules are not modelled", (None, [])),
    "full_determinism": Refused("deterministic kernels take other memory"),
    "split_batches": Refused(SHARED, (False, None), instead=("batch_size",)),
    "per_gpu_train_batch_size": Refused("its name is per_device_train_batch_size", (None,), instead=("batch_size",)),
    "parallelism_config": Refused("tensor, context and expert parallelism are not modelled", (None,)),
    "ddp_bucket_cap_mb": Refused("DDP's buckets are planned at their usual 25 MB", (None, 25)),
    "ddp_static_graph": Refused("DDP is planned without a static graph"),
    "use_cpu": Refused("it trains on the CPU: nothing is on a GPU"),
    "adafactor": Refused("give --optimizer adafactor", instead=("optimizer",)),
    "tp_size": Refused("tensor parallelism is not modelled", (0, 1)),
    "activation_offloading": Refused("TRL's offloading of activations is not modelled"),
}


def trainer_settings(values: KeyValues) -> dict[str, Any]:
    """What the Trainer itself decides: rows, optimizer, checkpointing, processes."""
    sharded = fsdp_settings(values)
    made: dict[str, Any] = {
        "loop": "trainer",
        "batch_size": values["per_device_train_batch_size"],
        "grad_accum": values["gradient_accumulation_steps"],
        "clip_grad": values["max_grad_norm"] > 0,
        "grad_checkpointing": values["gradient_checkpointing"],
        **optimizer_setting(values, "optim"),
        **sharded,
        **_compiled(values),
    }
    if values["gradient_checkpointing"] and "grad_checkpointing" in sharded:
        values.refuse(
            values.name_of("gradient_checkpointing"), "with that of FSDP beside it the Trainer does not start"
        )
    kwargs = values["gradient_checkpointing_kwargs"]
    for name, usual, what in (("every_n_layers", 1, "only some of the layers"), ("offload", False, "on the host")):
        if isinstance(kwargs, dict) and kwargs.get(name, usual) != usual and values["gradient_checkpointing"]:
            values.refuse(
                values.name_of("gradient_checkpointing_kwargs"), f"{name}: checkpoints {what} are not modelled"
            )
    note_evaluation(values, made["batch_size"])
    return made


def _compiled(values: KeyValues) -> dict[str, Any]:
    """A backend or a mode that is named switches it on."""
    backend, mode = values["torch_compile_backend"], values["torch_compile_mode"]
    if backend not in (None, "inductor"):
        values.refuse("torch_compile_backend", f"torch.compile by {backend} is not modelled, by inductor it is")
    if mode not in (None, "default"):
        values.refuse("torch_compile_mode", "only torch.compile's default mode is modelled")
    return {"compile": True} if values["torch_compile"] or backend or mode else {}


def optimizer_setting(values: KeyValues, key: str) -> dict[str, Any]:
    name = values[key].lower()
    if name not in OPTIMIZERS:
        values.refuse(key, Refused(f"the optimizer {name} is not modelled", instead=("optimizer",)))
        return {}
    made: dict[str, Any] = {"optimizer": OPTIMIZERS[name]}
    if made["optimizer"] == "sgd":
        made["weight_decay"] = values["weight_decay"]
        if momentum := _momentum(values):
            made["momentum"] = momentum
    return made


def _momentum(values: KeyValues) -> float:
    """Of `optim_args`, in either of its forms: `momentum=0.9,nesterov=True`, or a section."""
    said = values["optim_args"]
    if isinstance(said, str):
        said = dict(each.split("=", 1) for each in said.replace(" ", "").split(",") if "=" in each)
    if said is None or (isinstance(said, Mapping) and "momentum" not in said):
        return 0.0
    try:
        return float(said["momentum"])
    except (TypeError, ValueError):
        values.refuse("optim_args", f"{values['optim_args']!r} is no momentum=NUMBER")
        return 0.0


def note_evaluation(values: KeyValues, rows: int) -> None:
    """Passes without gradients; only where they have more rows can they be what is most."""
    wanted, evaluated = values["eval_strategy"], values["per_device_eval_batch_size"]
    wanted = values["evaluation_strategy"] if wanted == "no" else wanted  # its name of before transformers 4.46
    if wanted not in ("no", None, False) and evaluated > rows:
        values.notes.append(
            f"{NOT_MODELLED} evaluation, with {evaluated} rows at a time (per_device_eval_batch_size) where training "
            f"has {rows}: memfit plan forward --batch-size {evaluated} tells what its passes take"
        )


def note_reentrant(values: KeyValues, reentrant: bool, kind: str) -> None:
    """With frozen weights both kinds take the same; where all are trained, torch reserves a few percent more."""
    if reentrant and kind == "train":
        values.notes.append(
            f"{NOT_MODELLED} reentrant checkpointing: planned as torch's other kind, which reserves less"
        )
    elif reentrant:
        values.notes.append("checkpointing is reentrant in this job; it is planned as torch's other kind")


FSDP_IDLE = (
    "min_num_params", "transformer_layer_cls_to_wrap", "cpu_ram_efficient_loading", "state_dict_type",
    "final_state_dict_type", "forward_prefetch", "backward_prefetch", "use_orig_params", "sync_module_states",
    "limit_all_gathers", "sharding_strategy", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings",
)  # fmt: skip
"""Keys of an fsdp_config without influence on memory with FSDP2 around each block."""
FSDP_READ = (
    "version", "cpu_offload", "offload_params", "reshard_after_forward", "activation_checkpointing",
    "auto_wrap_policy", "xla",
)  # fmt: skip
BY_BLOCK = "TRANSFORMER_BASED_WRAP"
OTHER_WRAP = f"only blocks that are gathered one by one ({BY_BLOCK}) are modelled"
GATHERED = "weights that stay gathered after the forward pass are not modelled"
OFFLOADED = "FSDP's offloading of weights is not modelled"
RESHARDING = {"full_shard": True, "shard_grad_op": False}
STRATEGIES = (*RESHARDING, "hybrid_shard", "hybrid_shard_zero2", "no_shard")
YES, NO = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")
FSDP1 = Refused("FSDP1 is not modelled, FSDP2 is", instead=("parallel",))


def fsdp_settings(values: KeyValues, version: int | None = None) -> dict[str, Any]:
    """As `_process_fsdp_args` of transformers/training_args.py reads it, which takes FSDP2 where no version is said.
    `version`: where it stands beside; then the config alone asks for it. A file of all TrainingArguments has one that
    says nothing."""
    wanted, config = values["fsdp"], values["fsdp_config"]
    key = "fsdp" if wanted else "fsdp_config"
    if wanted and isinstance(config, str):
        values.refuse("fsdp_config", "it names a file, which is not opened: write its keys here")
    config = (
        {str(name).removeprefix("fsdp_"): each for name, each in config.items()} if isinstance(config, dict) else {}
    )
    if not wanted and not (config and version):
        return {}
    for name in config:
        if name not in FSDP_READ:
            (values.idle if name in FSDP_IDLE else values.unknown).append(f"fsdp_config.{name}")
    if version is None and config.get("version") is None:
        values.notes.append("fsdp without a version is FSDP2, as transformers 5 has it; version 4 takes FSDP1")
    is_second = str(config.get("version") or version or 2) == "2"
    words = wanted.split() if isinstance(wanted, str) else wanted if isinstance(wanted, list) else []
    for why in _unplanned_fsdp(list(map(str, words)), config, is_second):
        if key not in values.problems:
            values.refuse(key, why)
    return {
        "parallel": "fsdp2",
        **({"grad_checkpointing": True} if truth(config.get("activation_checkpointing")) else {}),
    }


def _unplanned_fsdp(words: list[str], config: Mapping[str, Any], is_second: bool) -> Iterator[Refused | str]:
    """Words only say what the config does not."""
    strategy = next((word for word in words if word in STRATEGIES), None)
    if not is_second:
        yield FSDP1
    elif strategy not in (None, *RESHARDING):
        yield Refused(f"{strategy} is of FSDP1, which is not modelled", instead=("parallel",))
    if other := [word for word in words if word not in (*STRATEGIES, "offload", "auto_wrap")]:
        yield f"{other[0][:40]!r} is no option of FSDP"
    if config.get("cpu_offload", "offload" in words) or _on(config.get("offload_params")):  # there "false" is yes
        yield OFFLOADED
    said = config.get("reshard_after_forward", RESHARDING.get(strategy or ""))
    reshards = truth(said) if is_second else RESHARDING.get(str(said).lower(), truth(said))
    if said is not None and not reshards:
        yield GATHERED if reshards is False else f"reshard_after_forward {str(said)[:40]!r} is neither true nor false"
    if str(config.get("auto_wrap_policy") or BY_BLOCK).upper() != BY_BLOCK:
        yield OTHER_WRAP
    if config.get("xla"):
        yield "FSDP on a TPU is not modelled"
    if truth(config.get("activation_checkpointing", False)) is None:
        yield "activation_checkpointing is neither true nor false"


def truth(value: object) -> bool | None:
    """As transformers and accelerate read it from any text; None is neither."""
    text = str(value).lower()
    return text in YES if text in (*YES, *NO) else None


def _on(value: object) -> bool:
    return value in (True, "true", "True")


def autocast_of(values: KeyValues) -> str | None:
    wanted = [name for name in ("bf16", "fp16") if values[name]]
    if len(wanted) == 2:
        values.refuse("fp16", "bf16 and fp16 are both yes")
    return wanted[0] if wanted else None


def weights_unsaid(values: KeyValues, autocast: str | None) -> dict[str, Any]:
    """Where the file has the autocast region, and flags the type of the weights."""
    said = values.given.get("precision")
    if said is not None:
        same = str(said).startswith("amp-") or autocast is None
        return {} if same or "autocast" in values.given else {"autocast": autocast}
    if values.given.get("quant", "none") != "none":
        return {"precision": autocast or "bf16", **({"autocast": autocast} if autocast else {})}
    values.notes.append(
        "weights are taken as fp32: the file does not say their type (--precision bf16 where they are loaded so)"
    )
    return {"precision": f"amp-{autocast}" if autocast else "fp32"}


def kind_meant(values: KeyValues) -> str:
    """A setting of adapters means them, and so do quantised weights."""
    return "lora" if any(name == "quant" or kinds_that_read([name]) == ["lora"] for name in values.given) else "train"


OF_TRL = ("packing", "eval_packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field",
          "dataset_num_proc", "dataset_kwargs", "loss_type", "padding_free")  # fmt: skip
"""Keys that SFTConfig has and TrainingArguments has not."""


def _as_trl_by_default(values: KeyValues, made: dict[str, Any]) -> str | None:
    """trl/trainer/sft_config.py: checkpointing, and bf16 where fp16 is not asked for."""
    autocast = autocast_of(values)
    found = [key for key in OF_TRL if values.has(key)]
    if not found:
        return autocast
    if not values.has("gradient_checkpointing"):
        made["grad_checkpointing"] = values.defaults["gradient_checkpointing"] = True
    if not values.has("bf16") and autocast is None:
        autocast, values.defaults["bf16"] = "bf16", True
    values.notes.append(f"{found[0]} is a key of TRL's SFTConfig: what the file does not say is as TRL has it")
    if not values.has("loss_type"):
        values.notes.append(
            f"{NOT_MODELLED} the loss in pieces, which newer versions of TRL compute where no loss_type is given:"
            " planned whole (loss_type: nll), which takes more"
        )
    return autocast


def _settle(values: KeyValues) -> dict[str, Any]:
    made = trainer_settings(values)
    autocast = _as_trl_by_default(values, made)
    shares = values["accelerator_config"]
    if isinstance(shares, dict) and _on(shares.get("split_batches")):
        values.refuse("accelerator_config", Refused(SHARED, instead=("batch_size",)))
    kwargs = values["gradient_checkpointing_kwargs"]
    reentrant = isinstance(kwargs, dict) and bool(kwargs.get("use_reentrant"))
    note_reentrant(values, reentrant and made["grad_checkpointing"], kind_meant(values))
    length = values["max_length"] or values["max_seq_length"]
    if values["packing"]:
        values.refuse("packing", "rows packed by TRL have masks of their own")
    return {
        **made, "kind": kind_meant(values), **weights_unsaid(values, autocast),
        **({"seq_len": length} if length else {}),
        **({"model": values["model_name_or_path"]} if values["model_name_or_path"] else {}),
    }  # fmt: skip


def written_optimizer(key: str) -> Any:
    return lambda value: {key: TRAINER_NAMES[value]} if value in TRAINER_NAMES else {}


HUGGINGFACE = JobFormat(
    name="huggingface",
    title="TrainingArguments",
    keys=TRAINER_KEYS | file_keys({
        "whole": {"max_length": None, "max_seq_length": None}, "yes": {"packing": False},
        "any": {"accelerator_config": None}, "text": {"model_name_or_path": None},
    }),
    idle=f"{TRAINER_IDLE} dataset_* eos_token pad_token chat_template_path assistant_only_loss completion_only_loss "
    "shuffle_dataset",
    refused={
        **TRAINER_REFUSED,
        "use_cache": Refused("keys and values that the Trainer keeps are not modelled", (False, None)),
        "pad_to_multiple_of": Refused("rows are padded to a multiple: give --seq-len, their length then", (None, 1),
                                      instead=("seq_len",)),
        "model_init_kwargs": Refused("give the type of the weights as --precision, and --attention eager where it says"
                                     " so", (None, {}), instead=("precision",)),
        "padding_free": Refused("rows without padding have attention kernels of their own"),
        "loss_type": Refused("losses of TRL other than nll are not modelled", ("nll", None)),
    },
    settle=_settle,
    written={
        "batch_size": "per_device_train_batch_size",
        "grad_accum": "gradient_accumulation_steps",
        "optimizer": written_optimizer("optim"),
        "grad_checkpointing": lambda value: {
            "gradient_checkpointing": value, "gradient_checkpointing_kwargs": {"use_reentrant": False}
        },
    },
    newer=TRAINER_NEWER,
)  # fmt: skip

# -- accelerate and DeepSpeed ------------------------------------------------------------------------------------------

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
