"""The settings of a job: what each may be, what it is where nothing is said, who reads it, how it is spelled."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from memfit.errors import UnknownName, UsageError

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
Adapter = Literal[
    "lora", "dora", "adalora", "adaption-prompt", "beft", "boft", "c3a", "cartridge", "deft", "delora", "fourierft",
    "glora", "gralora", "hira", "hra", "ia3", "lily", "ln-tuning", "loha", "lokr", "miss", "oft", "osf", "p-tuning",
    "peanut", "prefix", "prompt", "psoft", "pvera", "randlora", "road", "supertuning", "tinylora",
    "trainable-tokens", "unilora", "vblora", "vera",
]  # fmt: skip
PruneMethod = Literal["magnitude", "wanda", "sparsegpt", "ria"]

KINDS: tuple[str, ...] = get_args(Kind)
TRAININGS = ("train", "lora")
WITHOUT_BACKWARD = tuple(kind for kind in KINDS if kind not in TRAININGS)
PRUNE_METHODS: tuple[str, ...] = get_args(PruneMethod)
QLORA = "qlora"
AS_IN_QLORA: dict[str, Any] = {
    "quant": "nf4", "double_quant": True, "quant_compute": "bf16", "kbit_prepare": True, "grad_checkpointing": True,
    "optimizer": "paged-adamw",
}  # fmt: skip
"""LoRA as the QLoRA paper (arXiv 2305.14314) does it; its optimizer is paged, with states of 32 bits."""
ADAPTERS: tuple[str, ...] = get_args(Adapter)
LORAS = ("lora", "dora")
PROMPTS = ("cartridge", "p-tuning", "prefix", "prompt")
"""Trained tokens before the text: no layer is changed."""
NO_TARGETS = (*PROMPTS, "adaption-prompt")
NO_RANK = (
    *NO_TARGETS, "beft", "boft", "c3a", "fourierft", "ia3", "ln-tuning", "osf", "road", "trainable-tokens",
)  # fmt: skip
OWN_TARGETS = ("adaption-prompt", "ia3", "ln-tuning", "trainable-tokens")
"""Which layers they are made for, peft knows of each family of models."""
BEYOND_BLOCKS = ("adaption-prompt", "cartridge", "lily", "prefix", "tinylora")
"""What they are made of is shared by blocks, or grows with their number: a few blocks do not tell of all."""
USUAL_RANK = 16
MAX_SEQ_LEN, MAX_TOKENS, MAX_WINDOW, MAX_GROUP = 1 << 24, 1 << 32, 1 << 20, 1 << 10
UNSTRUCTURED = "unstructured"
HALF = 0.5
_N_OF_M = re.compile(r"(\d{1,4}):(\d{1,4})")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Those of `memfit plan`, by their names in Python and in JSON; `HELP` says of each what it is."""

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
    quant_compute: QuantCompute | None = None
    kbit_prepare: bool | None = None
    """Of a quantised LoRA: peft's `prepare_model_for_kbit_training`, which makes every 16-bit weight fp32. None is
    yes, as peft's documentation has it, unless weights become 16-bit."""
    attention: Attention = "sdpa"
    padding: bool = False
    head: HeadName | None = None
    target_len: int | None = None
    images: int | None = None
    image_size: str | None = None
    loop: Loop = "plain"
    loss: Loss = "full"
    """chunked: the same loss and gradients, the logits never whole."""
    loss_chunk: int = 256
    outputs: Outputs | None = None
    """kept: the loop's variable holds what the model gave, logits too, until the next forward pass has ended. None is
    what the loop does by itself: a plain one keeps them, as everybody writes it, the others drop them."""
    optimizer: Optimizer | None = None
    """None is what the loop takes by itself: torch's foreach AdamW, or the Trainer's fused one."""
    weight_decay: float = 0.0
    """Only whether there is any changes memory, and only of SGD, which then adds it to a copy of the gradients."""
    momentum: float = 0.0
    grad_checkpointing: bool = False
    use_cache: bool = False
    selective_checkpointing: bool = False
    compile: bool = False
    compile_blocks: bool = False
    offload: tuple[Offload, ...] = ()
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
    adapter_config: str | None = None
    """What else its config says, as JSON; given as an object, as KEY=VALUE,... or as a file."""
    rank: int | None = None
    target_modules: tuple[str, ...] | None = None
    lora_dropout: float = 0.0
    adapter_dtype: AdapterDtype = "fp32"
    """fp32, as peft does whatever the base model has; same as the base model otherwise."""
    new_tokens: int = 128
    decoding: Decoding = "greedy"
    num_beams: int = 4
    cache: Cache = "dynamic"
    method: PruneMethod = "wanda"
    sparsity: float | None = None
    sparsity_type: str = UNSTRUCTURED
    nsamples: int = 128
    dataset: str = "wikitext2"
    """wikitext2, c4, builtin, or the path of a file or folder: which text it is does not change the memory."""
    max_gpu_memory: str | None = None
    alloc_conf: str = ""


