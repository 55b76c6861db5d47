"""A job by its settings, every one checked, with the defaults that the plan shows back.

A line of `plan batch`, the flags of `plan`, and the arguments of `memfit.predict` are all one of these: how it is made,
and what follows from its settings. `settings.py` is the table of them, `together.py` what does not go together.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from memfit.errors import InputError, UsageError
from memfit.files import text_in
from memfit.jobs.settings import (
    AS_IN_QLORA,
    BY_BITSANDBYTES,
    LORAS,
    MAX_TOKENS,
    MAX_WINDOW,
    QLORA,
    READ_BY,
    TRAININGS,
    USUAL_RANK,
    Adapter,
    Checkpointing,
    Offload,
    Settings,
    Sparsity,
    as_fields,
    as_json,
    check_known,
    check_one_of,
    check_setting,
    check_whole,
    flag,
    peft_type,
    setting_types,
)
from memfit.jobs.together import (
    check_autocast,
    check_compiled,
    check_quantised,
    refuse_unlike_stored,
    refuse_unused,
    unused,
)
from memfit.models.heads import HEAD_NAMES, Head
from memfit.models.registry import ModelSource, head_named, resolve
from memfit.models.stored_weights import StoredWeights, stored_weights
from memfit.units import parse_bytes

NO_MODEL = "-"
"""In place of one where only the settings matter."""


@dataclass(frozen=True, kw_only=True)
class Workload(Settings):
    """A job by its settings, those of `memfit plan`; what is wrong with one is told when it is made."""

    def __post_init__(self) -> None:
        self._resolve()
        if not isinstance(self.model, str) or not self.model.strip():
            raise UsageError("model must be a name, a hub id, a folder, a config.json or module:factory")
        for each in dataclasses.fields(self):
            check_setting(each.name, getattr(self, each.name), flag(each.name))
        if self.batch_size * self.seq_len > MAX_TOKENS:
            raise UsageError(f"{self.batch_size} x {self.seq_len} tokens are more than any GPU holds")
        object.__setattr__(self, "offload", tuple(name for name in get_args(Offload) if name in self.offload))
        if "weights" in self.offload and self.kind == "train":
            raise UsageError("--offload weights is for frozen weights: all of them are trained here", hint="plan lora")
        if self.selective_checkpointing and self.grad_checkpointing:
            raise UsageError("--grad-checkpointing and --selective-checkpointing both say what is computed again")
        if self.kind == "prune":
            self._check_pruning()
        check_autocast(self)

    def _resolve(self) -> None:
        if self.kind == "lora":
            self._resolve_adapter()
        for name, value in self._by_itself().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _by_itself(self) -> dict[str, Any]:
        """Defaults that depend on the loop."""
        by_trainer = self.loop != "plain"
        return {
            "optimizer": "adamw-fused" if by_trainer else "adamw",
            "clip_grad": by_trainer,
            "gradient_as_bucket_view": self.loop == "memfit",
            "outputs": "dropped" if by_trainer else "kept",
            "offload": (),
            "rank": USUAL_RANK if self.adapter in LORAS else None,
        }

    def _resolve_adapter(self) -> None:
        """What has a flag of its own is said once: there, or in the config."""
        check_one_of(flag("adapter"), self.adapter, Adapter)
        config = {} if self.adapter_config is None else adapter_config_of(self.adapter_config, self.adapter)
        if self.loop == "memfit" and (self.adapter != "lora" or config):
            what = f"--adapter {self.adapter}" if self.adapter != "lora" else "--adapter-config"
            raise UsageError(f"{what}: `memfit train` has plain LoRA only", hint="--loop plain or --loop trainer")
        usual = {"rank": None, "target_modules": None, "lora_dropout": 0.0}
        for name, key in (("rank", "r"), ("target_modules", "target_modules"), ("lora_dropout", "lora_dropout")):
            if key not in config or (name == "target_modules" and isinstance(config[key], str)):
                continue
            value, own = config.pop(key), getattr(self, name)
            value = tuple(value) if isinstance(value, list) else value
            if own != usual[name] and own != value:
                raise UsageError(f"{self.said(name)} and {key}={value} of --adapter-config both say it")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "adapter_config", json.dumps(config, sort_keys=True) if config else None)

    def _check_pruning(self) -> None:
        asked = Sparsity.parse(self.sparsity_type, self.sparsity)
        object.__setattr__(self, "sparsity", asked.ratio)
        object.__setattr__(self, "sparsity_type", asked.kind)
        check_whole("--seqlen", self.seq_len, most=MAX_WINDOW)
        if self.max_gpu_memory is not None:
            object.__setattr__(self, "max_gpu_memory", str(self.max_gpu_memory))
        if self.gpu_budget_bytes == 0:
            raise UsageError(f"--max-gpu-memory {self.max_gpu_memory} is not a size", hint="sizes look like 16GiB")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, asked: Collection[str] | None = None) -> Workload:
        """From flags, a line of JSON or keywords. An unknown name is an error, and so is a setting that this job does
        not use. Where not all of them were `asked` for, the others go if they are of no use."""
        check_known(values)
        if "kind" not in values or "model" not in values:
            raise UsageError("a workload needs at least 'kind' and 'model'")
        if values["kind"] == QLORA:
            given = [name for name in (values if asked is None else asked) if name != "kind"]
            said = {name: value for name, value in values.items() if name in given or name not in AS_IN_QLORA}
            if said.get("quant") == "none":
                raise UsageError("qlora with --quant none has no quantised weights", hint="kind lora is that")
            return cls.from_mapping({**AS_IN_QLORA, **said, "kind": "lora"}, asked=given)
        made = cls(**as_fields(values))
        if made.quant != "none":
            check_quantised(made)
        check_compiled(made)
        given = [name for name in (values if asked is None else asked) if values[name] is not None]
        refuse_unlike_stored(made, given)
        refuse_unused(made, given)
        return made if asked is None else made.without_unused(but=asked)

    @classmethod
    def asked(cls, workload: Workload | None, settings: Mapping[str, Any]) -> Workload:
        """Of a call in Python: settings beside a workload replace its own."""
        if workload is None:
            return cls.from_mapping(settings)
        if not isinstance(workload, cls):
            raise UsageError(
                f"a workload is a memfit.Workload, not a {type(workload).__name__}",
                hint='settings are keywords: memfit.predict(kind="train", model="gpt2"), or **settings of a dict',
            )
        return cls.from_mapping({**workload.settings(), **settings}, asked=settings) if settings else workload

    def with_found(self, **found: Any) -> Workload:
        """The same job with what was found out about it, which needs no check."""
        made = copy.copy(self)
        vars(made).update(found)
        return made

    def changed(self, **changes: Any) -> Workload:
        """With other settings, which are checked; what was found out about the model is still known."""
        return dataclasses.replace(self, **changes).with_model_of(self)

    def with_model_of(self, other: Workload) -> Workload:
        """Not looked for again, if it is the same."""
        known = {name: found for name, found in vars(other).items() if name in ("source", "stored")}
        return self.with_found(**known) if other.model == self.model else self

    def without_unused(self, *, but: Collection[str] = ()) -> Workload:
        """The same job, what it does not use as it would be by itself."""
        usual = self.usual()
        return self.with_found(**{name: usual[name] for name, _ in unused(self) if name not in but})

    def usual(self) -> dict[str, Any]:
        """Every setting as it would be where only the kind, the model and the loop are said."""
        said = {"kind": self.kind, "model": self.model, "loop": self.loop}
        pruned = {"sparsity": Sparsity.parse(Workload.sparsity_type, None).ratio} if self.kind == "prune" else {}
        return {each.name: each.default for each in dataclasses.fields(self)} | self._by_itself() | pruned | said

    def said(self, name: str) -> str:
        """As it would be typed."""
        value = getattr(self, name)
        if isinstance(value, bool):
            return flag(name) if value else f"--no-{flag(name).removeprefix('--')}"
        return f"{flag(name)} {','.join(value) if isinstance(value, tuple) else value}"

    def settings(self) -> dict[str, Any]:
        """As JSON: only what this kind of job reads."""
        unread = {name for name, _ in unused(self) if not (self.trains and name == "parallel")}
        made = as_json({k: v for k, v in dataclasses.asdict(self).items() if k not in unread})
        if made.get("adapter_config") is not None:
            made["adapter_config"] = json.loads(made["adapter_config"])
        return made

    def document(self) -> dict[str, Any]:
        """The settings with what was left open as it is applied: to be read, and asked again."""
        applied = {"quant_compute": self.compute_precision, "kbit_prepare": self.is_kbit_prepared}
        return {name: applied.get(name, value) for name, value in self.settings().items()}

    @cached_property
    def source(self) -> ModelSource:
        """Where the model comes from, looked for once. Raises what is wrong with its name."""
        return resolve(self.model)

    @cached_property
    def stored(self) -> StoredWeights | None:
        """How the checkpoint itself is quantised. Raises what is wrong with that; who has no such model learns it from
        `source`."""
        if self.model == NO_MODEL:
            return None
        try:
            source = self.source
        except (InputError, UsageError):
            return None
        return stored_weights(source.kind, source.target)

    @property
    def other_head(self) -> Head | None:
        """What the model ends in; None is a language model's head, causal or masked."""
        head = HEAD_NAMES[self.head] if self.head else head_named(self.source)
        return None if head is not None and head.auto in ("AutoModelForCausalLM", "AutoModelForMaskedLM") else head

    @property
    def trains(self) -> bool:
        return self.kind in TRAININGS

    @property
    def is_sharded(self) -> bool:
        """By FSDP2, over several processes."""
        return self.trains and self.world_size > 1 and self.parallel == "fsdp2"

    @property
    def is_replicated(self) -> bool:
        """By DDP, over several processes."""
        return self.trains and self.world_size > 1 and self.parallel == "ddp"

    @property
    def is_padded(self) -> bool:
        """Whether a batch has rows of unequal length: `memfit train` pads no single row."""
        alone = self.batch_size == 1 or self.seq_len <= 2
        return self.padding and not (self.trains and self.loop == "memfit" and alone)

    @property
    def is_paged(self) -> bool:
        """Whether states of the optimizer may lie in managed memory."""
        return self.trains and str(self.optimizer).startswith("paged")

    @property
    def checkpointing(self) -> Checkpointing:
        return "full" if self.grad_checkpointing else "selective" if self.selective_checkpointing else "none"

    @property
    def checkpoints_by_switch(self) -> bool:
        """Whether checkpointing is what transformers has a switch for."""
        return self.grad_checkpointing and "activations" not in self.offload

    @property
    def autocast_type(self) -> str | None:
        """The dtype of the autocast region, if there is one."""
        if self.autocast is not None:
            return None if self.autocast == "none" else self.autocast
        return self.precision.removeprefix("amp-") if self.precision.startswith("amp-") else None

    @property
    def weight_precision(self) -> str:
        """Of weights that are not quantised."""
        return "fp32" if self.precision.startswith("amp-") else self.precision

    @property
    def is_compiled(self) -> bool:
        return (self.compile or self.compile_blocks) and self.kind in READ_BY["compile"]

    @property
    def looks_at_inputs(self) -> bool:
        """Of pruning: whether weights are chosen by what goes through them, too."""
        return self.method != "magnitude"

    @property
    def gpu_budget_bytes(self) -> int | None:
        """Of pruning: what it may use of the device."""
        return None if self.max_gpu_memory is None else parse_bytes(self.max_gpu_memory, flag=flag("max_gpu_memory"))

    @property
    def is_quantised(self) -> bool:
        return self.kind in READ_BY["quant"] and (self.quant != "none" or self.stored is not None)

    @property
    def few_bits(self) -> str:
        """Quantised weights in words, by the name that brought them."""
        stored = self.stored
        return f"quant {self.quant}" if stored is None else f"{self.model} ({stored.in_words()})"

    @property
    def quantised_by(self) -> str:
        """Whose quantised weights they are, where they are quantised."""
        if self.stored is not None:
            return self.stored.method
        return "torchao" if self.quant.startswith("torchao-") else "bitsandbytes"

    @property
    def eight_bit(self) -> bool:
        stored = self.stored
        return self.quant == "int8" or (stored is not None and (stored.method, stored.kind) == ("bitsandbytes", "int8"))

    @property
    def compute_precision(self) -> str:
        """Of 4-bit layers."""
        return self.quant_compute or self.weight_precision

    @property
    def is_kbit_prepared(self) -> bool:
        asked = self.quant != "dequantize" if self.kbit_prepare is None else self.kbit_prepare
        return self.is_quantised and self.kind == "lora" and asked

    @property
    def casts_when_prepared(self) -> bool:
        """peft leaves the weights beside those of torchao and GPTQ as they are."""
        by_gptq = self.stored is not None and self.stored.method == "gptq"
        return not self.quant.startswith("torchao-") and not by_gptq

    @property
    def checkpoints_when_prepared(self) -> bool:
        """Checkpointing of a plain loop is switched on by the preparation, in torch's reentrant kind."""
        return self.loop == "plain" and self.checkpoints_by_switch

    @property
    def runs_in_memfit_train(self) -> bool:
        """What bitsandbytes quantises there, or has quantised for the checkpoint."""
        if self.stored is not None:
            return self.quant in ("none", self.stored.kind) and self.stored.method == "bitsandbytes"
        return self.quant in ("none", *BY_BITSANDBYTES)

    @property
    def has_bf16(self) -> bool:
        computed = self.compute_precision if self.is_quantised else self.weight_precision
        return "bf16" in (self.weight_precision, self.autocast_type, computed)

    @property
    def without_bf16(self) -> str:
        """What is to be done on a card that has none."""
        computes = self.is_quantised and self.quant_compute == "bf16"
        if computes and self.stored is not None:
            return "the checkpoint is stored to compute in it"
        flags = {
            "--precision fp16": self.precision == "bf16",
            "--precision amp-fp16": self.precision == "amp-bf16",
            "--autocast fp16": self.autocast == "bf16",
            "--quant-compute fp16": computes,
        }
        return f"fp16 works, with {' '.join(flag for flag, wanted in flags.items() if wanted)}"

    def refusal_without_bf16(self, card: str) -> UsageError:
        """Of `memfit train`, where torch would emulate it inside bitsandbytes' layers."""
        return UsageError(
            f"{self.few_bits} in bf16: {card} has no bf16",
            hint="precision: fp16 and quant.compute: fp16, with autocast: fp16",
        )


