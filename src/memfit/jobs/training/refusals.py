"""What is refused before a run: what the engine cannot do, or this machine lacks. A setting is never ignored."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from memfit.errors import UsageError
from memfit.jobs.training.config import FACTORY, TORCH_ADAMW, TrainConfig
from memfit.jobs.training.config_names import OF_PACKAGES
from memfit.jobs.workload import Workload
from memfit.models.presets import is_basics, is_gsa
from memfit.versions import release_of, versions


def check_offload(work: Workload, *, setting: str) -> None:
    """`setting` is how the user said what lies on the host."""
    offload, names = work.offload, ", ".join(TORCH_ADAMW)
    if "optimizer" in offload and work.optimizer not in TORCH_ADAMW:
        raise UsageError(f"{setting} optimizer is AdamW on the host, and the optimizer is {work.optimizer}", hint=names)
    if not work.is_sharded:
        return
    for name in ("optimizer", "weights"):
        if name in offload:
            raise UsageError(
                f"{setting} {name} does not go with fsdp2, which shards what would lie on the host",
                hint="more GPUs make the shards smaller, or train with ddp",
            )
    if "activations" in offload and work.checkpointing == "none":
        raise UsageError(
            f"{setting} activations with fsdp2 needs checkpointing: without it the gathered weights would go out too",
            hint="gradient_checkpointing: full, or --grad-checkpointing",
        )


NEEDS_BITSANDBYTES = tuple(name for name, made in OF_PACKAGES.items() if made.startswith("bitsandbytes."))
OLDEST_BITSANDBYTES = (0, 46)
"""The oldest that transformers 5 quantises with."""


def check_engine(config: TrainConfig, *, world_size: int) -> tuple[str, ...]:
    """What no machine could run. Notes on what is of no effect here."""
    work = config.workload.with_found(world_size=world_size)
    check_offload(work, setting="memory.offload")
    _check_model(config)
    _check_quant(config, world_size)
    if config.device == "cpu":
        for error in _only_on_gpus(config, world_size):
            raise error
    return _check_parallel(config, world_size)


def missing_gpu(config: TrainConfig, *, world_size: int) -> Iterator[UsageError]:
    if config.device == "cpu":
        return
    import torch

    work = config.workload
    if _has_gpu():
        if work.is_quantised and work.has_bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            yield work.refusal_without_bf16(torch.cuda.get_device_name())
        return
    if config.device == "cuda":
        yield UsageError(
            f"device cuda: torch {torch.__version__} finds no GPU here", hint="device: cpu trains without one"
        )
    yield from _only_on_gpus(config, world_size)


def missing_packages(config: TrainConfig) -> Iterator[UsageError]:
    yield from _lacks_bitsandbytes(config)
    name = str(config.workload.optimizer)
    if name.endswith("torchao") and find_spec("torchao") is None:
        yield UsageError(f"optimizer {name} needs torchao", hint="pip install torchao, or adamw-fused")
    if config.logging.wandb and find_spec("wandb") is None:
        yield UsageError("logging.wandb needs W&B", hint="pip install wandb")
    if config.logging.tensorboard and not has_tensorboard():
        yield UsageError("logging.tensorboard needs TensorBoard", hint="pip install tensorboard")
    if config.model.attention == "flash_attention_2" and find_spec("flash_attn") is None:
        yield UsageError("model.attention flash_attention_2 needs flash-attn", hint="sdpa has flash kernels of its own")


def _lacks_bitsandbytes(config: TrainConfig) -> Iterator[UsageError]:
    work, name = config.workload, config.workload.optimizer
    what, instead = (work.few_bits, "weights of 16 bits") if work.is_quantised else (f"optimizer {name}", "adamw-fused")
    if not work.is_quantised and name not in NEEDS_BITSANDBYTES:
        return
    found = None if find_spec("bitsandbytes") is None else versions()["bitsandbytes"] or "0.0"
    if found is None:
        yield UsageError(f"{what} needs bitsandbytes", hint=f"pip install 'memfit[quant]', or {instead}")
    elif work.is_quantised and release_of(found) < OLDEST_BITSANDBYTES:
        oldest = ".".join(map(str, OLDEST_BITSANDBYTES))
        yield UsageError(f"{what} needs bitsandbytes {oldest}, and {found} is here", hint="pip install -U bitsandbytes")


def has_tensorboard() -> bool:
    return find_spec("tensorboard") is not None or find_spec("tensorboardX") is not None


def _check_model(config: TrainConfig) -> None:
    """What a factory makes only its own code can tell: what it lacks is said when it is called."""
    name = config.model.name
    if config.model.attention != "sdpa" and (is_gsa(name) or is_basics(name) or FACTORY.fullmatch(name)):
        raise UsageError(f"model.attention {config.model.attention}: the attention of {name} is its own")
    if not is_basics(name):
        return
    if config.workload.checkpointing != "none":
        raise UsageError(f"memory.gradient_checkpointing: {name} has none", hint="it needs a transformers model")
    if config.workload.loss == "chunked":
        raise UsageError(f"loss chunked: {name} is no transformers model", hint="loss: full works")
    if config.workload.kind == "lora":
        raise UsageError(f"method lora: the linear layers of {name} are its own, and peft knows none of them")


def _check_quant(config: TrainConfig, world_size: int) -> None:
    """What goes together with quantised weights."""
    work = config.workload
    if work.stored is not None and (not work.runs_in_memfit_train or work.kind == "train"):
        why = "all of its weights cannot be trained" if work.kind == "train" else "memfit train does not take it"
        raise UsageError(
            f"{work.few_bits} is quantised already, and {why}",
            hint="LoRA on what bitsandbytes has quantised, without `quant`; or the model in 16 bits",
        )
    if not work.is_quantised:
        return
    clash = {
        "several processes": world_size > 1,
        "memory.offload weights": "weights" in work.offload,
        "memory.gradient_checkpointing selective": work.checkpointing == "selective",
        "model.from_scratch: only weights of a checkpoint are quantised": config.model.starts_from_scratch,
    }
    for setting in (name for name, here in clash.items() if here):
        raise UsageError(f"{work.few_bits} does not go with {setting}", hint="weights of 16 bits, or without it")


def _only_on_gpus(config: TrainConfig, world_size: int) -> Iterator[UsageError]:
    if config.workload.is_quantised:
        yield UsageError(
            f"{config.workload.few_bits} needs a GPU",
            hint="--dry-run, prepare_job(..., to_run=False) in Python, plans it without",
        )
    if config.workload.precision == "amp-fp16":
        yield UsageError("precision amp-fp16 needs a GPU", hint="amp-bf16 and fp32 work on the CPU")
    optimizer = str(config.workload.optimizer)
    if optimizer in OF_PACKAGES:
        yield UsageError(f"optimizer {optimizer} needs a GPU")
    if config.workload.parallel == "fsdp2" and world_size > 1:
        yield UsageError("parallel fsdp2 needs GPUs: accelerate shards nothing on CPUs", hint="parallel: ddp")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _check_parallel(config: TrainConfig, world_size: int) -> tuple[str, ...]:
    of_ddp = ("gradient_as_bucket_view", "find_unused_parameters")
    if world_size == 1:
        return tuple(config.no_effect("parallel", ("kind", *of_ddp), "in a single process"))
    if config.workload.parallel != "fsdp2":
        return ()
    unused = tuple(config.no_effect("parallel", of_ddp, "with fsdp2: they are of DDP"))
    if config.memory.oom_recovery:
        # Each layer's weights are gathered by all processes together: where one of them stops, all the others wait.
        return (*unused, "with fsdp2 a process that runs out of memory ends the run; its checkpoints stay")
    return unused
