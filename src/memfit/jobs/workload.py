"""A job's settings, every one checked, with the defaults that the plan shows back.

A line of `plan batch`, the flags of `plan`, and the arguments of `memfit.predict` are all one of these.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from memfit.errors import InputError, UnknownName, UsageError
from memfit.jobs.adapter_names import (
    LORAS,
    NO_RANK,
    NO_TARGETS,
    PROMPTS,
    USUAL_RANK,
    Adapter,
    adapter_config_of,
)
from memfit.jobs.checks import check_names, check_one_of, check_whole, check_yes_or_no
from memfit.jobs.pruning.settings import Method, PruneSettings, Sparsity
from memfit.models.config_check import HEAD_NAMES, Head
from memfit.models.registry import ModelSource, head_named, resolve
from memfit.models.stored_weights import StoredWeights, stored_weights
from memfit.units import parse_bytes

Kind = Literal["forward", "train", "lora", "generate", "prune"]
Precision = Literal["fp32", "bf16", "fp16", "amp-bf16", "amp-fp16"]
"""amp: fp32 weights under autocast, and for fp16 a gradient scaler."""
Attention = Literal["sdpa", "eager"]
Quant = Literal["none", "nf4", "fp4", "int8", "torchao-int8", "torchao-int4", "torchao-float8", "dequantize"]
BY_BITSANDBYTES = ("nf4", "fp4", "int8")
QuantCompute = Literal["bf16", "fp16", "fp32"]
AutocastType = Literal["none", "bf16", "fp16"]
Optimizer = Literal[
    "adamw", "adamw-fused", "adamw-single", "sgd", "adafactor", "adamw-8bit", "paged-adamw-8bit", "paged-adamw",
    "lion-8bit", "adamw-8bit-torchao", "adamw-4bit-torchao",
]  # fmt: skip
Loop = Literal["plain", "trainer", "memfit"]
"""A bare loop, the Hugging Face Trainer, or `memfit train`."""
Loss = Literal["full", "chunked"]
Outputs = Literal["kept", "dropped"]
HeadName = Literal[
    "causal-lm", "masked-lm", "seq2seq-lm", "sequence-classification", "token-classification", "question-answering",
    "image-classification",
]  # fmt: skip
Checkpointing = Literal["none", "full", "selective"]
Offload = Literal["optimizer", "activations", "weights"]
Parallel = Literal["ddp", "fsdp2"]
Cache = Literal["dynamic", "static"]
Decoding = Literal["greedy", "sample", "beam"]
AdapterDtype = Literal["fp32", "same"]

KINDS: tuple[str, ...] = get_args(Kind)
QLORA = "qlora"
NO_MODEL = "-"
"""In place of one where only the settings matter."""
AS_IN_QLORA: dict[str, Any] = {
    "quant": "nf4", "double_quant": True, "quant_compute": "bf16", "kbit_prepare": True, "grad_checkpointing": True,
    "optimizer": "paged-adamw",
}  # fmt: skip
"""LoRA as the QLoRA paper (arXiv 2305.14314) does it; its optimizer is paged, with states of 32 bits."""
MAX_BATCH, MAX_SEQ_LEN, MAX_ACCUM, MAX_RANK = 1 << 20, 1 << 24, 1 << 16, 1 << 16
MAX_TOKENS, MAX_WORLD = 1 << 32, 1 << 16


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A job by its settings, those of `memfit plan`; what is wrong with one is told when it is made."""

    kind: Kind
    model: str
    batch_size: int = 1
    seq_len: int = 2048
    precision: Precision = "bf16"
    autocast: AutocastType | None = None
    """The type of the autocast region. None is what the precision says: amp-bf16 is fp32 weights in one of bf16."""
    quant: Quant = "none"
    """Linear layers of the base model in 4 or 8 bits, by bitsandbytes or torchao, as `from_pretrained` loads them. Of a
    checkpoint that is quantised already, none is as it is stored, and dequantize makes it 16-bit while it is loaded."""
    double_quant: bool = False
    """Scales of 4-bit weights are quantised too."""
    quant_compute: QuantCompute | None = None
    """The type in which 4-bit layers compute. None is that of the other weights."""
    kbit_prepare: bool | None = None
    """Of a quantised LoRA: peft's `prepare_model_for_kbit_training`, which makes every 16-bit weight fp32. None is
    yes, as peft's documentation has it, unless weights become 16-bit."""
    attention: Attention = "sdpa"
    padding: bool = False
    """Whether rows of a batch differ in length: a mask then forces other attention kernels."""
    head: HeadName | None = None
    """What the model ends in; None is what its config.json names."""
    target_len: int | None = None
    """Tokens of the text that an encoder-decoder writes; None is 128 of one."""
    images: int | None = None
    """Pictures in a row of text; None is one of a model that reads both."""
    image_size: str | None = None
    """WIDTHxHEIGHT; None is what the model's processor makes of any picture."""
    loop: Loop = "plain"
    loss: Loss = "full"
    """chunked: the same loss and gradients, the logits never whole."""
    loss_chunk: int = 256
    """Tokens at a time."""
    outputs: Outputs | None = None
    """kept: the loop's variable holds what the model gave, logits too, until the next forward pass has ended. None is
    what the loop does by itself: a plain one keeps them, as everybody writes it, the others drop them."""
    optimizer: Optimizer | None = None
    """None is what the loop takes by itself: torch's foreach AdamW, or the Trainer's fused one."""
    grad_checkpointing: bool = False
    use_cache: bool = False
    """Whether config.use_cache is left on: a forward pass then keeps its keys and values beside the logits."""
    selective_checkpointing: bool = False
    """Of a block, keep what is dear to compute (matrix products, attention) and compute the rest again."""
    compile: bool = False
    """torch.compile of the whole model."""
    compile_blocks: bool = False
    """torch.compile of each block by itself: regional compilation."""
    offload: tuple[Offload, ...] | None = None
    """What lies on the host; weights are the frozen ones of LoRA."""
    grad_accum: int = 1
    clip_grad: bool | None = None
    """None is what the loop does by itself: the Trainer clips."""
    world_size: int = 1
    """Processes that train together, one a GPU; the plan is of one of them, and batch_size is its own."""
    parallel: Parallel = "ddp"
    gradient_as_bucket_view: bool | None = None
    """Of DDP: gradients lie in its buckets. None is what the loop does by itself: only `memfit train` does it."""
    adapter: Adapter = "lora"
    """Of peft."""
    adapter_config: str | None = None
    """What else its config says, as JSON; given as an object, as KEY=VALUE,... or as a file."""
    rank: int | None = None
    """None is 16 of LoRA, and of the others what peft has for them."""
    target_modules: tuple[str, ...] | None = None
    """None means all linear layers of a block."""
    lora_dropout: float = 0.0
    adapter_dtype: AdapterDtype = "fp32"
    """fp32, as peft does whatever the base model has; same as the base model otherwise."""
    new_tokens: int = 128
    decoding: Decoding = "greedy"
    num_beams: int = 4
    cache: Cache = "dynamic"
    method: Method = PruneSettings.method
    sparsity: float | None = None
    """None is a half, or what the type says."""
    sparsity_type: str = "unstructured"
    nsamples: int = PruneSettings.nsamples
    dataset: str = PruneSettings.dataset
    """Which text it is does not change the memory."""
    max_gpu_memory: str | None = None
    """What pruning may use of the device; None is the whole card."""
    alloc_conf: str = ""

    def __post_init__(self) -> None:
        self._resolve()
        if not isinstance(self.model, str) or not self.model:
            raise UsageError("model must be a name, a hub id, a folder, a config.json or module:factory")
        for each in dataclasses.fields(self):
            check_setting(each.name, getattr(self, each.name), flag(each.name))
        if self.batch_size * self.seq_len > MAX_TOKENS:
            raise UsageError(f"{self.batch_size} x {self.seq_len} tokens are more than any GPU holds")
        _share("lora_dropout", self.lora_dropout)
        self._check_offload()
        if self.selective_checkpointing and self.grad_checkpointing:
            raise UsageError("--grad-checkpointing and --selective-checkpointing both say what is computed again")
        if self.kind == "prune":
            self._check_pruning()
        check_names(flag("target_modules"), self.target_modules)
        if not isinstance(self.alloc_conf, str):
            raise UsageError(f"{flag('alloc_conf')} must be text, not {self.alloc_conf!r}")
        self._check_autocast()

    def _check_autocast(self) -> None:
        """What has two ways to be said is said once."""
        if self.autocast is None:
            return
        if self.precision.startswith("amp-") and f"amp-{self.autocast}" != self.precision:
            raise UsageError(
                f"--precision {self.precision} and --autocast {self.autocast} contradict each other",
                hint="--precision fp32, bf16 or fp16 is the type of the weights, --autocast that of the region",
            )
        narrow = self.kind == "lora" and self.adapter_dtype == "same" and self.quant != "int8"
        if (self.kind == "train" or narrow) and self.precision == self.autocast == "fp16":
            raise UsageError(
                "--precision fp16 --autocast fp16: the gradient scaler refuses fp16 gradients",
                hint="--adapter-dtype fp32" if narrow else "--precision amp-fp16 has fp32 weights",
            )

    def check_quantised(self) -> None:
        """What goes together with quantised weights, in a plan as in the libraries."""
        if not self.is_quantised:
            return
        if self.quant == "dequantize" and self.stored is None:
            raise UsageError(f"--quant dequantize: {self.model} is not quantised", hint="leave --quant out")
        if self.quant == "torchao-int4" and (self.kind == "lora" or self.weight_precision != "bf16"):
            what = "has no backward pass" if self.kind == "lora" else "is for bf16 weights alone"
            raise UsageError(f"--quant torchao-int4 {what}", hint="--quant torchao-int8, or nf4")
        clash = {
            "--loop memfit": self.trains and self.loop == "memfit" and not self.runs_in_memfit_train,
            "--world-size": self.trains and self.world_size > 1,
            "--offload weights": self.trains and "weights" in (self.offload or ()),
            "--selective-checkpointing": self.trains and self.selective_checkpointing,
            f"--adapter {self.adapter}": self.kind == "lora" and self.adapter != "lora",
            "--adapter-config": self.kind == "lora" and self.adapter_config is not None,
        }
        for setting in (name for name, here in clash.items() if here):
            what = f"--quant {self.quant}" if self.stored is None else f"{self.model} ({self.stored.in_words()})"
            raise UsageError(f"{what} is not planned together with {setting}", hint=f"without {setting}")

    def check_inputs(self) -> None:
        """Lengths and pictures that the model has no use for, by its config.json alone."""
        given = [name for name in ("target_len", "images", "image_size", "padding") if getattr(self, name)]
        if self.kind == "prune" or not given:
            return
        head = self.other_head
        reads, name = "text" if head is None else head.reads, self.model
        lacking = {
            "target_len": None if reads == "text to text" else f"{name} is no encoder-decoder",
            "images": None if reads == "pictures and text" else f"{name} does not read pictures beside text",
            "image_size": None if reads.startswith("pictures") else f"{name} reads no pictures",
            "padding": None if reads == "text" else f"rows of {name} are planned of one length",
        }
        for setting in (each for each in given if lacking[each]):
            raise UsageError(f"{flag(setting)} has no effect: {lacking[setting]}", hint=f"leave {flag(setting)} out")

    def check_compiled(self) -> None:
        """What torch.compile is planned together with."""
        if not self.is_compiled:
            return
        said = "--compile" if self.compile else "--compile-blocks"
        if self.kind == "generate":
            raise UsageError(
                f"{said} is not planned for generate: torch.compile(model).generate runs the model as it is, and what"
                " transformers compiles for a static cache are CUDA graphs, with pools of memory of their own",
                hint=f"without {said}",
            )
        if self.compile and self.compile_blocks:
            raise UsageError("--compile and --compile-blocks both say what torch.compile is given")
        clash = {
            "--loop memfit": self.trains and self.loop == "memfit",
            "--loop trainer": self.compile_blocks and self.trains and self.loop == "trainer",
            "--world-size": self.trains and self.world_size > 1,
            "--offload": self.trains and bool(self.offload),
            "--selective-checkpointing": self.trains and self.selective_checkpointing,
            "--loss chunked": self.trains and self.loss == "chunked",
            "quantised weights": self.is_quantised,
            f"--adapter {self.adapter}": self.kind == "lora" and self.adapter != "lora",
        }
        for setting in (name for name, here in clash.items() if here):
            raise UsageError(f"{said} is not planned together with {setting}", hint=f"without {setting}")

    def _resolve(self) -> None:
        if self.kind == "lora":
            self._resolve_adapter()
        for name, value in self._by_itself().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _by_itself(self) -> dict[str, Any]:
        """What a loop takes where nothing is said."""
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
                raise UsageError(f"{self._said(name)} and {key}={value} of --adapter-config both say it")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "adapter_config", json.dumps(config, sort_keys=True) if config else None)

    def _check_offload(self) -> None:
        if not isinstance(self.offload, tuple):
            raise UsageError(f"{flag('offload')} {self.offload!r} is not a list", hint="such as optimizer,activations")
        for each in self.offload:
            check_one_of(flag("offload"), each, Offload)
        object.__setattr__(self, "offload", tuple(name for name in get_args(Offload) if name in self.offload))
        if "weights" in self.offload and self.kind == "train":
            raise UsageError("--offload weights is for frozen weights: all of them are trained here", hint="plan lora")

    def _check_pruning(self) -> None:
        asked = Sparsity.parse(self.sparsity_type, self.sparsity)
        object.__setattr__(self, "sparsity", asked.ratio)
        if self.max_gpu_memory is not None:
            object.__setattr__(self, "max_gpu_memory", str(self.max_gpu_memory))
            parse_bytes(self.max_gpu_memory, flag=flag("max_gpu_memory"))
        _ = self.pruning

    @property
    def pruning(self) -> PruneSettings:
        """As `memfit prune` would be told it."""
        return PruneSettings(
            model=self.model, method=self.method, sparsity=Sparsity.parse(self.sparsity_type, self.sparsity),
            nsamples=self.nsamples, seqlen=self.seq_len, dataset=self.dataset,
        )  # fmt: skip

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

    def with_found(self, **found: Any) -> Workload:
        """The same job with what was found out about it, which needs no check."""
        made = copy.copy(self)
        vars(made).update(found)
        return made

    @property
    def trains(self) -> bool:
        return self.kind in ("train", "lora")

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
    def checkpointing(self) -> Checkpointing:
        return "full" if self.grad_checkpointing else "selective" if self.selective_checkpointing else "none"

    @property
    def checkpoints_by_switch(self) -> bool:
        """Whether checkpointing is what transformers has a switch for."""
        return self.grad_checkpointing and "activations" not in (self.offload or ())

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
    def is_quantised(self) -> bool:
        return self.kind in _READ_BY["quant"] and (self.quant != "none" or self.stored is not None)

    @property
    def is_compiled(self) -> bool:
        return (self.compile or self.compile_blocks) and self.kind in _READ_BY["compile"]

    @property
    def compute_precision(self) -> str:
        """Of 4-bit layers."""
        return self.quant_compute or self.weight_precision

    @property
    def has_bf16(self) -> bool:
        computed = self.compute_precision if self.is_quantised else self.weight_precision
        return "bf16" in (self.weight_precision, self.autocast_type, computed)

    @property
    def without_bf16(self) -> str:
        """What is to be done on a card that has none."""
        if not self.is_quantised or self.quant_compute != "bf16":
            return "fp16 works"
        stored = self.stored is not None
        return "the checkpoint is stored to compute in it" if stored else "fp16 works, with --quant-compute fp16"

    def refusal_without_bf16(self, card: str) -> UsageError:
        """Of `memfit train`, where torch would emulate it inside bitsandbytes' layers."""
        return UsageError(
            f"{self.few_bits} in bf16: {card} has no bf16",
            hint="precision: fp16 and quant.compute: fp16, with autocast: fp16",
        )

    @property
    def is_kbit_prepared(self) -> bool:
        asked = self.quant != "dequantize" if self.kbit_prepare is None else self.kbit_prepare
        return self.is_quantised and self.kind == "lora" and asked

    @property
    def runs_in_memfit_train(self) -> bool:
        """What bitsandbytes quantises there, or has quantised for the checkpoint."""
        if self.stored is not None:
            return self.quant in ("none", self.stored.kind) and self.stored.method == "bitsandbytes"
        return self.quant in ("none", *BY_BITSANDBYTES)

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
    def casts_when_prepared(self) -> bool:
        """peft leaves the weights beside those of torchao and GPTQ as they are."""
        by_gptq = self.stored is not None and self.stored.method == "gptq"
        return not self.quant.startswith("torchao-") and not by_gptq

    @property
    def _checkpoints_when_prepared(self) -> bool:
        """Checkpointing of a plain loop is switched on by the preparation, in torch's reentrant kind."""
        return self.loop == "plain" and self.checkpoints_by_switch

    @property
    def gpu_budget_bytes(self) -> int | None:
        """Of pruning: what it may use of the device."""
        return None if self.max_gpu_memory is None else parse_bytes(self.max_gpu_memory, flag=flag("max_gpu_memory"))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, asked: Collection[str] | None = None) -> Workload:
        """From flags, a line of JSON or keywords. An unknown name is an error, and so is a setting that this job does
        not use. Where not all of them were `asked` for, the others go if they are of no use."""
        _check_names(values)
        if "kind" not in values or "model" not in values:
            raise UsageError("a workload needs at least 'kind' and 'model'")
        if values["kind"] == QLORA:
            given = [name for name in (values if asked is None else asked) if name != "kind"]
            said = {name: value for name, value in values.items() if name in given or name not in AS_IN_QLORA}
            if said.get("quant") == "none":
                raise UsageError("qlora with --quant none has no quantised weights", hint="kind lora is that")
            return cls.from_mapping({**AS_IN_QLORA, **said, "kind": "lora"}, asked=given)
        made = cls(**_as_fields(values))
        if made.quant != "none":
            made.check_quantised()
        made.check_compiled()
        given = [name for name in (values if asked is None else asked) if values[name] is not None]
        made._refuse_unlike_stored(given)
        made._refuse_unused(given)
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

    def unused(self) -> Iterator[tuple[str, str]]:
        """Settings that change nothing about this job, and why."""
        for name, kinds in _READ_BY.items():
            if self.kind not in kinds:
                yield name, f"it is a setting of {' and '.join(kinds)}, not of {self.kind}"
        if self.kind == "lora":
            yield from self._unused_by_adapter()
        yield from self._unused_by_quant()
        if self.kind == "generate" and self.decoding != "beam":
            yield "num_beams", f"{self.decoding} decoding has no beams, --decoding beam has"
        if self.trains and self.loss != "chunked":
            yield "loss_chunk", f"a {self.loss} loss has no chunks, --loss chunked has"
        if self.trains and self.loop != "plain" and self.outputs == "kept":
            yield "outputs", f"{'the Trainer' if self.loop == 'trainer' else 'memfit train'} drops them before backward"
        if self.trains and self.use_cache and (self.loop != "plain" or self.checkpointing != "none"):
            yield "use_cache", f"{'the Trainer' if self.loop != 'plain' else 'checkpointing'} switches it off"
        if self.trains and self.world_size == 1:
            yield "parallel", "there is a single process"
        if self.trains and (self.world_size == 1 or self.parallel != "ddp"):
            alone = self.world_size == 1
            yield "gradient_as_bucket_view", "there is a single process" if alone else f"{self.parallel} has no buckets"

    def _unused_by_quant(self) -> Iterator[tuple[str, str]]:
        if self.kind not in _READ_BY["quant"]:
            return
        if self.quant not in ("nf4", "fp4"):
            why = "it is for --quant nf4 or fp4; a checkpoint that is stored so says it in its config.json"
            yield from ((name, why) for name in ("double_quant", "quant_compute"))
        if self.kind == "lora" and not self.is_quantised:
            yield "kbit_prepare", "no weights are quantised, --quant nf4 does it"
        elif self.kind == "lora" and not self.casts_when_prepared and not self._checkpoints_when_prepared:
            yield "kbit_prepare", f"peft casts nothing beside {self.few_bits}, and switches no checkpointing on here"
        if self.kind == "lora" and self.quant == "int8":
            yield "adapter_dtype", "peft makes adapters of 8-bit layers in fp32"

    def _unused_by_adapter(self) -> Iterator[tuple[str, str]]:
        if self.adapter in NO_RANK:
            yield "rank", f"--adapter {self.adapter} has no rank"
        if self.adapter in NO_TARGETS:
            yield "target_modules", f"--adapter {self.adapter} is put into no layers of one's choice"
        if self.adapter in PROMPTS:
            yield "adapter_dtype", f"the tokens of --adapter {self.adapter} have the type that peft gives them"
        if self.adapter not in (*LORAS, "adalora"):
            yield "lora_dropout", f"--adapter {self.adapter} is no LoRA: its own is a key of --adapter-config"

    def _refuse_unlike_stored(self, given: Collection[str]) -> None:
        """What bitsandbytes has stored is loaded as its config.json says, whatever is asked."""
        if self.kind not in _READ_BY["quant"] or self.quant not in ("nf4", "fp4") or self.stored is None:
            return
        loaded = self.stored.by_bitsandbytes
        for name in ("double_quant", "quant_compute"):
            if name in given and self.quant == loaded.get("quant") and getattr(self, name) != loaded[name]:
                raise UsageError(
                    f"{self._said(name)}: {self.model} is stored as {self.stored.as_loaded()}",
                    hint=f"leave {flag(name)} out",
                )

    def _refuse_unused(self, given: Collection[str]) -> None:
        """How processes work together is no mistake where there is one: a plan notes it."""
        for name, why in self.unused():
            if name in given and name not in _OF_PROCESSES:
                raise UsageError(f"{self._said(name)} has no effect: {why}", hint=f"leave {flag(name)} out")

    def without_effect(self) -> Iterator[str]:
        """In words: settings that are not what they would be by themselves, and change nothing all the same."""
        usual = self._usual()
        for name, why in self.unused():
            if getattr(self, name) != usual[name]:
                yield f"{self._said(name)} has no effect: {why}"
        if self.autocast == "none" and self.kind in _READ_BY["autocast"]:
            yield "--autocast none has no effect: nothing else asks for a region"
        if self.autocast is not None and self.autocast == self.weight_precision and self.kind in _READ_BY["autocast"]:
            yield f"--autocast {self.autocast} changes only what is made in fp32: weights are {self.autocast} already"
        if self.kind == "lora" and self.adapter_dtype == "same" and self.weight_precision == "fp32":
            yield f"{self._said('adapter_dtype')} has no effect: the base model is fp32 too"
        if self.kind == "prune":
            yield from self._without_effect_on_pruning(usual)

    def _without_effect_on_pruning(self, usual: Mapping[str, Any]) -> Iterator[str]:
        """What a run obeys, while its memory stays the same."""
        if not self.pruning.needs_data:
            for name in ("nsamples", "seq_len", "dataset"):
                if getattr(self, name) != usual[name]:
                    yield f"{self._said(name)} has no effect: pruning by magnitude reads no text"
        elif self.dataset != usual["dataset"]:
            yield f"{self._said('dataset')} does not change the memory, whatever the text"
        if self.sparsity not in (usual["sparsity"], Sparsity.parse(self.sparsity_type, None).ratio):
            yield f"{self._said('sparsity')} does not change the memory: zeros take as much"

    def without_unused(self, *, but: Collection[str] = ()) -> Workload:
        """The same job, what it does not use as it would be by itself."""
        usual = self._usual()
        return self.with_found(**{name: usual[name] for name, _ in self.unused() if name not in but})

    def _usual(self) -> dict[str, Any]:
        """Every setting as it would be where only the kind, the model and the loop are said."""
        said = {"kind": self.kind, "model": self.model, "loop": self.loop}
        pruned = {"sparsity": Sparsity.parse(Workload.sparsity_type, None).ratio} if self.kind == "prune" else {}
        return {each.name: each.default for each in dataclasses.fields(self)} | self._by_itself() | pruned | said

    def _said(self, name: str) -> str:
        """As it would be typed."""
        value = getattr(self, name)
        if isinstance(value, bool):
            return flag(name) if value else f"--no-{flag(name).removeprefix('--')}"
        return f"{flag(name)} {','.join(value) if isinstance(value, tuple) else value}"

    def settings(self) -> dict[str, Any]:
        """As JSON: only what this kind of job reads."""
        unread = {name for name, _ in self.unused() if not (self.trains and name == "parallel")}
        made = {k: v for k, v in dataclasses.asdict(self).items() if k not in unread}
        for name in ("target_modules", "offload"):
            if isinstance(made.get(name), tuple):
                made[name] = list(made[name])
        if made.get("adapter_config") is not None:
            made["adapter_config"] = json.loads(made["adapter_config"])
        return made

    def document(self) -> dict[str, Any]:
        """The settings with what was left open as it is applied: to be read, and asked again."""
        applied = {"quant_compute": self.compute_precision, "kbit_prepare": self.is_kbit_prepared}
        return {name: applied.get(name, value) for name, value in self.settings().items()}


