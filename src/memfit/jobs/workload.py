"""A job's settings, every one checked, with the defaults that the plan shows back.

A line of `plan batch`, the flags of `plan`, and the arguments of `memfit.predict` are all one of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from memfit.errors import UnknownName, UsageError
from memfit.jobs.pruning.settings import Method, PruneSettings, Sparsity
from memfit.units import parse_bytes

Kind = Literal["forward", "train", "lora", "generate", "prune"]
Precision = Literal["fp32", "bf16", "fp16", "amp-bf16", "amp-fp16"]
"""amp: fp32 weights under autocast, and for fp16 a gradient scaler."""
Attention = Literal["sdpa", "eager"]
Optimizer = Literal["adamw", "adamw-fused", "adamw-single", "sgd", "adafactor", "adamw-8bit"]
Loop = Literal["plain", "trainer"]
Loss = Literal["full"]
Cache = Literal["dynamic", "static"]
Decoding = Literal["greedy", "sample", "beam"]
AdapterDtype = Literal["fp32", "same"]

KINDS: tuple[str, ...] = get_args(Kind)
MAX_BATCH, MAX_SEQ_LEN, MAX_ACCUM, MAX_RANK = 1 << 20, 1 << 24, 1 << 16, 1 << 16
MAX_TOKENS = 1 << 32


@dataclass(frozen=True, kw_only=True)
class Workload:
    kind: Kind
    model: str
    batch_size: int = 1
    seq_len: int = 2048
    precision: Precision = "bf16"
    attention: Attention = "sdpa"
    padding: bool = False
    """Whether rows of a batch differ in length: a mask then forces other attention kernels."""
    loop: Loop = "plain"
    loss: Loss = "full"
    optimizer: Optimizer | None = None
    """None is what the loop takes by itself: torch's foreach AdamW, or the Trainer's fused one."""
    grad_checkpointing: bool = False
    grad_accum: int = 1
    clip_grad: bool | None = None
    """None is what the loop does by itself: the Trainer clips."""
    rank: int = 16
    target_modules: tuple[str, ...] | None = None
    """None means all linear layers of a block."""
    lora_dropout: float = 0.0
    adapter_dtype: AdapterDtype = "fp32"
    """fp32, as peft does whatever the base model has; same as the base model otherwise."""
    new_tokens: int = 128
    decoding: Decoding = "greedy"
    num_beams: int = 4
    cache: Cache = "dynamic"
    method: Method = "wanda"
    sparsity: float | None = None
    """None is a half, or what the type says."""
    sparsity_type: str = "unstructured"
    nsamples: int = 128
    dataset: str = "wikitext2"
    """Which text it is does not change the memory."""
    max_gpu_memory: str | None = None
    """What pruning may use of the device; None is the whole card."""
    alloc_conf: str = ""

    def __post_init__(self) -> None:
        self._resolve()
        for name, literal in _CHOICES.items():
            _one_of(name, getattr(self, name), get_args(literal))
        if not isinstance(self.model, str) or not self.model:
            raise UsageError("model must be a name, a hub id, a folder, a config.json or module:factory")
        _whole("batch_size", self.batch_size, MAX_BATCH)
        _whole("seq_len", self.seq_len, MAX_SEQ_LEN)
        _whole("grad_accum", self.grad_accum, MAX_ACCUM)
        _whole("rank", self.rank, MAX_RANK)
        if self.batch_size * self.seq_len > MAX_TOKENS:
            raise UsageError(f"{self.batch_size} x {self.seq_len} tokens are more than any GPU holds")
        _whole("new_tokens", self.new_tokens, MAX_SEQ_LEN)
        _whole("num_beams", self.num_beams, 1 << 10)
        for name in ("grad_checkpointing", "clip_grad", "padding"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{flag(name)} is yes or no, not {getattr(self, name)!r}")
        _share("lora_dropout", self.lora_dropout)
        if self.kind == "prune":
            self._check_pruning()
        _names(self.target_modules)
        if not isinstance(self.alloc_conf, str):
            raise UsageError(f"{flag('alloc_conf')} must be text, not {self.alloc_conf!r}")

    def _resolve(self) -> None:
        if self.kind == "prune":  # it has micro-batches of its own, of whole windows
            object.__setattr__(self, "batch_size", 1)
            object.__setattr__(self, "padding", False)
        by_trainer = self.loop == "trainer"
        if self.optimizer is None:
            object.__setattr__(self, "optimizer", "adamw-fused" if by_trainer else "adamw")
        if self.clip_grad is None:
            object.__setattr__(self, "clip_grad", by_trainer)

    def _check_pruning(self) -> None:
        asked = Sparsity.parse(self.sparsity_type, self.sparsity)
        object.__setattr__(self, "sparsity", asked.ratio)
        size = self.max_gpu_memory
        if size is not None:
            object.__setattr__(self, "max_gpu_memory", str(parse_bytes(str(size), flag=flag("max_gpu_memory"))))
        PruneSettings(
            model=self.model, method=self.method, sparsity=asked, nsamples=self.nsamples, seqlen=self.seq_len,
            dataset=self.dataset,
        )  # fmt: skip

    @property
    def trains(self) -> bool:
        return self.kind in ("train", "lora")

    @property
    def autocast(self) -> str | None:
        """The dtype of the autocast region, if there is one."""
        return self.precision.removeprefix("amp-") if self.precision.startswith("amp-") else None

    @property
    def weight_precision(self) -> str:
        return "fp32" if self.autocast else self.precision

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Workload:
        """From a line of JSON: unknown names are errors with a suggestion, never ignored."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise UnknownName("setting", str(name), known, more=f"settings: {', '.join(known)}")
        if "kind" not in values or "model" not in values:
            raise UsageError("a workload needs at least 'kind' and 'model'")
        made = dict(values)
        if isinstance(made.get("target_modules"), list):
            made["target_modules"] = tuple(made["target_modules"])
        clip = made.get("clip_grad")
        if isinstance(clip, (int, float)) and not isinstance(clip, bool):
            made["clip_grad"] = clip > 0  # a norm to clip at: what it is does not change the memory
        return cls(**made)

    def settings(self) -> dict[str, Any]:
        """As JSON: only what this kind of job reads."""
        unread = {name for name, kinds in _READ_BY.items() if self.kind not in kinds}
        if self.decoding != "beam":
            unread.add("num_beams")
        made = {k: v for k, v in dataclasses.asdict(self).items() if k not in unread}
        if isinstance(made.get("target_modules"), tuple):
            made["target_modules"] = list(made["target_modules"])
        return made