HELP = {
    "model": "Preset (`memfit models`), hub id, folder, config.json or module:factory.",
    "batch_size": "Sequences in one forward pass.",
    "seq_len": "Tokens in a sequence.",
    "precision": "Type of the weights; amp is fp32 weights under autocast.",
    "autocast": "Type of the autocast region, whatever the weights are. Default: none, or what an amp precision says.",
    "quant": "Base model's linear layers in 4 or 8 bits, by bitsandbytes or torchao, as from_pretrained loads them; "
    "dequantize makes a quantised checkpoint 16-bit.",
    "double_quant": "Quantise the scales of 4-bit weights too.",
    "quant_compute": "Type in which 4-bit layers compute. Default: that of the other weights.",
    "kbit_prepare": "peft's prepare_model_for_kbit_training: 16-bit weights become fp32. Default: with --quant.",
    "attention": "Fused kernels, or the plain formula.",
    "padding": "Rows of a batch differ in length: the mask forces other attention kernels.",
    "loop": "A bare PyTorch loop, the Hugging Face Trainer, or `memfit train`.",
    "loss": "How logits become a loss; chunked is the same loss, some tokens at a time.",
    "loss_chunk": "Tokens at a time, for --loss chunked.",
    "head": "What the model ends in. Default: what its config.json names.",
    "target_len": "Tokens that an encoder-decoder writes. Default: 128.",
    "images": "Pictures in a row, for a model of pictures and text. Default: 1.",
    "image_size": "WIDTHxHEIGHT of a picture. Default: what the model's processor makes of any.",
    "outputs": "Whether the loop's variable keeps the model's outputs through backward. Default: a plain loop does.",
    "optimizer": "adamw is torch's foreach. Default: what the loop takes by itself.",
    "weight_decay": "Weight decay; of sgd it takes a copy of the gradients in each step.",
    "momentum": "Of sgd: a state as large as the weights.",
    "grad_checkpointing": "Recompute a block's activations in the backward pass.",
    "use_cache": "Leave config.use_cache on: the forward pass also keeps keys and values, as for generation.",
    "selective_checkpointing": "Recompute only what is cheap: matrix products and attention are kept.",
    "compile": "torch.compile the whole model.",
    "compile_blocks": "torch.compile each block by itself (regional compilation).",
    "offload": "What lies in host memory: optimizer, activations, weights (frozen ones).",
    "world_size": "GPUs that train together; the plan is of one of them.",
    "parallel": "How: DDP has all on each, FSDP2 shards.",
    "gradient_as_bucket_view": "Gradients lie in DDP's buckets. Default: what the loop does by itself.",
    "grad_accum": "Forward and backward passes before one optimizer step.",
    "clip_grad": "Clip the norm of the gradients. Default: what the loop does by itself.",
    "adapter": "Which adapter of peft: lora, dora, ia3, loha, lokr, vera, adalora, oft, boft, prefix, prompt, ...",
    "adapter_config": "What else its config says: KEY=VALUE,... or a JSON or YAML file.",
    "rank": "Rank of the adapters. Default: 16 of LoRA, else what peft has.",
    "target_modules": "Modules with adapters: a,b or the flag repeated. Default: all linear layers of a block.",
    "lora_dropout": "Dropout in front of the adapters.",
    "adapter_dtype": "Type of the adapters' weights; fp32 is what peft makes.",
    "new_tokens": "Tokens to generate.",
    "decoding": "How the next token is chosen.",
    "num_beams": "Beams, when decoding by beam.",
    "cache": "How the key-value cache grows.",
    "method": "How weights are chosen that go.",
    "sparsity": "Share of the weights that goes. Default: a half, or what the type says.",
    "sparsity_type": "unstructured, or N:M: N of each M consecutive weights go.",
    "nsamples": "Windows of text to calibrate on.",
    "dataset": "Text to calibrate on; it does not change the memory.",
    "max_gpu_memory": "What may be used of the card, as 16GiB. Default: all of it.",
    "alloc_conf": "What PYTORCH_CUDA_ALLOC_CONF would hold, such as expandable_segments:True.",
}
"""What each is for, in one sentence."""
LIMITS: dict[str, dict[str, Any]] = {
    "batch_size": {"most": 1 << 20}, "seq_len": {"most": MAX_SEQ_LEN}, "target_len": {"most": MAX_SEQ_LEN},
    "images": {"most": 1 << 10}, "loss_chunk": {"most": MAX_SEQ_LEN}, "grad_accum": {"most": 1 << 16},
    "world_size": {"most": 1 << 16}, "rank": {"most": 1 << 16}, "lora_dropout": {"least": 0, "below": 1},
    "weight_decay": {"least": 0}, "momentum": {"least": 0, "below": 1},
    "new_tokens": {"most": MAX_SEQ_LEN}, "num_beams": {"most": 1 << 10}, "nsamples": {"most": 1 << 16},
    "alloc_conf": {"empty": True},
}  # fmt: skip
CHECKED_ELSEWHERE = ("model", "image_size", "adapter_config", "sparsity", "sparsity_type", "max_gpu_memory")
"""With what they are for."""
_OF_TRAINING = (
    "optimizer", "weight_decay", "momentum", "grad_checkpointing", "selective_checkpointing", "offload", "grad_accum",
    "clip_grad", "loop", "loss", "loss_chunk", "outputs", "world_size", "parallel", "gradient_as_bucket_view",
)  # fmt: skip
READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_OF_TRAINING, TRAININGS),
    **dict.fromkeys(
        ("adapter", "adapter_config", "rank", "target_modules", "lora_dropout", "adapter_dtype"), ("lora",)
    ),
    **dict.fromkeys(("new_tokens", "decoding", "num_beams", "cache"), ("generate",)),
    **dict.fromkeys(("use_cache", "head", "target_len", "images", "image_size"), ("forward", "train", "lora")),
    "compile": ("forward", "train", "lora", "generate"),
    "compile_blocks": ("forward", "train", "lora"),
    **dict.fromkeys(("quant", "double_quant", "quant_compute"), ("forward", "lora", "generate")),
    "kbit_prepare": ("lora",),
    "autocast": ("forward", "train", "lora", "generate"),
    **dict.fromkeys(("batch_size", "padding"), ("forward", "train", "lora", "generate")),
    **dict.fromkeys(("method", "sparsity", "sparsity_type", "nsamples", "dataset", "max_gpu_memory"), ("prune",)),
}
"""Other settings are read by all kinds."""