def settings_of(kind: str) -> tuple[str, ...]:
    """The settings that a kind of job reads, some of them only beside another one: beams when decoding by beam."""
    plain = Workload(kind=kind, model="-", world_size=2)  # type: ignore[arg-type]
    read = set(plain.settings())
    for name in list(read - {"kind"}):
        if get_origin(setting_types()[name]) is Literal:
            for value in get_args(setting_types()[name]):
                read.update(dataclasses.replace(plain, **{name: value}).settings())
    return tuple(f.name for f in dataclasses.fields(Workload) if f.name in read and f.name != "kind")


# -- `--adapter-config` as text, a file or an object -------------------------------------------------------------------

OF_THE_FILE = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type")
"""Keys of a saved adapter_config.json that say nothing of the job."""
MAX_CONFIG_BYTES = 1 << 20
_PAIRS = re.compile(r",(?![^\[]*\])(?=\s*\w+=)")
"""The commas between pairs, not those inside a list."""


def adapter_config_of(said: object, adapter: str) -> dict[str, Any]:
    """As peft's config would be told it; what it may hold is for peft to say (`jobs/adapters.py`).

    --adapter vera --adapter-config r=128,d_initial=0.1
    --adapter boft --adapter-config adapter_config.json
    """
    made = dict(said) if isinstance(said, Mapping) else _config_of_text(said) if isinstance(said, str) else None
    if made is None:
        raise UsageError(f"--adapter-config {said!r} is neither KEY=VALUE,... nor a file", hint="such as r=8,alpha=16")
    kind = made.pop("peft_type", None)
    if kind is not None and str(kind).upper() != peft_type(adapter):
        raise UsageError(f"--adapter {adapter}: --adapter-config is one of {kind} (peft_type)")
    return {key: value for key, value in made.items() if key not in OF_THE_FILE}