_CHOICES: dict[str, Any] = {
    "kind": Kind, "precision": Precision, "attention": Attention, "optimizer": Optimizer, "parallel": Parallel,
    "adapter": Adapter, "adapter_dtype": AdapterDtype, "loop": Loop, "loss": Loss, "outputs": Outputs, "head": HeadName,
    "cache": Cache, "decoding": Decoding, "method": Method, "quant": Quant, "quant_compute": QuantCompute,
    "autocast": AutocastType,
}  # fmt: skip
_MOST = {
    "batch_size": MAX_BATCH, "seq_len": MAX_SEQ_LEN, "grad_accum": MAX_ACCUM, "loss_chunk": MAX_SEQ_LEN,
    "world_size": MAX_WORLD, "rank": MAX_RANK, "target_len": MAX_SEQ_LEN, "images": 1 << 10,
    "new_tokens": MAX_SEQ_LEN, "num_beams": 1 << 10,
}  # fmt: skip
_YES_OR_NO = (
    "grad_checkpointing", "selective_checkpointing", "clip_grad", "padding", "gradient_as_bucket_view", "use_cache",
    "double_quant", "kbit_prepare", "compile", "compile_blocks",
)  # fmt: skip
_LEFT_OPEN = ("autocast", "quant_compute", "kbit_prepare", "rank", "head", "target_len", "images")
"""None is what other settings make of it."""
_OF_TRAINING = (
    "optimizer", "grad_checkpointing", "selective_checkpointing", "offload", "grad_accum", "clip_grad", "loop", "loss",
    "loss_chunk", "outputs", "world_size", "parallel", "gradient_as_bucket_view",
)  # fmt: skip
_READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_OF_TRAINING, ("train", "lora")),
    **dict.fromkeys(
        ("adapter", "adapter_config", "rank", "target_modules", "lora_dropout", "adapter_dtype"), ("lora",)
    ),
    **dict.fromkeys(("new_tokens", "decoding", "num_beams", "cache"), ("generate",)),
    **dict.fromkeys(("use_cache", "head", "target_len", "images", "image_size"), ("forward", "train", "lora")),
    **dict.fromkeys(("compile", "compile_blocks"), ("forward", "train", "lora", "generate")),
    **dict.fromkeys(("quant", "double_quant", "quant_compute"), ("forward", "lora", "generate")),
    "kbit_prepare": ("lora",),
    "autocast": ("forward", "train", "lora", "generate"),
    **dict.fromkeys(("batch_size", "padding"), ("forward", "train", "lora", "generate")),
    **dict.fromkeys(("method", "sparsity", "sparsity_type", "nsamples", "dataset", "max_gpu_memory"), ("prune",)),
}