_CHOICES: dict[str, Any] = {
    "kind": Kind, "precision": Precision, "attention": Attention, "optimizer": Optimizer,
    "adapter_dtype": AdapterDtype, "loop": Loop, "loss": Loss, "cache": Cache, "decoding": Decoding, "method": Method,
}  # fmt: skip
_READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("optimizer", "grad_checkpointing", "grad_accum", "clip_grad", "loop", "loss"), ("train", "lora")),
    **dict.fromkeys(("rank", "target_modules", "lora_dropout", "adapter_dtype"), ("lora",)),
    **dict.fromkeys(("new_tokens", "decoding", "num_beams", "cache"), ("generate",)),
    **dict.fromkeys(("batch_size", "padding"), ("forward", "train", "lora", "generate")),
    **dict.fromkeys(("method", "sparsity", "sparsity_type", "nsamples", "dataset", "max_gpu_memory"), ("prune",)),
}


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{flag(name)} {value!r} is not one of {', '.join(allowed)}")


def _whole(name: str, value: object, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise UsageError(f"{flag(name)} {value!r} is not a whole number between 1 and {most:,}")


def _share(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise UsageError(f"{flag(name)} {value!r} is not a share between 0 and 1")


def _names(value: object) -> None:
    fine = value is None or (isinstance(value, tuple) and value and all(isinstance(n, str) and n for n in value))
    if not fine:
        raise UsageError(f"{flag('target_modules')} {value!r} is not a list of module names")