def _config_of_text(text: str) -> dict[str, Any] | None:
    text = text.strip()
    if text.startswith("{"):
        return _json_object(text, "--adapter-config")
    if "=" in text:
        pairs = [pair.partition("=") for pair in _PAIRS.split(text)]
        return {key.strip(): _value_of_text(value.strip()) for key, _, value in pairs}
    return _config_in(Path(text)) if text else None


def _config_in(path: Path) -> dict[str, Any]:
    try:
        text = text_in(path, MAX_CONFIG_BYTES, "an adapter's config")
    except InputError as error:
        raise InputError(f"--adapter-config: {error.message}", hint="such as r=8,alpha=16") from error
    if path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InputError(f"'{path}' is not a YAML file: {str(error).splitlines()[0]}") from error
        return _settings_by_name(found, str(path))
    return _json_object(text, str(path))


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        return _settings_by_name(json.loads(text), where)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} is not JSON: {error}") from error


def _settings_by_name(found: object, where: str) -> dict[str, Any]:
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise InputError(f"{where} holds no settings by name")
    return found


def _value_of_text(text: str) -> Any:
    """A number, a truth value or null as JSON has them; [a, b] a list of names; else text."""
    known = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
    if text in known:
        return known[text]
    try:
        return json.loads(text)
    except ValueError:
        inside = text.startswith("[") and text.endswith("]")
        return [_value_of_text(each.strip()) for each in text[1:-1].split(",") if each.strip()] if inside else text