# -- what the value of a setting must be, said with the name by which the user called it: a flag or a config's key -----

MOST = 1 << 31
LARGEST = 1e300
"""Beyond it a whole number is no fraction of this machine."""


def check_setting(name: str, value: object, said: str) -> None:
    """A single one, `said` by a flag or by a config's key."""
    if name == "target_modules":
        named = isinstance(value, tuple) and value and all(isinstance(each, str) and each for each in value)
        if value is not None and not named:
            raise UsageError(f"{said} {value!r} is not a list of module names", hint="such as [q_proj, v_proj]")
    elif name == "offload":
        if not isinstance(value, tuple):
            raise UsageError(f"{said} {value!r} is not a list", hint="such as [optimizer, activations]")
        for each in value:
            check_one_of(said, each, Offload)
    elif name not in CHECKED_ELSEWHERE:
        check_by_type(said, value, _types()[name], **LIMITS.get(name, {}))


def check_by_type(key: str, value: object, hint: Any, **limits: Any) -> None:
    """As the setting's own type has it; `limits` are those of a number."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if (value is None and NoneType in kinds) or (isinstance(value, bool) and bool in kinds):
        return
    kind = [each for each in kinds if each is not NoneType][-1]
    if get_origin(kind) is Literal:
        check_one_of(key, value, kind)
    elif check := {bool: check_yes_or_no, str: check_text, int: check_whole, float: check_number}.get(kind):
        check(key, value, **limits)


def check_one_of(key: str, value: object, literal: Any) -> None:
    allowed = get_args(literal)
    if value not in allowed:
        raise UsageError(f"{key} {value!r} is not one of {', '.join(allowed)}")


def check_whole(key: str, value: object, *, least: int = 1, most: int = MOST) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UsageError(f"{key} {shortened(value)} is not a whole number between {least} and {most:,}")


def is_huge(value: object) -> bool:
    return isinstance(value, int) and abs(value) > LARGEST


def shortened(value: object) -> str:
    """A number of hundreds of digits by the first of them."""
    return f"{str(value)[:20]}..." if is_huge(value) else repr(value)


def check_seed(key: str, value: object) -> None:
    check_whole(key, value, least=0, most=(1 << 32) - 1)


def check_number(
    key: str, value: object, *, least: float | None = None, above: float | None = None, below: float | None = None
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise UsageError(f"{key} {shortened(value)} is not a number" + (" of this size" if is_huge(value) else ""))
    limits = (
        ("at least", least, least is None or value >= least),
        ("above", above, above is None or value > above),
        ("below", below, below is None or value < below),
    )
    if not all(holds for _, _, holds in limits):
        wanted = " and ".join(f"{word} {limit:g}" for word, limit, _ in limits if limit is not None)
        raise UsageError(f"{key} {value!r} is not {wanted}")


def check_text(key: str, value: object, *, empty: bool = False) -> None:
    if not (isinstance(value, str) and (empty or value.strip())):
        raise UsageError(f"{key} {value!r} is not text")


def check_yes_or_no(key: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UsageError(
            f"{key} is true or false, not {value!r}", hint="write true or false without quotes, or leave it out"
        )


@cache
def _types() -> dict[str, Any]:
    return get_type_hints(Settings)


def kinds_that_read(names: Collection[str]) -> list[str]:
    """Kinds of jobs that have all these settings."""
    return [kind for kind in KINDS if all(kind in READ_BY.get(name, KINDS) for name in names)]


# -- how it is spelled -------------------------------------------------------------------------------------------------

ALIASES = {"seq_len": ("seqlen", "context_length"), "method": ("prune_method",), "sparsity": ("sparsity_ratio",)}
"""Other names that people know a setting by, on the command line and in a line of `plan batch`."""


def plain_name(name: str) -> str:
    """A setting by whatever spelling: `context-length` is `seq_len`."""
    name = name.replace("-", "_")
    return next((field for field, aliases in ALIASES.items() if name in aliases), name)


def plain_value(name: str, value: Any) -> Any:
    """Names out of a list may have underscores; names of modules may be one text with commas."""
    kind = setting_types().get(name)
    if isinstance(value, str) and get_origin(kind) is Literal:
        return value.replace("_", "-")
    return split_names([value]) if isinstance(value, str) and get_origin(kind) is tuple else value


def split_names(values: list[str]) -> list[str]:
    """`a,b` and a repeated flag are the same list."""
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


@cache
def setting_types() -> dict[str, Any]:
    """What each setting is when it is given: `None` stands only for its absence."""
    return {name: without_none(annotation) for name, annotation in _types().items()}


def without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, UnionType):
        (inner,) = (arg for arg in get_args(annotation) if arg is not type(None))
        return inner
    return annotation


def check_known(values: Mapping[str, Any]) -> None:
    known = [f.name for f in dataclasses.fields(Settings)]
    for name in values:
        if name not in known:
            if str(name).startswith(("load_in_", "bnb_4bit_")):
                raise UsageError(f"'{name}' is no setting of a plan", hint="quant, double_quant, quant_compute say it")
            raise UnknownName("setting", str(name), known, more=f"settings: {', '.join(known)}")


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace tuples by lists, for JSON."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def as_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn JSON values back into field types."""
    made = dict(values)
    for name in ("target_modules", "offload"):
        if isinstance(made.get(name), list):
            made[name] = tuple(made[name])
    clip = made.get("clip_grad")
    if isinstance(clip, (int, float)) and not isinstance(clip, bool):
        if clip != clip:
            raise UsageError("--clip-grad nan is neither yes or no nor a norm to clip at")
        made["clip_grad"] = clip > 0  # a norm to clip at: what it is does not change the memory
    return made


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def peft_type(adapter: str) -> str:
    """As peft calls it: DoRA is a LoRA whose config says so."""
    others = {"dora": "LORA", "prefix": "PREFIX_TUNING", "prompt": "PROMPT_TUNING"}
    return others.get(adapter, adapter.replace("-", "_").upper())


