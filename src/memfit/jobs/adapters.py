"""A model with adapters by peft, whichever of them: its config, what is to be known of it, what is refused."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import nn

from memfit.errors import MemfitError, UnknownName, UsageError
from memfit.jobs.quantised import DTYPES
from memfit.jobs.settings import LORAS, NO_TARGETS, OWN_TARGETS, PROMPTS, peft_type
from memfit.jobs.workload import Workload
from memfit.models.files import first_line

NOT_TRUE = ("fan_in_fan_out", "The following rank_pattern keys", "The following alpha_pattern keys")
"""peft sets the first right for GPT-2's Conv1D itself; patterns do match experts, which it looks for among modules."""
OF_VALUES = ("boft", "unilora")
"""They read numbers that they have drawn, so they are made in host memory, layer by layer."""
BY_FFT = ("c3a", "fourierft")
VIRTUAL_TOKENS = 20
"""As peft's examples have it; its configs have no default."""
FOR_ALL = {"adalora": {"total_step": 1000}, "adaption-prompt": {"adapter_len": 10}}
"""What a config must say: how long it trains, which changes no memory, and the length that the paper has."""
NEEDED = {"adaption-prompt": "adapter_layers", "trainable-tokens": "token_indices"}


class SettingNames(NamedTuple):
    """What settings are called in errors about them."""

    targets: str
    dropout: str
    full: str
    selective: str


FLAGS = SettingNames("--target-modules", "--lora-dropout", "--grad-checkpointing", "--selective-checkpointing")
KEYS = SettingNames("method.target_modules", "method.dropout", *["memory.gradient_checkpointing"] * 2)


ALL_LINEAR = "all-linear"
"""peft's own word: every linear layer but the head, and experts that lie stacked."""


def add_adapters(
    model: nn.Module, work: Workload, named: SettingNames, *, alpha: float | None = None, task: str | None = None
) -> tuple[nn.Module, dict[str, Any], list[str]]:
    """The model with them, the settings that peft has found, and what is to be known of it. `task` is of a model that
    is no language model: its head is then trained too."""
    names, experts_before = linear_layers_of_blocks(model), _stacked_experts(model)
    targets = work.target_modules or (() if work.adapter in (*NO_TARGETS, *OWN_TARGETS) else tuple(names))
    if not targets and work.adapter not in (*NO_TARGETS, *OWN_TARGETS):
        raise UsageError(f"{work.model} has no linear layer that peft could adapt")
    config = _config(work, targets, alpha=alpha, task=task or ("CAUSAL_LM" if generates(model) else None))
    modules = [name for name, _ in model.named_modules()]
    try:
        adapted, said = _adapted(model, config, work)
    except Exception as error:
        _refuse_unknown(modules, config, targets, names, named)
        experts = _of_experts(config, targets)
        if experts and work.lora_dropout:
            others = ",".join(name for name in names if name not in experts)
            theirs = f"{', '.join(experts)} are theirs in {work.model}"
            raise UsageError(
                f"{named.dropout} {work.lora_dropout}: peft has no dropout for experts, and {theirs}",
                hint=f"{named.dropout} 0, or adapt other layers: {named.targets} {others}",
            ) from error
        if isinstance(error, MemfitError) or (not isinstance(error, ValueError) and work.adapter in LORAS):
            raise
        if work.adapter in LORAS:
            raise UsageError(f"{named.targets}: {first_line(error)}", hint=_linear(names)) from error
        raise UsageError(f"--adapter {work.adapter}: peft cannot adapt {work.model}: {first_line(error)}") from error
    targets = () if is_all_linear(targets) else targets  # peft says which these are
    _refuse_unknown(modules, config, targets, names, named)
    notes = [f"peft: {text}" for text in said if not text.startswith(NOT_TRUE)]
    if of_experts := _of_experts(config, targets):
        notes.append(f"peft adapts every expert by {', '.join(of_experts)}, and no other layer of these names")
    elif not work.target_modules and experts_before and experts_before == _stacked_experts(adapted):
        notes.append(
            f"the experts have no adapters: peft's own all-linear would adapt them ({named.targets} {ALL_LINEAR})"
        )
    if work.adapter in BY_FFT:
        notes.append("not modelled: what cuFFT takes beside its results: the peak may be higher")
    if work.adapter not in LORAS:
        notes.append(f"{type(config).__name__}: {_shown(config)}")
    elif work.adapter_config:
        notes.append(f"--adapter-config {work.adapter_config}")
    return adapted, _found(config, work, targets), notes