def check_setting(name: str, value: object, said: str) -> None:
    """A single one, `said` by a flag or by a config's key."""
    if value is None and name in _LEFT_OPEN:
        return
    if name in _CHOICES:
        check_one_of(said, value, _CHOICES[name])
    elif name in _MOST:
        check_whole(said, value, most=_MOST[name])
    elif name in _YES_OR_NO:
        check_yes_or_no(said, value)


_OF_PROCESSES = ("parallel", "gradient_as_bucket_view")


def kinds_that_read(names: Collection[str]) -> list[str]:
    """Kinds of jobs that have all these settings."""
    return [kind for kind in KINDS if all(kind in _READ_BY.get(name, KINDS) for name in names)]


def _check_names(values: Mapping[str, Any]) -> None:
    known = [f.name for f in dataclasses.fields(Workload)]
    for name in values:
        if name not in known:
            if str(name).startswith(("load_in_", "bnb_4bit_")):
                raise UsageError(f"'{name}' is no setting of a plan", hint="quant, double_quant, quant_compute say it")
            raise UnknownName("setting", str(name), known, more=f"settings: {', '.join(known)}")


def _as_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON has no words for."""
    made = dict(values)
    for name in ("target_modules", "offload"):
        if isinstance(made.get(name), list):
            made[name] = tuple(made[name])
    clip = made.get("clip_grad")
    if isinstance(clip, (int, float)) and not isinstance(clip, bool):
        made["clip_grad"] = clip > 0  # a norm to clip at: what it is does not change the memory
    return made


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _share(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise UsageError(f"{flag(name)} {value!r} is not a share between 0 and 1")