# -- how much is pruned ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sparsity:
    """How much is removed. With a group it is `removed` of each `group` consecutive columns of a row, else `ratio` of
    each row (or of the matrix, as the method has it)."""

    ratio: float = HALF
    removed: int | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, (int, float)) or not 0 <= self.ratio <= 1:
            raise UsageError(
                f"--sparsity-ratio {self.ratio!r} is not a share between 0 and 1",
                hint="0.5 removes half of the weights",
            )
        if (self.removed is None) != (self.group is None):
            raise UsageError("a group of columns needs both numbers: how many are removed, and of how many")
        if self.removed is None or self.group is None:
            return
        share = self.removed / self.group
        assert 0 <= share <= 1
        if not math.isclose(self.ratio, share, rel_tol=0, abs_tol=1e-6):
            raise UsageError(
                f"--sparsity-ratio {self.ratio:g} is not {self.kind}, which removes {share:g}",
                hint="leave --sparsity-ratio out, or use --sparsity-type unstructured",
            )

    @classmethod
    def parse(cls, kind: str = UNSTRUCTURED, ratio: float | None = None) -> Sparsity:
        """`unstructured`, or `N:M`: N weights REMOVED of each M (as in the public wanda; hardware people count those
        that are kept, which is the same for 2:4 and 4:8). Without a ratio it is a half, or N/M."""
        text = str(kind).strip().lower()
        if ratio is not None and ratio == 1:
            raise UsageError("--sparsity-ratio 1 removes every weight")
        if text == UNSTRUCTURED:
            return cls(ratio=HALF if ratio is None else ratio)
        match = _N_OF_M.fullmatch(text)
        if match is None:
            raise UsageError(
                f"--sparsity-type {kind!r} is neither unstructured nor N:M", hint="2:4 removes 2 of each 4 weights"
            )
        removed, group = int(match[1]), int(match[2])
        if not 0 < removed < group <= MAX_GROUP:
            raise UsageError(
                f"--sparsity-type {kind} cannot be: N of each M weights are removed, 0 < N < M <= {MAX_GROUP}"
            )
        return cls(ratio=removed / group if ratio is None else ratio, removed=removed, group=group)

    @property
    def kind(self) -> str:
        return UNSTRUCTURED if self.group is None else f"{self.removed}:{self.group}"

    @property
    def groups(self) -> tuple[int, int] | None:
        """How many of how many consecutive columns are removed."""
        return None if self.removed is None or self.group is None else (self.removed, self.group)

    def with_removed(self, removed: int) -> Sparsity:
        """Another count for one block; none and all are possible here."""
        assert self.group is not None
        return dataclasses.replace(self, removed=removed, ratio=removed / self.group)
