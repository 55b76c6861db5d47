"""Values of a config file as the settings want them: YAML's quirks, and keys of others that mean several of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, get_args, get_type_hints

from memfit.errors import UsageError
from memfit.jobs.training.config import TrainConfig
from memfit.jobs.training.config_names import AUTOCAST, NO_AUTOCAST, OPTIMIZERS, PRECISIONS, SETTINGS

Made = Iterator[tuple[str, Any]]


def converted(path: str, value: Any, key: str) -> Made:
    """(memfit's key, value) of one key of the file; most often itself."""
    if path in SEVERAL:
        yield from SEVERAL[path](value, key)
    else:
        yield path, _value(path, value)


@cache
def type_of(path: str) -> Any:
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
    if path == "precision" and isinstance(value, str):
        return PRECISIONS.get(value.removeprefix("torch."), value)
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
        raise UsageError(f"{key} is yes or no, not {value!r}")
    return value


def _bf16(value: Any, key: str) -> Made:
    yield (AUTOCAST, "bf16") if _flag(value, key) else (f"{NO_AUTOCAST}bf16", "")


def _fp16(value: Any, key: str) -> Made:
    yield (AUTOCAST, "fp16") if _flag(value, key) else (f"{NO_AUTOCAST}fp16", "")


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


SEVERAL: dict[str, Callable[[Any, str], Made]] = {
    "bf16": _bf16, "fp16": _fp16, "mixed_precision": _mixed, "betas": _betas, "use_lora": _use_lora,
    "report_to": _report_to, "gradient_checkpointing_kwargs": _not_reentrant, "fsdp": _fsdp,
    "activation_offloading": _activations,
}  # fmt: skip