def _config(work: Workload, targets: Sequence[str], *, alpha: float | None, task: str | None) -> Any:
    kind, made = config_arguments(work, targets, alpha=alpha)
    try:
        return kind(**made, task_type=task)
    except (ValueError, TypeError, ImportError) as error:
        raise UsageError(f"--adapter {work.adapter}: {' '.join(str(error).split())}"[:300]) from error


def config_arguments(
    work: Workload, targets: Sequence[str], *, alpha: float | None = None
) -> tuple[type[Any], dict[str, Any]]:
    """Flags and `--adapter-config` in the words of peft: a class, and what it is to be told."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind: Any = PEFT_TYPE_TO_CONFIG_MAPPING.get(peft_type(work.adapter))  # type: ignore[call-overload,unused-ignore]
    if kind is None:
        import peft

        raise UsageError(f"--adapter {work.adapter}: the installed peft {peft.__version__} does not have it")
    known = {field.name for field in dataclasses.fields(kind)}
    given: dict[str, Any] = json.loads(work.adapter_config or "{}")
    for key in given:
        if key not in known:
            raise UnknownName("key of --adapter-config", key, sorted(known), more=f"it is a {kind.__name__}")
    if (needed := NEEDED.get(work.adapter)) and needed not in given:
        raise UsageError(f"--adapter {work.adapter} needs {needed}", hint=f"--adapter-config {needed}=...")
    made: dict[str, Any] = dict(FOR_ALL.get(work.adapter, {}))
    if targets and "target_modules" not in given:
        made["target_modules"] = ALL_LINEAR if is_all_linear(targets) else list(targets)
    if work.adapter in PROMPTS:
        made["num_virtual_tokens"] = virtual_tokens(work)
    if work.rank is not None and "r" in known:
        made["init_r" if work.adapter == "adalora" else "r"] = work.rank
    if work.adapter == "oft" and work.rank is not None:
        made["oft_block_size"] = 0  # one of the two says the other
    if "lora_dropout" in known:
        made["lora_dropout"] = work.lora_dropout
    if work.adapter in LORAS:
        assert work.rank is not None
        alpha = 2 * work.rank if alpha is None else alpha
        made["lora_alpha"] = int(alpha) if float(alpha).is_integer() else alpha
    if work.adapter == "dora":
        made["use_dora"] = True
    return kind, made | given


def virtual_tokens(work: Workload) -> int:
    """What an adapter puts before each row: they take positions, too."""
    if work.adapter not in PROMPTS:
        return 0
    asked = json.loads(work.adapter_config or "{}").get("num_virtual_tokens", VIRTUAL_TOKENS)
    if type(asked) is not int or asked < 1:
        raise UsageError(f"num_virtual_tokens {asked} is not a whole number above 0", hint="such as 20")
    return asked


def _adapted(model: nn.Module, config: Any, work: Workload) -> tuple[nn.Module, list[str]]:
    from peft import get_peft_model

    of_base = next(model.parameters())
    device, dtype = of_base.device, of_base.dtype if work.adapter_dtype == "same" else None
    if work.is_quantised and dtype is not None:  # that of a layer is what it computes in; 8 bits are none to train in
        dtype = DTYPES[work.compute_precision] if work.quant != "int8" else torch.float32
    with (
        torch.device("cpu") if work.adapter in OF_VALUES else nullcontext(),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        adapted: nn.Module = get_peft_model(model, config, autocast_adapter_dtype=dtype is None)  # type: ignore[arg-type,unused-ignore]
    if work.adapter in OF_VALUES:
        adapted.to(device)
    if dtype is not None and work.adapter not in PROMPTS:
        for parameter in adapted.parameters():  # peft does this itself, but not for a model on meta
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
    about_the_job = (each for each in said if not issubclass(each.category, (FutureWarning, DeprecationWarning)))
    return adapted, [str(each.message).splitlines()[0] for each in about_the_job]


def _found(config: Any, work: Workload, targets: Sequence[str]) -> dict[str, Any]:
    """Settings that were left to peft, as it has them."""
    found: dict[str, Any] = {"target_modules": tuple(targets)} if targets else {}
    kept = getattr(config, "target_modules", None)
    if not targets and kept and not isinstance(kept, str) and not work.target_modules:
        found["target_modules"] = tuple(sorted(kept))
    rank = getattr(config, "init_r" if work.adapter == "adalora" else "r", None)
    return found | ({"rank": rank} if work.rank is None and isinstance(rank, int) and rank > 0 else {})


def _shown(config: Any) -> str:
    """What decides its size."""
    left_out = (
        "task_type", "peft_type", "inference_mode", "target_modules", "runtime_config", "peft_version",
        "num_layers",  # those of the model that was traced, which may be a part of the whole
    )  # fmt: skip
    return ", ".join(
        f"{field.name} {value}"
        for field in dataclasses.fields(config)
        if field.name not in left_out
        and isinstance(value := getattr(config, field.name), (int, float, str))
        and not isinstance(value, bool)
    )


def _refuse_unknown(
    modules: Sequence[str], config: object, targets: Sequence[str], linear: Sequence[str], named: SettingNames
) -> None:
    """peft adapts what it finds and says nothing about the rest."""
    experts = _of_experts(config, targets)
    for target in targets:
        if target not in experts and not any(f".{name}".endswith(f".{target}") for name in modules):
            near = get_close_matches(target, sorted({name.rpartition(".")[2] for name in modules}), n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"{named.targets}: no module is called {target!r}", hint=f"{meant}{_linear(linear)}")


def is_all_linear(targets: Sequence[str]) -> bool:
    return tuple(targets) == (ALL_LINEAR,)


def _stacked_experts(model: nn.Module) -> list[str]:
    """Modules whose weights are those of all experts in one, which no linear layer is."""
    return sorted(
        type(module).__name__
        for name, module in model.named_modules()
        if name.endswith("experts") and any(p.dim() == 3 for p in module._parameters.values() if p is not None)
    )


def _linear(names: Sequence[str]) -> str:
    return f"linear layers of a block: {', '.join(names)}"


def _of_experts(config: object, targets: Sequence[str]) -> list[str]:
    """peft replaces names that older versions of transformers had for experts by those of their 3-D parameters."""
    kept = getattr(config, "target_modules", None) or ()
    return [name for name in targets if name not in kept] if getattr(config, "target_parameters", None) else []


def linear_layers_of_blocks(model: nn.Module) -> list[str]:
    """The last part of the names of all linear layers but those of the head; the last two where that is a number."""
    from transformers.pytorch_utils import Conv1D

    head = getattr(model, "get_output_embeddings", lambda: None)()
    prefix = getattr(model, "base_model_prefix", "")
    within = "" if head is not None or not hasattr(model, prefix) else f"{prefix}."
    names = {
        ".".join(name.split(".")[-2 if name.rpartition(".")[2].isdigit() else -1 :]): None
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and name.startswith(within)
    }
    return list(names)


def generates(model: nn.Module) -> bool:
    return bool(getattr(model, "can_generate", lambda: False)())
